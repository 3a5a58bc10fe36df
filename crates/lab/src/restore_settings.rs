//! Changes kernel settings temporarily and restores them, also when a signal ends the process.

use parking_lot::{Mutex, MutexGuard};
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Context, Result};

/// Settings to restore: each file and its previous content.
static CHANGED: Mutex<Vec<(PathBuf, String)>> = Mutex::new(Vec::new());

fn changed() -> MutexGuard<'static, Vec<(PathBuf, String)>> {
    CHANGED.lock()
}

/// A file that holds another value until this is dropped.
#[derive(Debug)]
pub(crate) struct ChangedSetting {
    file: PathBuf,
}

impl ChangedSetting {
    /// Writes `value` to the file. `before` is restored on drop.
    ///
    /// # Errors
    /// When the value cannot be written, for example without permission.
    pub fn new(file: &Path, value: &str, before: &str) -> Result<ChangedSetting> {
        changed().push((file.to_owned(), before.to_owned()));
        let changed = ChangedSetting {
            file: file.to_owned(),
        };
        fs::write(file, value).context(|| format!("cannot set {}", file.display()))?;
        Ok(changed)
    }
}

impl Drop for ChangedSetting {
    fn drop(&mut self) {
        let mut changed = changed();
        if let Some(at) = changed.iter().rposition(|(file, _)| *file == self.file) {
            restore(&changed.remove(at));
        }
    }
}

/// Restores all settings, for a signal handler that ends the process.
pub fn restore_all_settings() {
    changed().drain(..).rev().for_each(|one| restore(&one));
}

fn restore((file, before): &(PathBuf, String)) {
    let _ = fs::write(file, before); // the file may no longer exist
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_its_value_again_in_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("cpu.max");
        fs::write(&file, "5000 100000").unwrap();
        let text = || fs::read_to_string(&file).unwrap();
        let changed = ChangedSetting::new(&file, "max", "5000 100000").unwrap();
        assert_eq!(text(), "max");
        drop(changed);
        assert_eq!(text(), "5000 100000");
        assert!(ChangedSetting::new(Path::new("/none/x"), "1", "0").is_err());
    }
}
