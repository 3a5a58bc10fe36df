//! What a cache is of: a small file in its directory, there once the rest is.

use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Write};
use std::path::Path;

const FILE: &str = "about.json";

/// The layout of a cache's files.
const FORMAT: u32 = 1;

/// What an image is, as it was when its cache was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    format: u32,
    /// As users write it.
    pub remote: String,
    /// Of S3: whose, if it is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    #[serde(flatten)]
    pub origin: Origin,
}

/// What tells an image from others that were, or will be, in its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// In bytes.
    pub size: u64,
    /// The unit that is fetched, in bytes.
    pub stripe: u64,
    /// What its place says of it: a hash of a manifest, an entity tag; empty: nothing.
    pub version: String,
}

impl About {
    pub fn new(remote: &str, origin: Origin) -> About {
        About {
            format: FORMAT,
            remote: remote.to_owned(),
            endpoint: endpoint_of(remote),
            origin,
        }
    }

    /// Whether it is of what this remote is now.
    pub fn is_of(&self, remote: &str) -> bool {
        self.remote == remote && self.endpoint == endpoint_of(remote)
    }

    /// None: there is no cache there, or none that is whole.
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
            // It is only a cache.
            Err(_) => Ok(None),
        }
    }

    /// What is left is no cache.
    pub fn forget(dir: &Path) -> io::Result<()> {
        match fs::remove_file(dir.join(FILE)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Durable, and whole or not at all.
    pub fn write(&self, dir: &Path) -> io::Result<()> {
        write_whole(dir, FILE, &serde_json::to_vec(self)?)
    }
}

/// The same bucket is another one elsewhere.
fn endpoint_of(remote: &str) -> Option<String> {
    let names = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];
    let given = || names.iter().find_map(|name| std::env::var(name).ok());
    remote.starts_with("s3://").then(given).flatten()
}

/// A file of `dir`, durable, as it was before or as it is to be.
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
