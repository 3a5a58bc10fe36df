//! Which base image is wanted, and how it is kept on this host.

use fathom_units::parse_size;
use serde::{Deserialize, Serialize};
use std::env;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// How base images are kept on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheTerms {
    /// The directory of all of them.
    pub dir: PathBuf,
    /// Bytes that all of them may take there.
    pub size: u64,
    /// Bytes a second that are fetched before anybody asks for them, at most; 0: none are.
    pub rate: u64,
    /// A manifest to check by what is fetched, of images that do not bring one.
    pub manifest: Option<PathBuf>,
    /// What boots of the image read first.
    pub profile: Option<PathBuf>,
}

const SIZE: u64 = 64 << 30;
/// With less, what has been fetched might go before it was read.
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

/// The system's for root, and a user's own for others.
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

/// How much is fetched before anybody asks for it: bytes a second, or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchRate(pub u64);

impl FromStr for FetchRate {
    type Err = String;

    fn from_str(text: &str) -> Result<FetchRate, String> {
        match text {
            "off" => Ok(FetchRate(0)),
            text => match parse_size(text)? {
                0 => Err("0 bytes a second; write 'off' for no limit".into()),
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

/// A base image, and how it is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    /// Where it comes from, as users write it.
    pub remote: String,
    pub cache: CacheTerms,
    /// The keeper's cage, as users write it.
    pub sandbox: String,
}

/// As much of the image's name as its directory's has.
const NAME: usize = 48;

impl Terms {
    pub fn new(remote: String, cache: CacheTerms) -> Terms {
        let sandbox = "on".into();
        Terms {
            remote,
            cache,
            sandbox,
        }
    }

    /// Where it is kept: one directory for each remote.
    pub fn place(&self) -> PathBuf {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || ".-".contains(c);
        let plain = |c| if is_plain(c) { c } else { '_' };
        // What is behind a question mark may be a secret.
        let shown = self.remote.split('?').next().unwrap_or_default();
        let name: Vec<char> = shown.chars().map(plain).collect();
        let name: String = name[name.len().saturating_sub(NAME)..].iter().collect();
        let name = name.trim_start_matches(['.', '-', '_']);
        let number = hash(self.remote.as_bytes());
        self.cache.dir.join(format!("{name}-{number:016x}"))
    }
}

/// FNV-1a. It needs only be the same for ever: who is there says what it is.
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
        // (It must not change: what was cached would be lost.)
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
