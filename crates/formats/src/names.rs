//! Names of other files in images.

use crate::{Error, Result};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Returns the path that an image's name for another file means, absolute or relative to the
/// image's directory. QEMU also accepts `json:` and protocols such as `nbd:`. This function refuses
/// such names, except `file:`.
pub fn file_name_of(name: &[u8]) -> Result<&Path> {
    let head = name.split(|b| *b == b'/').next().unwrap_or_default();
    let protocol = head.iter().position(|b| *b == b':').map(|at| &head[..at]);
    let path = match protocol {
        None => name,
        Some(b"file") => &name[b"file:".len()..],
        Some(other) => {
            return Err(Error::unsupported(format!(
                "'{}' has the protocol '{}', and images can name only files; use 'fathom serve \
                 --base' for an image with a remote backing image",
                String::from_utf8_lossy(name).escape_debug(),
                String::from_utf8_lossy(other).escape_debug()
            )));
        }
    };
    if path.is_empty() {
        return Err(Error::invalid("the image names a file with an empty name"));
    }
    Ok(Path::new(OsStr::from_bytes(path)))
}

/// Makes text from an image printable: control characters are escaped, so that the text cannot send
/// escape sequences to the terminal.
pub fn shown(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_control() {
            true => shown.extend(c.escape_default()),
            false => shown.push(c),
        }
    }
    shown
}

/// Resolves `name` relative to the directory of `image`.
pub fn resolve(image: &Path, name: &[u8]) -> Result<PathBuf> {
    let path = file_name_of(name)?;
    let dir = image.parent().unwrap_or_else(|| Path::new(""));
    Ok(dir.join(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_play_with_the_terminal() {
        assert_eq!(shown("a b\\c \u{e4}"), "a b\\c \u{e4}");
        assert_eq!(shown("\x1b[2J\n\u{9b}1m"), "\\u{1b}[2J\\n\\u{9b}1m");
    }

    #[test]
    fn names_are_seen_from_the_image() {
        let at = |image: &str, name: &str| resolve(Path::new(image), name.as_bytes());
        let path = |text: &str| PathBuf::from(text);
        assert_eq!(at("a.qcow2", "b.raw").unwrap(), path("b.raw"));
        assert_eq!(at("d/a.qcow2", "b.raw").unwrap(), path("d/b.raw"));
        assert_eq!(at("d/a.qcow2", "/e/b.raw").unwrap(), path("/e/b.raw"));
        assert_eq!(at("/d/a", "file:../b").unwrap(), path("/d/../b"));
        assert_eq!(at("/d/a", "x/b:c").unwrap(), path("/d/x/b:c"));
        for name in ["nbd:unix:/s", "json:{}", "https://h/x", "", "file:"] {
            assert!(at("a", name).is_err(), "{name}");
        }
    }
}
