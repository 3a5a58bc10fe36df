//! The program that a successor runs.

use fathom_files::trusted;
use fathom_units::cause;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Returns the path from which this process was started, where a new version of the program may be
/// by now.
pub fn own_binary() -> io::Result<PathBuf> {
    let path = fs::read_link("/proc/self/exe")?.into_os_string().into_vec();
    let path = path.strip_suffix(b" (deleted)").unwrap_or(&path);
    Ok(std::ffi::OsStr::from_bytes(path).into())
}

/// Rejects a program that another user could have written. A group that may use the API must not be
/// able to run programs of its own.
pub fn check_binary(path: &Path) -> Result<(), String> {
    let shown = path.display();
    if !path.is_absolute() {
        return Err(format!(
            "{shown}: not an absolute path; give the program's absolute path"
        ));
    }
    // A symbolic link of another user could lead to any program of root's.
    let file = trusted::open_path(path).map_err(|error| format!("{shown}: {}", cause(error)))?;
    let meta = File::from(file).metadata();
    let meta = meta.map_err(|error| format!("{shown}: {}", cause(error)))?;
    let own = rustix::process::geteuid().as_raw();
    let is_ours = [0, own].contains(&meta.uid()) && meta.mode() & 0o022 == 0;
    match is_ours && meta.is_file() {
        true => Ok(()),
        false => Err(format!(
            "{shown}: not a trusted program: it must belong to root or the server's user, and \
             not be writable for its group or others (chmod go-w)"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, lchown, symlink};

    #[test]
    fn program_that_somebody_else_could_have_made_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fathom");
        fs::write(&path, "program").unwrap();
        for (mode, is_accepted) in [
            (0o755, true),
            (0o700, true),
            (0o775, false),
            (0o757, false),
            (0o720, false),
        ] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(check_binary(&path).is_ok(), is_accepted, "{mode:o}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let link = dir.path().join("link");
        symlink("fathom", &link).unwrap();
        assert!(check_binary(&link).is_ok());
        if rustix::process::geteuid().is_root() {
            lchown(&link, Some(4_000_000), None).unwrap();
            assert!(check_binary(&link).unwrap_err().contains("not followed"));
        }
        assert!(check_binary(dir.path()).is_err() && check_binary(Path::new("fathom")).is_err());
    }
}
