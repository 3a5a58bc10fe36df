//! The kinds of storage that there are, and where a disk's bytes are as users write it.

use crate::kind::{Kind, OpenOptions, Opened, Place};
use crate::{cached, file, memory, nbd, null, rbd};
use fathom_core::DiskError;
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

/// One line a kind. The first is that of a text that is none of the others'.
pub static KINDS: &[&Kind] = &[
    &file::KIND,
    &memory::KIND,
    &null::KIND,
    &nbd::KIND,
    &rbd::KIND,
    &cached::KIND,
];

/// Where a disk's bytes are: a path, `memory:SIZE`, an NBD URI and so on, as [`KINDS`] say.
#[derive(Clone)]
pub struct Location {
    kind: &'static Kind,
    place: Arc<dyn Place>,
}

impl Location {
    /// A file of that name begins with `./`, if it looks like something else. The error is one line
    /// for the user.
    pub fn parse(text: &OsStr) -> Result<Location, String> {
        let known = text.to_str().unwrap_or_default();
        let begins =
            |kind: &&&Kind| { kind.prefixes.iter() }.any(|prefix| known.starts_with(prefix));
        let kind = match (KINDS.iter().find(begins), known.split_once("://")) {
            (Some(kind), _) => kind,
            (None, Some((scheme, _))) if !scheme.contains(['/', ':']) => {
                return Err(format!(
                    "unsupported scheme {scheme}://; supported are {} (write ./{scheme}:... for \
                     a file of that name)",
                    uris()
                ));
            }
            (None, _) => &file::KIND,
        };
        let place = (kind.parse)(text)?;
        Ok(Location { kind, place })
    }

    /// A file or block device, whatever its name looks like.
    pub fn file(path: impl Into<PathBuf>) -> Location {
        Location {
            kind: &file::KIND,
            place: Arc::new(file::At(path.into())),
        }
    }

    pub fn kind(&self) -> &'static Kind {
        self.kind
    }

    /// The file, of those that are in one.
    pub fn path(&self) -> Option<&Path> {
        self.place.path()
    }

    /// What it is called in messages: the file's path, or what users write.
    pub fn name(&self) -> PathBuf {
        self.path()
            .map_or_else(|| self.to_string().into(), Path::to_owned)
    }

    /// A base image that comes from there, and is kept on this host.
    pub fn cached(remote: &str) -> Result<Location, String> {
        Location::parse(format!("cached:{remote}").as_ref())
    }

    /// Where it comes from, of those.
    pub fn remote(&self) -> Option<&str> {
        self.place.remote()
    }

    /// The directory of files that say how it is reached, if it names some.
    pub fn settings_dir(&self) -> Option<&Path> {
        self.place.settings_dir()
    }

    /// What an image that is in it may call `name`, if it may.
    pub fn beside(&self, name: &str) -> Option<Location> {
        let place = self.place.beside(name)?;
        Some(Location { place, ..*self })
    }

    /// The same, of another size in bytes, if its size is a part of how it is written.
    pub fn with_size(&self, size: u64) -> Option<Location> {
        let place = self.place.with_size(size)?;
        Some(Location { place, ..*self })
    }

    /// Opens it; may block. The error is one line for the user.
    pub fn open(&self, options: &OpenOptions) -> Result<Opened, DiskError> {
        self.place.open(options)
    }

    /// Makes it, of no bytes, if it is in no file and its kind can be made; false: it is there. May block.
    pub fn create(&self) -> Result<bool, DiskError> {
        self.place.create()
    }

    /// Removes what was made so, once it is closed; may block.
    pub fn remove(&self) -> Result<(), DiskError> {
        self.place.remove()
    }
}

impl FromStr for Location {
    type Err = String;

    fn from_str(text: &str) -> Result<Location, String> {
        Location::parse(OsStr::new(text))
    }
}

/// As it is read (a file of a strange name is not).
impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.place.fmt(f)
    }
}

impl fmt::Debug for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {self}", self.kind.name)
    }
}

impl PartialEq for Location {
    fn eq(&self, other: &Location) -> bool {
        self.kind.name == other.kind.name && self.to_string() == other.to_string()
    }
}

impl Eq for Location {}

/// What URIs of disks begin with, for people.
fn uris() -> String {
    let is_uri = |kind: &Kind, prefix: &str| prefix.ends_with("//") && kind.form.contains(prefix);
    let of = |kind: &'static Kind| kind.prefixes.iter().filter(|prefix| is_uri(kind, prefix));
    let uris: Vec<&str> = KINDS.iter().flat_map(|kind| of(kind)).copied().collect();
    uris.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<(&'static str, String), String> {
        let location = Location::parse(OsStr::new(text))?;
        Ok((location.kind().name, location.to_string()))
    }

    #[test]
    fn disks_are_of_the_kind_that_they_begin_like() {
        let ok = |kind, shown: &str| Ok((kind, shown.to_owned()));
        assert_eq!(parse("memory:4G"), ok("memory", "memory:4294967296"));
        assert_eq!(parse("null:1T"), ok("null", "null:1099511627776"));
        for path in ["disk.img", "./null:1T", "a:b", "memory", "nbd:x", "/a://b"] {
            assert_eq!(parse(path), ok("file", path));
        }
        let uri = "nbd+unix:///disk?socket=/run/s";
        assert_eq!(parse(uri), ok("nbd", uri));
        for bad in ["nbd://[", "nbd+unix:///", "nbds://x?tls-psk-file=/p"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        for bad in ["memory:", "null:x", "null:0", "null:511", "null:15E"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        for bad in ["http://host/disk", "https://h/", "ftp://x"] {
            let error = parse(bad).unwrap_err();
            assert!(error.contains("nbd+vsock://"), "{error}");
        }
    }

    #[test]
    fn kinds_are_told_apart() {
        for (index, kind) in KINDS.iter().enumerate() {
            let prefixes: Vec<_> = KINDS[index + 1..].iter().flat_map(|k| k.prefixes).collect();
            for own in kind.prefixes {
                assert!(
                    prefixes.iter().all(|other| !other.starts_with(own)),
                    "{own}"
                );
            }
            assert!(!kind.form.is_empty() && !kind.what.contains('\n'));
        }
        assert!(file::KIND.prefixes.is_empty());
    }

    #[test]
    fn a_location_is_what_it_says() {
        let location = |text| Location::parse(OsStr::new(text)).unwrap();
        assert_eq!(location("null:1k"), location("null:1024"));
        assert_ne!(location("null:1k"), location("memory:1k"));
        assert_ne!(location("./null:1k"), location("null:1k"));
        assert_eq!(location("a"), Location::file("a"));
        assert_eq!(location("a").path(), Some(Path::new("a")));
        assert_eq!(location("null:1k").path(), None);
    }
}
