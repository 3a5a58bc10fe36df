//! Writes to archives.

use crate::address::Address;
use crate::archive::{IMAGES, SUFFIX};
use crate::elsewhere::elsewhere;
use crate::error::Error;
use crate::hash::Hash;
use crate::manifest::Manifest;
use crate::place::{Place, make_directory};
use crate::store_error::Kind;
use crate::stripe;
use object_store::{ObjectStoreExt, PutMode, PutOptions, PutPayload};
use parking_lot::Mutex;
use std::collections::HashSet;

/// Writes images to an archive: first all stripes of an image, then its manifest.
///
/// If writing is interrupted, every image with a manifest is complete. Stripes that were written
/// need not be written again.
#[derive(Debug)]
pub struct Writer {
    archive: Place,
    /// Stripes that were found or written, or that are being written.
    seen: Mutex<HashSet<Hash>>,
    /// Whether stripes found in the archive are read and compared with their hashes.
    verifies: bool,
}

/// The result of [`Writer::put`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Put {
    /// Hash of the stripe, to be listed in the manifest.
    pub hash: Hash,
    /// Number of bytes stored; `None` if the archive already contains the stripe.
    pub stored: Option<u64>,
    /// Whether the archive contained a damaged copy of the stripe, which has been replaced.
    pub repaired: bool,
}

/// The state of a stripe in the archive.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    Nothing,
    Damaged,
    Stripe,
}

impl Writer {
    /// Opens the archive at `address`, which is `s3://BUCKET/PREFIX` or a directory.
    ///
    /// A directory that does not exist is created.
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

    /// Sets whether stripes in the archive are read, and replaced if they do not match their
    /// hashes.
    ///
    /// By default, a stripe whose object has a plausible size is assumed to be intact.
    pub fn verifying(self, verifies: bool) -> Writer {
        Writer { verifies, ..self }
    }

    /// Returns the address of an image's manifest.
    pub fn manifest_address(&self, name: &str) -> String {
        self.archive.shown(&manifest_of(name))
    }

    /// Returns whether the archive contains an image with this name.
    pub async fn has_image(&self, name: &str) -> Result<bool, Error> {
        self.len_of(&manifest_of(name))
            .await
            .map(|len| len.is_some())
    }

    /// Writes a stripe unless the archive already contains it, and returns the bytes.
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
        if !self.seen.lock().insert(hash) {
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

    /// Forgets a stripe that could not be written, so that it can be written later.
    fn forget(&self, hash: &Hash, error: Error) -> Result<Put, Error> {
        self.seen.lock().remove(hash);
        Err(error)
    }

    /// Writes the manifest of an image whose stripes are all in the archive.
    ///
    /// Returns [`Error::Exists`] if an image with this name exists and `replaced` is false.
    pub async fn finish(
        &self,
        image: &str,
        manifest: &Manifest,
        replaced: bool,
    ) -> Result<(), Error> {
        let (name, bytes) = (&manifest_of(image), manifest.to_bytes());
        if !replaced {
            match self.store(name, bytes.clone(), PutMode::Create).await {
                // Not every place supports creating an object only if it does not exist.
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
            .map_err(|error| self.archive.store_error(name, error))
    }

    /// Returns the state of a stripe.
    ///
    /// Checks all bytes of its object if this writer verifies stripes, and otherwise only the size.
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

    /// Returns the size of an object in bytes, or `None` if it does not exist.
    async fn len_of(&self, name: &str) -> Result<Option<u64>, Error> {
        let path = self.archive.path(name)?;
        match self.archive.store().head(&path).await {
            Ok(meta) => Ok(Some(meta.size)),
            Err(error) => match self.archive.store_error(name, error) {
                Error::NotFound { .. } => Ok(None),
                other => Err(other),
            },
        }
    }
}

fn manifest_of(name: &str) -> String {
    format!("{IMAGES}/{name}{SUFFIX}")
}

/// Checks that a name is valid for an image.
///
/// A valid name has the same meaning in file systems, buckets and URLs.
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
