//! Key derivation: derives the key that encrypts a slot's key material from a passphrase.

use crate::error::{Error, Result};
use crate::hash::Hash;
use argon2::{Algorithm, Argon2, Block, Params, Version};
use std::time::Duration;
use zeroize::Zeroize;

/// Maximum total time to try a passphrase on all key slots, as estimated by [`Kdf::time`].
///
/// A hostile header can therefore keep a thread busy for only about a minute.
pub const MAX_TIME: Duration = Duration::from_secs(60);
/// Maximum time to check a volume key against the header's digest.
pub const MAX_DIGEST_TIME: Duration = Duration::from_secs(10);
/// Maximum memory of one key derivation: 1 GiB, cryptsetup's default.
pub const MAX_MEMORY_KIB: u32 = 1 << 20;
/// Maximum number of Argon2 lanes, as in cryptsetup.
pub const MAX_LANES: u32 = 4;
/// Approximate time that Argon2 needs for 1 KiB in one pass, on one processor of a 2020s server.
const TIME_OF_KIB: Duration = Duration::from_nanos(1000);

/// A key derivation function and its parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kdf {
    /// PBKDF2 of RFC 8018.
    Pbkdf2 { hash: Hash, iterations: u32 },
    /// Argon2 of RFC 9106, version 0x13.
    Argon2 {
        variant: Variant,
        passes: u32,
        memory_kib: u32,
        lanes: u32,
    },
}

/// The variants of Argon2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    I,
    Id,
}

impl Kdf {
    /// Returns the name of the function in version 2 headers.
    pub fn name(&self) -> &'static str {
        match self {
            Kdf::Pbkdf2 { .. } => "pbkdf2",
            Kdf::Argon2 {
                variant: Variant::I,
                ..
            } => "argon2i",
            Kdf::Argon2 {
                variant: Variant::Id,
                ..
            } => "argon2id",
        }
    }

    /// Returns the reason why this derivation must not run, if there is one.
    ///
    /// The reason is that a parameter is invalid or demands too much. `out` is the number of bytes
    /// to derive, and `most` is the time limit for that.
    pub fn objection(&self, out: usize, most: Duration) -> Option<String> {
        match *self {
            Kdf::Pbkdf2 { iterations: 0, .. } => return Some("it has no iterations".into()),
            Kdf::Pbkdf2 { .. } => {}
            Kdf::Argon2 {
                passes,
                memory_kib,
                lanes,
                ..
            } => {
                if memory_kib > MAX_MEMORY_KIB {
                    return Some(format!(
                        "it needs {memory_kib} KiB of memory, and at most {MAX_MEMORY_KIB} are given"
                    ));
                }
                if lanes > MAX_LANES {
                    return Some(format!(
                        "it has {lanes} threads, and at most {MAX_LANES} are supported"
                    ));
                }
                if let Err(why) = Params::new(memory_kib, passes, lanes, None) {
                    return Some(format!("its parameters are impossible: {why}"));
                }
            }
        }
        (self.time(out) > most).then(|| {
            format!(
                "it would take about {} s, and at most {} are spent",
                self.time(out).as_secs(),
                most.as_secs()
            )
        })
    }

    /// Estimates the time to derive `out` bytes.
    pub fn time(&self, out: usize) -> Duration {
        match *self {
            Kdf::Pbkdf2 { hash, iterations } => {
                let blocks = out.div_ceil(hash.len()) as u32;
                hash.time_of_iteration() * blocks * iterations
            }
            Kdf::Argon2 {
                passes, memory_kib, ..
            } => (TIME_OF_KIB * memory_kib).saturating_mul(passes),
        }
    }

    /// Fills `out` with the derived key.
    ///
    /// The caller must have checked that [`Kdf::objection`] returns `None`.
    pub fn derive(&self, secret: &[u8], salt: &[u8], out: &mut [u8]) -> Result<()> {
        match *self {
            Kdf::Pbkdf2 { hash, iterations } => {
                hash.pbkdf2(secret, salt, iterations, out);
                Ok(())
            }
            Kdf::Argon2 {
                variant,
                passes,
                memory_kib,
                lanes,
            } => {
                let failed = |why| Error::damaged(format!("Argon2 cannot be run: {why}"));
                let algorithm = match variant {
                    Variant::I => Algorithm::Argon2i,
                    Variant::Id => Algorithm::Argon2id,
                };
                let params =
                    Params::new(memory_kib, passes, lanes, Some(out.len())).map_err(failed)?;
                let mut memory = Memory::new(params.block_count())?;
                Argon2::new(algorithm, Version::V0x13, params)
                    .hash_password_into_with_memory(secret, salt, out, memory.0.as_mut_slice())
                    .map_err(failed)
            }
        }
    }
}

/// Working memory of Argon2: blocks of 1 KiB each, which are wiped when they are dropped.
pub struct Memory(Vec<Block>);

impl Memory {
    /// Allocates `blocks` blocks. Fails if there is not enough memory.
    pub fn new(blocks: usize) -> Result<Memory> {
        let mut memory = Vec::new();
        memory
            .try_reserve_exact(blocks)
            .map_err(|_| Error::NoMemory {
                mib: (blocks as u64).div_ceil(1024),
            })?;
        memory.resize(blocks, Block::default());
        Ok(Memory(memory))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // Wipes the slice. Zeroizing the `Vec` would wipe the memory twice.
        self.0.as_mut_slice().iter_mut().zeroize();
    }
}
