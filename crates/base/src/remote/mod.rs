//! The remote: the place from which an image is fetched.

mod disk;
mod stored;

use crate::about::Origin;
use crate::problem::Problem;
use disk::RemoteDisk;
use fathom_archive::{Hash, Image, Manifest, Object};
use fathom_storage::cached::Terms;
use fathom_units::cause;
use std::path::Path;

/// Stripe size in bytes of images that do not define one.
const STRIPE: u64 = 256 << 10;

/// Suffix of the names of images in archives.
pub const MANIFEST: &str = ".manifest";

/// An open image.
pub struct Remote {
    origin: Origin,
    way: Way,
    /// Manifest against which fetched data is verified; `None` for an archive, which verifies it
    /// itself.
    manifest: Option<Manifest>,
}

enum Way {
    Disk(RemoteDisk),
    Object(Object),
    Archive(Image),
}

impl Remote {
    pub async fn open(terms: &Terms) -> Result<Remote, Problem> {
        let manifest = match &terms.cache.manifest {
            Some(path) => Some(read_manifest(path).map_err(Problem::Never)?),
            None => None,
        };
        let (way, size, version) = open(&terms.remote).await?;
        let of_its_own = match &way {
            Way::Archive(image) => Some(image.manifest()),
            _ => None,
        };
        if of_its_own.is_some() && manifest.is_some() {
            let problem =
                "--base-manifest: excluded for an image in an archive, which has its own manifest";
            return Err(Problem::Never(problem.into()));
        }
        let stripe = of_its_own
            .or(manifest.as_ref())
            .map_or(STRIPE, |known| known.stripe_size().into());
        let mut origin = Origin {
            size,
            stripe,
            version,
        };
        if let Some(manifest) = &manifest {
            if manifest.size() != size {
                let of = manifest.size();
                return Err(Problem::Never(format!(
                    "the image has {size} bytes, and --base-manifest describes an image of {of} \
                     bytes"
                )));
            }
            // The manifest identifies the contents, so the version that the remote reports does not
            // matter.
            origin.version = version_of(manifest);
        }
        Ok(Remote {
            origin,
            way,
            manifest,
        })
    }

    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Returns the boot profile of the image's manifest; empty if the image has no manifest.
    pub fn profile(&self) -> Vec<u32> {
        let known = match &self.way {
            Way::Archive(image) => Some(image.manifest()),
            _ => self.manifest.as_ref(),
        };
        known.map_or_else(Vec::new, |known| known.profile().to_vec())
    }

    /// Fetches a stripe, and verifies it if the image has a manifest.
    pub async fn fetch(&self, stripe: u32) -> Result<Vec<u8>, Problem> {
        let at = u64::from(stripe) * self.origin.stripe;
        let len = self.origin.stripe.min(self.origin.size - at);
        let bytes = match &self.way {
            Way::Disk(disk) => disk.read(at, len).await?,
            Way::Object(object) => stored::read(object, at, len).await?,
            Way::Archive(image) => return stored::stripe(image, stripe).await,
        };
        match &self.manifest {
            Some(manifest) if !manifest.verify(stripe, &bytes) => Err(Problem::Wrong(
                "the image's data does not match --base-manifest".into(),
            )),
            _ => Ok(bytes),
        }
    }
}

/// Opens an image. Returns it with its size in bytes and its version, which may be empty.
async fn open(remote: &str) -> Result<(Way, u64, String), Problem> {
    if remote.ends_with(MANIFEST) {
        let image = stored::open_archive(remote).await?;
        let (size, version) = (image.manifest().size(), version_of(image.manifest()));
        return Ok((Way::Archive(image), size, version));
    }
    if stored::is_for(remote) {
        let object = stored::open_object(remote).await?;
        let (size, version) = (object.size(), object.version().to_owned());
        return Ok((Way::Object(object), size, version));
    }
    let disk = RemoteDisk::open(remote.to_owned()).await?;
    let size = disk.size();
    Ok((Way::Disk(disk), size, String::new()))
}

/// Returns a version that depends only on the contents of the image, not on its creation time.
pub fn version_of(manifest: &Manifest) -> String {
    let hash = |stripe: &Option<Hash>| stripe.map_or([0; Hash::LEN], |hash| hash.0);
    let hashes: Vec<u8> = manifest.stripes().iter().flat_map(hash).collect();
    Hash::of(&hashes).to_string()
}

pub fn read_manifest(path: &Path) -> Result<Manifest, String> {
    let told = |problem: String| format!("--base-manifest {}: {problem}", path.display());
    let bytes = std::fs::read(path).map_err(|error| told(cause(error)))?;
    Manifest::parse(&bytes).map_err(told)
}
