//! Schedulers of the host's block devices, set for a cell and restored afterwards.

use std::fs;
use std::path::{Path, PathBuf};

use super::parameters::Scheduler;
use crate::error::{Context, Error, Result};
use crate::restore_settings::ChangedSetting;

/// Keeps a device's scheduler changed until drop.
#[derive(Debug)]
pub(super) struct Set {
    _changed: ChangedSetting,
}

/// Returns the file of a device's scheduler. `device` is a name in /sys/block.
pub(super) fn file_of(device: &str) -> PathBuf {
    Path::new("/sys/block").join(device).join("queue/scheduler")
}

/// Checks that a device has a scheduler. `file` is the device's scheduler file.
///
/// # Errors
/// One line that names the available schedulers.
pub(super) fn check(file: &Path, scheduler: Scheduler) -> Result<()> {
    let text = fs::read_to_string(file).context(|| format!("cannot read {}", file.display()))?;
    let mut all = text
        .split_whitespace()
        .map(|word| word.trim_matches(['[', ']']));
    if all.any(|name| name == scheduler.name()) {
        return Ok(());
    }
    Err(Error::Unusable {
        path: file.to_owned(),
        reason: format!(
            "this device has no scheduler {scheduler}; its schedulers are {}",
            text.trim()
        ),
    })
}

impl Set {
    /// Sets the scheduler of a device. `file` is the device's scheduler file.
    ///
    /// # Errors
    /// If the device has no such scheduler, or without permission.
    pub fn new(file: &Path, scheduler: Scheduler) -> Result<Set> {
        check(file, scheduler)?;
        let what = || format!("cannot set {}", file.display());
        let text = fs::read_to_string(file).context(what)?;
        let before = text.split(['[', ']']).nth(1).unwrap_or("none");
        Ok(Set {
            _changed: ChangedSetting::new(file, scheduler.name(), before)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scheduler_is_set_and_put_back() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("scheduler");
        fs::write(&file, "none [mq-deadline] kyber\n").unwrap();
        let set = Set::new(&file, Scheduler::Kyber).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "kyber");
        drop(set);
        assert_eq!(fs::read_to_string(&file).unwrap(), "mq-deadline");
        let error = Set::new(&file, Scheduler::Bfq).unwrap_err().to_string();
        assert!(
            error.contains("no scheduler bfq; its schedulers are mq-deadline"),
            "{error}"
        );
        assert!(check(Path::new("/none"), Scheduler::None).is_err());
    }
}
