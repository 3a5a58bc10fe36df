//! Creates headers.

use crate::change::Change;
use crate::effort::Effort;
use crate::error::{Error, Result};
use crate::hash::Hash;
use crate::header::Header;
use crate::kdf::Kdf;
use crate::random;
use crate::secret::{Passphrase, VolumeKey};
use crate::slot::Digest;
use crate::{v1, v2};

/// Options for a new header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// LUKS version: 1 or 2. QEMU supports only version 1.
    pub version: u32,
    /// Hash of the volume key digest and, in version 1, of the key derivation.
    pub hash: Hash,
    /// Sector size in bytes: 512, 1024, 2048 or 4096. Version 1 allows only 512.
    pub sector_size: u32,
    /// Cost of the key derivation for the first key slot.
    pub effort: Effort,
}

impl Default for Options {
    /// Options for headers that QEMU creates and reads.
    fn default() -> Options {
        Options {
            version: 1,
            hash: Hash::default(),
            sector_size: 512,
            effort: Effort::default(),
        }
    }
}

impl Options {
    /// Returns an error if no header can have these options.
    pub fn check(&self) -> Result<()> {
        check(self)
    }

    /// Returns the size in bytes of the header and its key slots; the payload starts after them.
    pub fn header_len(&self) -> u64 {
        match self.version {
            1 => v1::PAYLOAD_AT,
            _ => v2::PAYLOAD_AT,
        }
    }
}

/// A newly created header.
pub struct Created {
    /// Bytes to write at the start of the file; the payload follows them. Most of the bytes are 0.
    pub bytes: Vec<u8>,
    /// Key that encrypts the payload.
    pub key: VolumeKey,
}

impl std::fmt::Debug for Created {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Created({} bytes, ..)", self.bytes.len())
    }
}

/// Creates a header for AES-256 in XTS mode with a new random volume key.
///
/// `passphrase` opens the header's first key slot. Blocks for about twice the effort's time.
pub fn create(options: &Options, passphrase: &Passphrase) -> Result<Created> {
    const KEY_BYTES: usize = 64;
    check(options)?;
    let mut key = vec![0; KEY_BYTES];
    random::fill(&mut key)?;
    let key = VolumeKey::new(key)?;
    let hash = options.hash;
    let (digest, iterations) = digest(options, &key)?;
    let mut bytes = match options.version {
        1 => v1::empty(hash, &digest, iterations, KEY_BYTES)?,
        _ => v2::empty(hash, &digest, iterations, options.sector_size)?,
    };
    let header = Header::read(&bytes)?;
    for Change { at, bytes: part } in header.add_key(&key, passphrase, &options.effort)?.changes {
        crate::bytes::put(&mut bytes, at as usize, &part);
    }
    Ok(Created { bytes, key })
}

fn check(options: &Options) -> Result<()> {
    let size = options.sector_size;
    match options.version {
        1 if size == 512 => Ok(()),
        1 => Err(Error::unsupported(format!(
            "LUKS1 has sectors of 512 bytes, not of {size}: ask for LUKS2"
        ))),
        2 if matches!(size, 512 | 1024 | 2048 | 4096) => Ok(()),
        2 => Err(Error::unsupported(format!(
            "LUKS2 has sectors of 512, 1024, 2048 or 4096 bytes, not of {size}"
        ))),
        version => Err(Error::unsupported(format!(
            "LUKS version {version} cannot be made, only 1 and 2"
        ))),
    }
}

fn digest(options: &Options, key: &VolumeKey) -> Result<(Digest, u32)> {
    let hash = options.hash;
    let len = match options.version {
        1 => v1::fields::DIGEST_LEN,
        _ => hash.len(),
    };
    let kdf = options.effort.digest(hash, len);
    let iterations = match kdf {
        Kdf::Pbkdf2 { iterations, .. } => iterations,
        Kdf::Argon2 { .. } => 0,
    };
    let salt = random::array()?;
    let mut value = vec![0; len];
    kdf.derive(key.bytes(), &salt, &mut value)?;
    Ok((Digest { kdf, salt, value }, iterations))
}
