//! Encryption options, by their names in `qemu-img create -o`.

use super::choice::choose;
use crate::{Error, Format, Result};
use fathom_luks::{Effort, Hash, Passphrase};
use std::time::Duration;

/// Encryption of a new image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Encryption {
    /// Whether guest data is encrypted. Always true for a luks image.
    pub is_wanted: bool,
    /// Parameters of the LUKS header.
    pub luks: fathom_luks::Options,
}

/// Option names of luks images. The encryption options of qcow2 images begin with [`PREFIX`] and
/// include a format.
pub(crate) const NAMES: [&str; 8] = [
    "cipher-alg",
    "cipher-mode",
    "hash-alg",
    "iter-time",
    "ivgen-alg",
    "sector-size",
    "size",
    "version",
];

/// Prefix of the encryption options of qcow2 images.
pub(crate) const PREFIX: &str = "encrypt.";

impl Encryption {
    /// Returns the defaults for this format.
    pub(super) fn new(format: Format) -> Encryption {
        Encryption {
            is_wanted: format == Format::Luks,
            ..Encryption::default()
        }
    }

    /// Sets an option, whose name is given without its prefix.
    pub(super) fn set(&mut self, name: &str, value: &str) -> Result<()> {
        let luks = &mut self.luks;
        let number = |unit: &str| {
            let parsed = value.parse::<u32>().ok().filter(|n| *n > 0);
            parsed
                .ok_or_else(|| Error::usage(format!("{name}: '{value}' is not a number of {unit}")))
        };
        match name {
            "format" => self.is_wanted = choose(name, value, &[("luks", true)])?,
            "cipher-alg" => choose(name, value, &[("aes-256", ())])?,
            "cipher-mode" => choose(name, value, &[("xts", ())])?,
            "ivgen-alg" => choose(name, value, &[("plain64", ())])?,
            "hash-alg" => {
                let all = [Hash::Sha1, Hash::Sha256, Hash::Sha512].map(|hash| (hash.name(), hash));
                luks.hash = choose(name, value, &all)?;
            }
            "iter-time" => {
                luks.effort = Effort {
                    time: Duration::from_millis(number("milliseconds")?.into()),
                    ..luks.effort
                };
            }
            "sector-size" => luks.sector_size = number("bytes")?,
            _ => luks.version = choose(name, value, &[("1", 1), ("2", 2)])?,
        }
        Ok(())
    }

    /// Creates an encryption header with its key slots, which QEMU and cryptsetup can read. Takes
    /// seconds.
    pub(crate) fn header(&self, key: Option<&Passphrase>) -> Result<Vec<u8>> {
        let Some(key) = key else {
            return Err(Error::usage(
                "an encrypted image needs a key; add --key file:PATH, for example",
            ));
        };
        let created = fathom_luks::create(&self.luks, key);
        let created = created.map_err(|error| Error::usage(error.to_string()))?;
        Ok(created.bytes)
    }

    /// Length of the encryption header in bytes.
    pub(crate) fn header_len(&self) -> u64 {
        self.luks.header_len()
    }
}
