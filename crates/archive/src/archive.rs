//! Reads archives.

use crate::address::Address;
use crate::elsewhere::elsewhere;
use crate::error::Error;
use crate::manifest::{HEADER, Header, Manifest};
use crate::place::{Body, Place, parent};
use crate::store_error::Kind;
use crate::stripe;
use futures_util::StreamExt;
use object_store::GetOptions;
use std::path::Path;
use url::Url;

/// Directory of an archive that contains its manifests; the constant below is their file suffix.
pub(crate) const IMAGES: &str = "images";
pub(crate) const SUFFIX: &str = ".manifest";

/// An image in an archive.
#[derive(Clone, Debug)]
pub struct Image {
    archive: Place,
    manifest: Manifest,
    shown: String,
}

impl Image {
    /// Opens the image whose manifest is at `address`, which is `ARCHIVE/images/NAME.manifest`.
    ///
    /// The image's stripes are in `ARCHIVE/stripes`.
    pub async fn open(address: &str) -> Result<Image, Error> {
        let address = Address::parse(address)?;
        let (place, name) = Place::of_object(&address)?;
        let manifest = read_manifest(&place, &name).await?;
        Ok(Image {
            archive: Place::of_directory(&above(&address)?)?,
            manifest,
            shown: place.shown(&name),
        })
    }

    /// Returns the manifest of the image.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns the address of the manifest, for people.
    pub fn shown(&self) -> &str {
        &self.shown
    }

    /// Fetches a stripe, decodes it, and checks that its bytes match the manifest.
    ///
    /// For a stripe of zeroes, no request is sent.
    ///
    /// # Panics
    /// Panics if the image has no stripe with this index.
    pub async fn stripe(&self, index: u32) -> Result<Vec<u8>, Error> {
        let len = self.manifest.len_of(index);
        let Some(hash) = self.manifest.stripes()[index as usize] else {
            return Ok(vec![0; len]);
        };
        let name = hash.object();
        let most = (stripe::HEADER + len) as u64;
        let object = match self.archive.fetch(&name, most).await {
            Err(Error::NotFound { what }) => {
                return Err(self.damaged(index, what, "this stripe is lost"));
            }
            Err(Error::Corrupt { what, problem }) => {
                return Err(self.damaged(index, what, &problem));
            }
            other => other?,
        };
        let decoded = elsewhere(move || stripe::decode(&object, len, &hash)).await;
        decoded.map_err(|problem| self.damaged(index, self.archive.shown(&name), &problem))
    }

    /// Creates the error for a lost or damaged stripe, which names the affected part of the disk.
    fn damaged(&self, index: u32, object: String, problem: &str) -> Error {
        let start = u64::from(index) * u64::from(self.manifest.stripe_size());
        let end = start + self.manifest.len_of(index) as u64;
        let problem = format!(
            "{problem}; it is stripe {index} of {}, bytes {start} to {end} of the disk; archive \
             a good copy of the disk with --verify-known to replace it",
            self.shown
        );
        Error::corrupt(object, problem)
    }
}

/// Reads the manifest called `name`.
///
/// Reads its header first, and reads the rest only if the object has the size that the header
/// states.
async fn read_manifest(place: &Place, name: &str) -> Result<Manifest, Error> {
    let failed = |error| place.store_error(name, error);
    let corrupt = |problem: String| Error::corrupt(place.shown(name), problem);
    let got = place
        .get(name, GetOptions::default())
        .await
        .map_err(failed)?;
    let size = got.meta.size;
    let mut body = Body::new(got);
    body.read_to(HEADER as u64).await.map_err(failed)?;
    let wanted = Header::parse(&body.bytes).map_err(corrupt)?.len();
    if size != wanted {
        let problem = format!("the object has {size} bytes, but its header says {wanted}");
        return Err(corrupt(problem));
    }
    body.read_to(wanted).await.map_err(failed)?;
    Manifest::parse(&body.bytes).map_err(corrupt)
}

