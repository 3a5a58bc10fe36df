//! Changes to a header that the caller must write to disk.

/// A write to the header.
///
/// The caller writes the changes of a list in their order. Each write must be durable before the
/// next one starts, so a flush is needed between them.
///
/// The list may be interrupted at any point, even inside a write that the disk tears at a multiple
/// of 512 bytes. After that, either the old keys or the new keys open the disk. No other program
/// may modify the header during the writes. Afterwards, the caller must read the header again.
#[derive(Clone, PartialEq, Eq)]
pub struct Change {
    /// Offset in bytes from the start of the header.
    pub at: u64,
    /// The bytes to write; their number is not always a multiple of the sector size.
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

    /// Overwrites `len` bytes at `at` with random bytes.
    pub(crate) fn wipe(at: u64, len: u64) -> crate::Result<Change> {
        let mut bytes = vec![0; len as usize];
        crate::random::fill(&mut bytes)?;
        Ok(Change { at, bytes })
    }
}
