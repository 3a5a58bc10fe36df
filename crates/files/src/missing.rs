//! Error messages for missing directories.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

/// Returns the topmost directory of `path` that does not exist, or is not a directory.
pub fn missing_directory(path: &Path) -> Option<&Path> {
    let mut dirs: Vec<_> = path.ancestors().skip(1).collect();
    dirs.retain(|dir| !dir.as_os_str().is_empty());
    dirs.into_iter().rev().find(|dir| match fs::metadata(dir) {
        Ok(found) => !found.is_dir(),
        Err(error) => matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory),
    })
}

/// Adds the name of the missing directory to an error of creating `path`, if that is the cause.
pub fn explain_create(path: &Path, error: io::Error) -> io::Error {
    let is_missing = matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory);
    match missing_directory(path).filter(|_| is_missing) {
        Some(dir) => {
            let text = format!("no such directory: {}; create it first", dir.display());
            io::Error::new(error.kind(), text)
        }
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_missing_directory_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("file"), "").unwrap();
        assert_eq!(missing_directory(&at("x")), None);
        assert_eq!(missing_directory(Path::new("x")), None);
        assert_eq!(missing_directory(&at("a/b/x")), Some(&*at("a")));
        assert_eq!(missing_directory(&at("file/x")), Some(&*at("file")));
        let error = fs::write(at("a/x"), "").unwrap_err();
        let text = explain_create(&at("a/x"), error).to_string();
        assert!(text.ends_with("/a; create it first"), "{text}");
    }
}
