//! Changes of a header, for a caller to write.

/// A write. Those of a list are to be written in its order, each one durable
/// before the next one is started (a flush between them).
///
/// Whatever of that is done when it is cut, even in the midst of a write that
/// a disk tears at multiples of 512 bytes, either the keys from before open
/// the disk or those from after do. Nobody else may change the header
/// meanwhile; afterwards it is to be read again.
#[derive(Clone, PartialEq, Eq)]
pub struct Change {
    /// Bytes from the header's start.
    pub at: u64,
    /// What to write there; not always whole sectors.
    pub bytes: Vec<u8>,
}

impl std::fmt::Debug for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Change({} bytes at {})", self.bytes.len(), self.at)
    }
}

impl Change {
    pub(crate) fn new(at: u64, bytes: impl Into<Vec<u8>>) -> Change {
        Change {
            at,
            bytes: bytes.into(),
        }
    }

    /// Random bytes over `len` at `at`.
    pub(crate) fn wipe(at: u64, len: u64) -> crate::Result<Change> {
        let mut bytes = vec![0; len as usize];
        crate::random::fill(&mut bytes)?;
        Ok(Change { at, bytes })
    }
}
