//! What is told of a bitmap.

/// What is told of a bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitmapStatus {
    pub name: String,
    /// Bytes that a bit stands for.
    pub granularity: u64,
    /// Bytes that count as changed.
    pub dirty: u64,
    /// When it was begun (nanoseconds since 1970), if that is known.
    pub since: Option<u64>,
    /// Why all counts as changed, if that is so.
    pub problem: Option<String>,
    /// What it may advance to: a backup's instant (nanoseconds since 1970), by which it is known.
    pub successor: Option<u64>,
}

impl BitmapStatus {
    /// Of a file, with the time in its header.
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

    /// What it says of a disk of so many bytes, if that can be believed.
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