/// Returns the address of the archive that contains a manifest.
fn above(manifest: &Address) -> Result<Address, Error> {
    let lost = || {
        let problem = "not in a directory of an archive; write ARCHIVE/images/NAME.manifest";
        Error::unusable(manifest.shown(), problem)
    };
    Ok(match manifest {
        Address::File(path) => {
            let images = std::fs::canonicalize(parent(path)).map_err(|source| Error::Io {
                what: manifest.shown(),
                source,
            })?;
            Address::File(images.parent().unwrap_or(Path::new("/")).to_owned())
        }
        Address::S3 { bucket, key } => {
            let mut parts = key.rsplitn(3, '/').skip(1);
            parts.next().ok_or_else(lost)?;
            Address::S3 {
                bucket: bucket.clone(),
                key: parts.next().unwrap_or_default().to_owned(),
            }
        }
        Address::Web(url) => Address::Web(above_url(url).ok_or_else(lost)?),
    })
}

fn above_url(url: &Url) -> Option<Url> {
    let mut url = url.clone();
    url.set_query(None);
    if url.path_segments()?.count() < 2 {
        return None;
    }
    url.path_segments_mut().ok()?.pop().pop();
    Some(url)
}

/// An image in the list of an archive's images.
#[derive(Debug)]
pub struct ListedImage {
    /// Name of the image in the archive.
    pub name: String,
    /// Summary of the image's manifest, or the error that prevented reading it.
    pub summary: Result<Summary, Error>,
}

/// The main properties of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Size of the disk in bytes.
    pub size: u64,
    /// Size of a stripe in bytes.
    pub stripe_size: u32,
    /// Number of stripes.
    pub stripes: u32,
    /// Number of stripes that are not all zeroes.
    pub data: u32,
    /// Creation time in seconds of the Unix clock.
    pub made: u64,
}

impl Summary {
    fn of(manifest: &Manifest) -> Summary {
        let data = manifest.stripes().iter().flatten().count();
        Summary {
            size: manifest.size(),
            stripe_size: manifest.stripe_size(),
            stripes: manifest.stripes().len() as u32,
            data: data as u32,
            made: manifest.made(),
        }
    }
}

/// Maximum number of images in a list.
const MOST_LISTED: usize = 100_000;

/// Lists the images of the archive at `address`, ordered by name.
///
/// The address is a directory or `s3://BUCKET/PREFIX`.
pub async fn list(address: &str) -> Result<Vec<ListedImage>, Error> {
    let place = Place::of_directory(&Address::parse(address)?)?;
    if place.kind() == Kind::Web {
        let problem = "cannot be listed, because web servers do not list their files";
        return Err(Error::unusable(place.shown(""), problem));
    }
    let prefix = place.path(IMAGES)?;
    let mut found = place.store().list(Some(&prefix));
    let mut names = Vec::new();
    while let Some(object) = found.next().await {
        let object = object.map_err(|error| place.store_error("", error))?;
        let mut parts = object.location.prefix_match(&prefix).into_iter().flatten();
        let name = parts.next().map(|part| part.as_ref().to_owned());
        let name = name.filter(|_| parts.next().is_none());
        let name = name.and_then(|name| name.strip_suffix(SUFFIX).map(str::to_owned));
        names.extend(name);
        if names.len() > MOST_LISTED {
            let problem = format!("more than {MOST_LISTED} images");
            return Err(Error::unusable(place.shown(""), problem));
        }
    }
    names.sort();
    let mut listed = Vec::with_capacity(names.len());
    for name in names {
        let manifest = read_manifest(&place, &format!("{IMAGES}/{name}{SUFFIX}")).await;
        let summary = manifest.map(|manifest| Summary::of(&manifest));
        listed.push(ListedImage { name, summary });
    }
    Ok(listed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stripes_are_beside_the_images() {
        let archive = |text: &str| above(&Address::parse(text).unwrap()).map(|a| a.shown());
        for (manifest, is) in [
            ("s3://b/images/a.manifest", "s3://b"),
            ("s3://b/x/y/images/a.manifest", "s3://b/x/y"),
            ("https://h/images/a.manifest", "https://h/"),
            ("https://h/x%20y/images/a.manifest?z", "https://h/x%20y"),
        ] {
            assert_eq!(archive(manifest).unwrap(), is);
        }
        for lost in ["s3://b/a.manifest", "https://h/a.manifest"] {
            archive(lost).expect_err(lost);
        }
    }
}
