//! The list of storage kinds, and the locations of disks as users write them.

use crate::kind::{Kind, OpenOptions, Opened, Place};
use crate::{cached, file, memory, nbd, null, rbd};
use fathom_core::DiskError;
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

/// All kinds of storage. The first, files, is the kind of texts that match no prefix of another.
pub static KINDS: &[&Kind] = &[
    &file::KIND,
    &memory::KIND,
    &null::KIND,
    &nbd::KIND,
    &rbd::KIND,
    &cached::KIND,
];

/// Location of a disk: a path, `memory:SIZE`, an NBD URI and so on, in the syntax of [`KINDS`].
#[derive(Clone)]
pub struct Location {
    kind: &'static Kind,
    place: Arc<dyn Place>,
}

impl Location {
    /// Parses a location. A file whose name looks like another kind's location is written with `./`
    /// in front. The error is one line for the user.
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

    /// Returns the location of a file or block device, even if its name looks like a URI.
    pub fn file(path: impl Into<PathBuf>) -> Location {
        Location {
            kind: &file::KIND,
            place: Arc::new(file::At(path.into())),
        }
    }

    /// Returns the kind of storage that the location names.
    pub fn kind(&self) -> &'static Kind {
        self.kind
    }

    /// Returns the path of the file, if the disk is in one.
    pub fn path(&self) -> Option<&Path> {
        self.place.path()
    }

    /// Returns the name for messages: the file's path, or the location as users write it.
    pub fn name(&self) -> PathBuf {
        self.path()
            .map_or_else(|| self.to_string().into(), Path::to_owned)
    }

    /// Returns the location of the base image at `remote`, cached on this host.
    pub fn cached(remote: &str) -> Result<Location, String> {
        Location::parse(format!("cached:{remote}").as_ref())
    }

    /// Returns the location from which a cached base image is fetched, if this is one.
    pub fn remote(&self) -> Option<&str> {
        self.place.remote()
    }

    /// Returns the directory of its connection settings files, if the location names one.
    pub fn settings_dir(&self) -> Option<&Path> {
        self.place.settings_dir()
    }

    /// Resolves `name`, such as a backing file name stored in the image, if such names are allowed.
    pub fn beside(&self, name: &str) -> Option<Location> {
        let place = self.place.beside(name)?;
        Some(Location { place, ..*self })
    }

    /// Returns the location with another size in bytes, if the size is a part of its text.
    pub fn with_size(&self, size: u64) -> Option<Location> {
        let place = self.place.with_size(size)?;
        Some(Location { place, ..*self })
    }

    /// Opens the disk; may block. The error is one line for the user.
    pub fn open(&self, options: &OpenOptions) -> Result<Opened, DiskError> {
        self.place.open(options)
    }

    /// Creates the disk with a length of 0, if it is not a file and its kind can be created.
    /// Returns false if it exists already. May block.
    pub fn create(&self) -> Result<bool, DiskError> {
        self.place.create()
    }

    /// Removes a disk that [`Location::create`] made, after it has been closed; may block.
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

/// Writes the location in the syntax of [`Location::parse`], except for a file whose name looks
/// like another kind's location.
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

/// Returns the URI prefixes of all kinds, separated by commas, for messages.
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
