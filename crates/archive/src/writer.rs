//! Writing to archives.

use crate::address::Address;
use crate::archive::{IMAGES, SUFFIX};
use crate::elsewhere::elsewhere;
use crate::error::Error;
use crate::hash::Hash;
use crate::manifest::Manifest;
use crate::place::{Place, make_directory};
use crate::stripe;
use crate::told::Kind;
use object_store::{ObjectStoreExt, PutMode, PutOptions, PutPayload};
use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Puts images into an archive: their stripes, and when all of these were put, their manifests. Whenever that
/// ends, what has a manifest is complete, and the stripes that are there need not be put again.
#[derive(Debug)]
pub struct Writer {
    archive: Place,
    /// Stripes that were seen, or are being put.
    seen: Mutex<HashSet<Hash>>,
    /// Stripes that are in the archive are read and compared with their hashes.
    verifies: bool,
}

/// What became of a stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Put {
    pub hash: Hash,
    /// Bytes that were stored; `None`: it was there.
    pub stored: Option<u64>,
    /// The stripe that was there was damaged, and has been replaced.
    pub repaired: bool,
}

/// What an archive has of a stripe.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    Nothing,
    Damaged,
    Stripe,
}

impl Writer {
    /// For the archive at `address`, `s3://BUCKET/PREFIX` or a directory, which is made if it is not there.
    pub fn open(address: &str) -> Result<Writer, Error> {
        let address = Address::parse(address)?;
        if let Address::File(path) = &address {
            make_directory(path)?;
        }
        let archive = Place::of_directory(&address)?;
        if archive.kind() == Kind::Web {
            let problem = "cannot be written to; name a directory or s3://BUCKET/PREFIX";
            return Err(Error::unusable(archive.shown(""), problem));
        }
        Ok(Writer {
            archive,
            seen: Mutex::default(),
            verifies: false,
        })
    }

    /// Whether stripes that are in the archive are read, and replaced if their bytes are not what their
    /// hashes say. Otherwise a stripe of a plausible length counts as good.
    pub fn verifying(self, verifies: bool) -> Writer {
        Writer { verifies, ..self }
    }

    /// The address of an image's manifest.
    pub fn manifest_address(&self, name: &str) -> String {
        self.archive.shown(&manifest_of(name))
    }

    /// Whether there is an image of that name.
    pub async fn has_image(&self, name: &str) -> Result<bool, Error> {
        self.len_of(&manifest_of(name))
            .await
            .map(|len| len.is_some())
    }

    /// Has a stripe in the archive, and gives its bytes back.
    pub async fn put<B>(&self, bytes: B) -> (Result<Put, Error>, B)
    where
        B: AsRef<[u8]> + Send + 'static,
    {
        let (hash, bytes) = Hash::taking(bytes).await;
        let known = Put {
            hash,
            stored: None,
            repaired: false,
        };
        if !self.seen().insert(hash) {
            return (Ok(known), bytes);
        }
        let repaired = match self.find(&hash, bytes.as_ref().len()).await {
            Ok(Found::Stripe) => return (Ok(known), bytes),
            Ok(found) => found == Found::Damaged,
            Err(error) => return (self.forget(&hash, error), bytes),
        };
        let (object, bytes) = elsewhere(move || (stripe::object_of(bytes.as_ref()), bytes)).await;
        let stored = Some(object.len() as u64);
        let put = self.store(&hash.object(), object, PutMode::Overwrite).await;
        match put {
            Ok(()) => {
                let put = Put {
                    hash,
                    stored,
                    repaired,
                };
                (Ok(put), bytes)
            }
            Err(error) => (self.forget(&hash, error), bytes),
        }
    }

    fn seen(&self) -> MutexGuard<'_, HashSet<Hash>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It is not there, and may be put another time.
    fn forget(&self, hash: &Hash, error: Error) -> Result<Put, Error> {
        self.seen().remove(hash);
        Err(error)
    }

    /// The image has all of its stripes, and gets its name. [`Error::Exists`] if that is taken, unless it
    /// may be `replaced`.
    pub async fn finish(
        &self,
        image: &str,
        manifest: &Manifest,
        replaced: bool,
    ) -> Result<(), Error> {
        let (name, bytes) = (&manifest_of(image), manifest.to_bytes());
        if !replaced {
            match self.store(name, bytes.clone(), PutMode::Create).await {
                // Not all places can make something only if it is not there yet.
                Err(Error::Io { .. } | Error::Unusable { .. })
                    if !self.has_image(image).await? => {}
                other => return other,
            }
        }
        self.store(name, bytes, PutMode::Overwrite).await
    }

    async fn store(&self, name: &str, bytes: Vec<u8>, mode: PutMode) -> Result<(), Error> {
        let path = self.archive.path(name)?;
        let options = PutOptions::from(mode);
        let store = self.archive.store();
        let stored = store
            .put_opts(&path, PutPayload::from(bytes), options)
            .await;
        stored
            .map(drop)
            .map_err(|error| self.archive.told(name, error))
    }

    /// What is there of a stripe: as far as its length tells or, if this verifies, by all of its bytes.
    async fn find(&self, hash: &Hash, len: usize) -> Result<Found, Error> {
        let (name, most) = (hash.object(), (stripe::HEADER + len) as u64);
        let range = stripe::HEADER as u64..=most;
        match self.len_of(&name).await? {
            None => return Ok(Found::Nothing),
            Some(len) if !range.contains(&len) => return Ok(Found::Damaged),
            Some(_) if !self.verifies => return Ok(Found::Stripe),
            Some(_) => {}
        }
        let object = match self.archive.fetch(&name, most).await {
            Err(Error::NotFound { .. }) => return Ok(Found::Nothing),
            object => object?,
        };
        let hash = *hash;
        let decoded = elsewhere(move || stripe::decode(&object, len, &hash)).await;
        Ok(match decoded {
            Ok(_) => Found::Stripe,
            Err(_) => Found::Damaged,
        })
    }

    /// Bytes of an object, if there is one.
    async fn len_of(&self, name: &str) -> Result<Option<u64>, Error> {
        let path = self.archive.path(name)?;
        match self.archive.store().head(&path).await {
            Ok(meta) => Ok(Some(meta.size)),
            Err(error) => match self.archive.told(name, error) {
                Error::NotFound { .. } => Ok(None),
                other => Err(other),
            },
        }
    }
}

fn manifest_of(name: &str) -> String {
    format!("{IMAGES}/{name}{SUFFIX}")
}

/// Whether an image can be called that: a name means the same in file systems, buckets and URLs.
pub fn check_name(name: &str) -> Result<(), String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._+@".contains(c);
    let is_good = name.chars().all(is_plain) && !name.starts_with('.') && !name.is_empty();
    match is_good && name.len() <= 200 {
        true => Ok(()),
        false => Err(
            "not a name, which has 1 to 200 letters, digits and - . _ + @, not beginning \
                 with a dot"
                .into(),
        ),
    }
}
