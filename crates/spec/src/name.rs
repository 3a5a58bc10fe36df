//! Names of disks, tenants and pools, and paths in messages.

use std::path::Path;

/// Maximum length of a name in bytes.
const MAX_NAME: usize = 64;

/// Refuses a name that cannot be a file's and a directory's, too: those of disks that are added, of
/// tenants and of pools.
pub fn check_name(name: &str) -> Result<(), String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    match (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(is_plain) {
        true => check_first(name),
        false => Err(format!(
            "'{name}' is not a disk's name, which has 1 to {MAX_NAME} letters, digits, -, _ and ."
        )),
    }
}

/// Refuses a name that begins with a dot: such a file in disks-dir is hidden, or not finished.
pub fn check_first(name: &str) -> Result<(), String> {
    match name.starts_with('.') {
        true => Err(format!(
            "not a disk's name, which does not begin with a dot; call it '{}', for example",
            name.trim_start_matches('.')
        )),
        false => Ok(()),
    }
}

/// A path from another process has to be absolute.
pub fn check_path(path: &Path) -> Result<(), String> {
    match path.is_absolute() {
        true => Ok(()),
        false => Err(format!("{}: not an absolute path", path.display())),
    }
}
