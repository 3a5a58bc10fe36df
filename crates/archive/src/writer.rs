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
}

/// What became of a stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Put {
    pub hash: Hash,
    /// Bytes that were stored; `None`: it was there.
    pub stored: Option<u64>,
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
            let problem = "cannot be written to: name a directory or s3://BUCKET/PREFIX";
            return Err(Error::unusable(archive.shown(""), problem));
        }
        Ok(Writer {
            archive,
            seen: Mutex::default(),
        })
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
        if !self.seen().insert(hash) {
            return (Ok(Put { hash, stored: None }), bytes);
        }
        match self.has(&hash, bytes.as_ref().len()).await {
            Ok(true) => return (Ok(Put { hash, stored: None }), bytes),
            Ok(false) => {}
            Err(error) => return (self.forget(&hash, error), bytes),
        }
        let (object, bytes) = elsewhere(move || (stripe::object_of(bytes.as_ref()), bytes)).await;
        let stored = Some(object.len() as u64);
        let put = self.store(&hash.object(), object, PutMode::Overwrite).await;
        match put {
            Ok(()) => (Ok(Put { hash, stored }), bytes),
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

    /// Whether a stripe is there, as far as its length tells.
    async fn has(&self, hash: &Hash, len: usize) -> Result<bool, Error> {
        let range = stripe::HEADER as u64..=(stripe::HEADER + len) as u64;
        let there = self.len_of(&hash.object()).await?;
        Ok(there.is_some_and(|len| range.contains(&len)))
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
        false => {
            Err("a name has letters, digits and - . _ + @, 200 at most, and no dot first".into())
        }
    }
}
