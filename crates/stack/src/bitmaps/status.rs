//! The status of a bitmap.

/// The status of a bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitmapStatus {
    /// Name of the bitmap, which no other bitmap of the disk has.
    pub name: String,
    /// Bytes per bit.
    pub granularity: u64,
    /// Number of bytes that count as changed.
    pub dirty: u64,
    /// Creation time in nanoseconds since 1970, if known.
    pub since: Option<u64>,
    /// Why everything counts as changed, if so.
    pub problem: Option<String>,
    /// The successor to which the bitmap may advance, identified by a backup's instant.
    ///
    /// The instant is in nanoseconds since 1970.
    pub successor: Option<u64>,
}

impl BitmapStatus {
    /// Creates the status of a bitmap's file, with the creation time in its header.
    pub(super) fn of_file(name: String, granularity: u64, since: u64) -> BitmapStatus {
        BitmapStatus {
            name,
            granularity,
            dirty: 0,
            since: Some(since).filter(|since| *since > 0),
            problem: None,
            successor: None,
        }
    }

    /// Sets the number of dirty bytes and the problem for a disk of `size` bytes.
    pub(super) fn says(self, dirty: u64, problem: Option<String>, size: u64) -> BitmapStatus {
        BitmapStatus {
            dirty: match problem {
                Some(_) => size,
                None => dirty,
            },
            problem,
            ..self
        }
    }
}
