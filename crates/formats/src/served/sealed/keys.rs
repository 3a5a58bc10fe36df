//! Who may read what is encrypted.

use crate::luks::Part;
use fathom_luks::{Error, Header, Passphrase, VolumeKey};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// See [`Header::fingerprint`].
pub(in crate::served) type Fingerprint = [u8; 32];

/// One key is derived at a time in a process: it may take 1 GiB of memory.
static DERIVING: Mutex<()> = Mutex::new(());

/// Headers whose volume keys are remembered.
const MOST_KNOWN: usize = 16;

/// What users have given to unlock images with. Clones share what they know: a key is derived once,
/// which takes its time, however often the image is opened.
#[derive(Clone, Default)]
pub struct Keys {
    passphrases: Arc<[Passphrase]>,
    known: Arc<Mutex<Vec<Known>>>,
}

/// What was derived once.
struct Known {
    of: Fingerprint,
    key: Arc<VolumeKey>,
}

impl Keys {
    pub fn new(passphrases: Vec<Passphrase>) -> Keys {
        Keys {
            passphrases: passphrases.into(),
            known: Arc::default(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.passphrases.is_empty()
    }

    /// The first of them, with which what is made for the user is locked.
    pub fn first(&self) -> Option<&Passphrase> {
        self.passphrases.first()
    }

    /// The volume key of an image, by the first of these that opens it. May take seconds.
    pub(super) fn unlock(&self, header: &Header, bytes: &Part) -> Result<Arc<VolumeKey>, Error> {
        let fingerprint = header.fingerprint();
        if let Some(key) = self.known(&fingerprint) {
            return Ok(key);
        }
        // (Those who wait may wait for a minute each: as long as a header may have it take.)
        let _alone = DERIVING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(key) = self.known(&fingerprint) {
            return Ok(key);
        }
        let key = Arc::new(self.derive(header, bytes)?);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() == MOST_KNOWN {
            known.remove(0);
        }
        known.push(Known {
            of: fingerprint,
            key: key.clone(),
        });
        Ok(key)
    }

    /// The first that opens it; else what is worst.
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
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let found = known.iter().find(|known| known.of == *fingerprint);
        found.map(|known| known.key.clone())
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} keys", self.passphrases.len())
    }
}
