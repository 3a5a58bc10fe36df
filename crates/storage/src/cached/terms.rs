//! Terms of a base image: which image it is, and how it is cached on this host.

use fathom_units::parse_size;
use serde::{Deserialize, Serialize};
use std::env;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// How base images are cached on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheTerms {
    /// Directory of all images' caches.
    pub dir: PathBuf,
    /// Maximum number of bytes that all caches together may take there.
    pub size: u64,
    /// Maximum rate of prefetching in bytes per second; 0: no prefetching.
    pub rate: u64,
    /// Manifest to check fetched data against, for images that do not bring one.
    pub manifest: Option<PathBuf>,
    /// File that lists what boots of the image read first.
    pub profile: Option<PathBuf>,
}

const SIZE: u64 = 64 << 30;
/// Minimum size of the caches in bytes. With less, fetched data might be evicted before it was
/// read.
pub const MIN_SIZE: u64 = 64 << 20;
const RATE: u64 = 64 << 20;

impl Default for CacheTerms {
    fn default() -> CacheTerms {
        CacheTerms {
            dir: default_dir(),
            size: SIZE,
            rate: RATE,
            manifest: None,
            profile: None,
        }
    }
}

/// Returns the system's cache directory for root, and the user's own for others.
fn default_dir() -> PathBuf {
    let of_user = || {
        let given = |name| env::var_os(name).filter(|dir| Path::new(dir).is_absolute());
        let home = || given("HOME").map(|home| Path::new(&home).join(".cache"));
        given("XDG_CACHE_HOME").map(PathBuf::from).or_else(home)
    };
    let dir = match rustix::process::geteuid().is_root() {
        true => None,
        false => of_user(),
    };
    dir.unwrap_or_else(|| "/var/cache".into()).join("fathom")
}

/// Rate of prefetching: bytes per second, or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchRate(pub u64);

impl FromStr for FetchRate {
    type Err = String;

    fn from_str(text: &str) -> Result<FetchRate, String> {
        match text {
            "off" => Ok(FetchRate(0)),
            text => match parse_size(text)? {
                0 => Err("0 bytes a second; write 'off' to fetch only what is read".into()),
                rate => Ok(FetchRate(rate)),
            },
        }
    }
}

impl fmt::Display for FetchRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.pad("off"),
            rate => rate.fmt(f),
        }
    }
}

/// A base image, and how it is cached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    /// Location from which the image is fetched, as users write it.
    pub remote: String,
    /// How the image is cached on this host.
    pub cache: CacheTerms,
    /// Sandbox of the keeper, as users write it.
    pub sandbox: String,
}

/// Maximum number of characters of the image's name in its directory's name.
const NAME: usize = 48;

impl Terms {
    /// Creates the terms of an image whose keeper has the sandbox `on`.
    pub fn new(remote: String, cache: CacheTerms) -> Terms {
        let sandbox = "on".into();
        Terms {
            remote,
            cache,
            sandbox,
        }
    }

    /// Returns the directory of the image's cache: one for each remote.
    pub fn place(&self) -> PathBuf {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || ".-".contains(c);
        let plain = |c| if is_plain(c) { c } else { '_' };
        // The part behind a question mark may be secret.
        let shown = self.remote.split('?').next().unwrap_or_default();
        let name: Vec<char> = shown.chars().map(plain).collect();
        let name: String = name[name.len().saturating_sub(NAME)..].iter().collect();
        let name = name.trim_start_matches(['.', '-', '_']);
        let number = hash(self.remote.as_bytes());
        self.cache.dir.join(format!("{name}-{number:016x}"))
    }
}

/// FNV-1a. The function must never change, because the hash is a part of the directory's name. A
/// collision is detected, since the cache itself records which image it belongs to.
fn hash(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_remote_has_a_directory_of_its_own() {
        let place = |remote: &str| {
            let cache = CacheTerms {
                dir: "/c".into(),
                ..CacheTerms::default()
            };
            let place = Terms::new(remote.to_owned(), cache).place();
            assert_eq!(place.parent(), Some(Path::new("/c")));
            place.file_name().unwrap().to_str().unwrap().to_owned()
        };
        let long = format!("https://host/{}/../..", "é".repeat(300));
        let all = ["s3://b/x.manifest", "s3://b/x/manifest", "..", "", &long];
        let names: std::collections::BTreeSet<_> = all.iter().map(|remote| place(remote)).collect();
        assert_eq!(names.len(), all.len());
        assert!(names.iter().all(|name| name.len() < 80 && name != ".."));
        // The name must not change: what was cached would be lost.
        assert_eq!(
            place("s3://b/x.manifest"),
            "s3___b_x.manifest-fbf93a664ff73e8d"
        );
    }

    #[test]
    fn rates_are_sizes_or_off() {
        assert_eq!("off".parse(), Ok(FetchRate(0)));
        assert_eq!("1M".parse(), Ok(FetchRate(1 << 20)));
        assert!("0".parse::<FetchRate>().is_err() && "fast".parse::<FetchRate>().is_err());
        assert_eq!(FetchRate(0).to_string().parse(), Ok(FetchRate(0)));
    }
}
