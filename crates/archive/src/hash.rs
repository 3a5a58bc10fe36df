//! Hashes that identify stripes.

use crate::elsewhere::elsewhere;
use std::fmt;

/// The BLAKE3 hash of a stripe's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Hash(pub [u8; 32]);

impl Hash {
    /// Length of a hash in bytes.
    pub const LEN: usize = 32;

    /// Returns the hash of these bytes.
    pub fn of(bytes: &[u8]) -> Hash {
        Hash(*blake3::hash(bytes).as_bytes())
    }

    /// Computes the hash on a thread for blocking work, and returns the bytes with it.
    pub async fn taking<B>(bytes: B) -> (Hash, B)
    where
        B: AsRef<[u8]> + Send + 'static,
    {
        elsewhere(move || (Hash::of(bytes.as_ref()), bytes)).await
    }

    /// Returns the path of the stripe relative to its archive: `stripes/ab/abcdef...`.
    pub fn object(&self) -> String {
        let hex = self.to_string();
        format!("stripes/{}/{hex}", &hex[..2])
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}
