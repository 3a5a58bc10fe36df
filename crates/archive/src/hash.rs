//! What a stripe is known by.

use crate::elsewhere::elsewhere;
use std::fmt;

/// BLAKE3 of a stripe's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Hash(pub [u8; 32]);

impl Hash {
    pub const LEN: usize = 32;

    pub fn of(bytes: &[u8]) -> Hash {
        Hash(*blake3::hash(bytes).as_bytes())
    }

    /// The same, on a thread where nobody else waits; gives the bytes back.
    pub async fn taking<B>(bytes: B) -> (Hash, B)
    where
        B: AsRef<[u8]> + Send + 'static,
    {
        elsewhere(move || (Hash::of(bytes.as_ref()), bytes)).await
    }

    /// Where the stripe is, from its archive's directory: `stripes/ab/abcdef...`.
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
