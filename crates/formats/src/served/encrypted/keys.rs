//! Keys that unlock encrypted images.

use crate::luks::Part;
use fathom_luks::{Error, Header, Passphrase, VolumeKey};
use parking_lot::Mutex;
use std::fmt;
use std::sync::Arc;

/// See [`Header::fingerprint`].
pub(in crate::served) type Fingerprint = [u8; 32];

/// Serialises key derivation in this process, since each may take 1 GiB of memory.
static DERIVING: Mutex<()> = Mutex::new(());

/// Maximum number of headers whose volume keys are remembered.
const MOST_KNOWN: usize = 16;

/// The passphrases given by users.
///
/// Clones share the derived keys. Each slow derivation therefore happens once, however often the
/// image is opened.
#[derive(Clone, Default)]
pub struct Keys {
    passphrases: Arc<[Passphrase]>,
    known: Arc<Mutex<Vec<Known>>>,
}

/// A derived volume key.
struct Known {
    of: Fingerprint,
    key: Arc<VolumeKey>,
}

impl Keys {
    /// Creates keys from passphrases. Volume keys are derived at their first use.
    pub fn new(passphrases: Vec<Passphrase>) -> Keys {
        Keys {
            passphrases: passphrases.into(),
            known: Arc::default(),
        }
    }

    /// Returns whether there are no passphrases.
    pub fn is_empty(&self) -> bool {
        self.passphrases.is_empty()
    }

    /// Returns the first passphrase, which encrypts images created for the user.
    pub fn first(&self) -> Option<&Passphrase> {
        self.passphrases.first()
    }

    /// Returns an image's volume key, by the first passphrase that unlocks it. May take seconds.
    pub(super) fn unlock(&self, header: &Header, bytes: &Part) -> Result<Arc<VolumeKey>, Error> {
        let fingerprint = header.fingerprint();
        if let Some(key) = self.known(&fingerprint) {
            return Ok(key);
        }
        // (A caller may wait up to a minute for each other one: the limit for one header.)
        let _alone = DERIVING.lock();
        if let Some(key) = self.known(&fingerprint) {
            return Ok(key);
        }
        let key = Arc::new(self.derive(header, bytes)?);
        let mut known = self.known.lock();
        if known.len() == MOST_KNOWN {
            known.remove(0);
        }
        known.push(Known {
            of: fingerprint,
            key: key.clone(),
        });
        Ok(key)
    }

    /// Derives the volume key by the first matching passphrase. Else returns the last error other
    /// than `WrongKey`, if any.
    pub(crate) fn derive(&self, header: &Header, bytes: &Part) -> Result<VolumeKey, Error> {
        let mut problem = Error::WrongKey;
        for passphrase in &*self.passphrases {
            match header.unlock(bytes, passphrase) {
                Ok(key) => return Ok(key),
                Err(Error::WrongKey) => {}
                Err(other) => problem = other,
            }
        }
        Err(problem)
    }

    fn known(&self, fingerprint: &Fingerprint) -> Option<Arc<VolumeKey>> {
        let known = self.known.lock();
        let found = known.iter().find(|known| known.of == *fingerprint);
        found.map(|known| known.key.clone())
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} keys", self.passphrases.len())
    }
}
