//! The description of a cache: a small file in its directory, written after the cache's other
//! files.

use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Write};
use std::path::Path;

const FILE: &str = "about.json";

/// Version of the layout of a cache's files.
const FORMAT: u32 = 1;

/// The image to which a cache belongs, as it was when the cache was created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    format: u32,
    /// Address of the image as users write it.
    pub remote: String,
    /// S3 endpoint, if the environment names one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// Properties of the image.
    #[serde(flatten)]
    pub origin: Origin,
}

/// The properties that distinguish an image from earlier or later images at the same address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Size in bytes.
    pub size: u64,
    /// Size in bytes of a stripe, the unit in which the image is fetched.
    pub stripe: u64,
    /// Version that the remote reports: a hash of a manifest, or an entity tag; empty if it reports
    /// none.
    pub version: String,
}

impl About {
    /// Creates the description of a new cache, with the S3 endpoint of the environment.
    pub fn new(remote: &str, origin: Origin) -> About {
        About {
            format: FORMAT,
            remote: remote.to_owned(),
            endpoint: endpoint_of(remote),
            origin,
        }
    }

    /// Returns whether the cache belongs to `remote` with the present environment.
    pub fn is_of(&self, remote: &str) -> bool {
        self.remote == remote && self.endpoint == endpoint_of(remote)
    }

    /// Reads the description in `dir`. Returns `None` if the directory has no complete cache.
    pub fn read(dir: &Path) -> io::Result<Option<About>> {
        let text = match fs::read(dir.join(FILE)) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        match serde_json::from_slice::<About>(&text) {
            Ok(about) if about.format == FORMAT => Ok(Some(about)),
            Ok(about) => {
                let problem = format!("made by a newer program (format {})", about.format);
                Err(io::Error::other(problem))
            }
            // An unreadable description is no error, because the cache can be filled again.
            Err(_) => Ok(None),
        }
    }

    /// Removes the description. Without it, the remaining files are not a cache.
    pub fn forget(dir: &Path) -> io::Result<()> {
        match fs::remove_file(dir.join(FILE)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Writes the description durably and atomically.
    pub fn write(&self, dir: &Path) -> io::Result<()> {
        write_whole(dir, FILE, &serde_json::to_vec(self)?)
    }
}

/// Returns the S3 endpoint, because the same bucket name denotes another bucket at another
/// endpoint.
fn endpoint_of(remote: &str) -> Option<String> {
    let names = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];
    let given = || names.iter().find_map(|name| std::env::var(name).ok());
    remote.starts_with("s3://").then(given).flatten()
}

/// Writes a file in `dir` durably and atomically, replacing an existing one.
pub fn write_whole(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let mut file = tempfile::NamedTempFile::new_in(dir)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(dir.join(name))?;
    fs::File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_understood_is_no_cache() {
        let dir = tempfile::tempdir().unwrap();
        let read = || About::read(dir.path());
        assert_eq!(read().unwrap(), None);
        let version = "\"tag\"".to_owned();
        let (size, stripe) = (1 << 30, 1 << 18);
        let about = About::new(
            "https://h/x",
            Origin {
                size,
                stripe,
                version,
            },
        );
        about.write(dir.path()).unwrap();
        assert_eq!(read().unwrap(), Some(about.clone()));
        fs::write(dir.path().join(FILE), "{").unwrap();
        assert_eq!(read().unwrap(), None);
        let newer = About { format: 2, ..about };
        newer.write(dir.path()).unwrap();
        assert!(read().is_err());
    }
}
