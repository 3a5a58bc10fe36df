//! Control groups that the lab has made, of either version (cgroups(7)): which limits this machine
//! can set, and the removal of groups whose processes have ended.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io, thread};

use crate::error::{Error, Result};

const ATTEMPTS: u32 = 200;
const POLL: Duration = Duration::from_millis(10);
const MOUNTS: &str = "/proc/self/mountinfo";

/// Fails unless groups can be given a limit of that kind, `cpu` or `memory`.
///
/// # Errors
/// When no hierarchy has that controller.
pub(crate) fn need_controller(name: &str) -> Result<()> {
    let mounts = fs::read_to_string(MOUNTS).unwrap_or_default();
    let has = |(mount, controllers): (PathBuf, Option<Vec<String>>)| {
        let controllers = controllers.unwrap_or_else(|| {
            let text = fs::read_to_string(mount.join("cgroup.controllers"));
            let text = text.unwrap_or_default();
            text.split_whitespace().map(str::to_owned).collect()
        });
        controllers.iter().any(|one| one == name)
    };
    match mounts.lines().filter_map(hierarchy).any(has) {
        true => Ok(()),
        false => Err(Error::Protocol(format!(
            "no limit can be set: this machine's control groups have no controller '{name}'"
        ))),
    }
}

/// Removes the groups of that name from every hierarchy. Their processes have ended, or are about
/// to: the kernel takes a moment.
pub(crate) fn remove(name: &str) {
    let mounts = fs::read_to_string(MOUNTS).unwrap_or_default();
    for (mount, _) in mounts.lines().filter_map(hierarchy) {
        let path = mount.join(name);
        let is_busy = || {
            let removed = fs::remove_dir(&path); // most are not there
            removed.is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy)
        };
        for _ in 0..ATTEMPTS {
            if !is_busy() {
                break;
            }
            thread::sleep(POLL);
        }
    }
}

/// `31 23 0:28 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu,cpuacct`: where it is
/// mounted, and its controllers, which version 2 has in a file.
fn hierarchy(line: &str) -> Option<(PathBuf, Option<Vec<String>>)> {
    let (mount, kind) = line.split_once(" - ")?;
    let mount = Path::new(mount.split(' ').nth(4)?).to_owned();
    let mut kind = kind.split(' ');
    match kind.next()? {
        "cgroup2" => Some((mount, None)),
        "cgroup" => {
            let controllers = kind.nth(1)?.split(',').map(str::to_owned);
            Some((mount, Some(controllers.collect())))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_of_both_versions_are_told() {
        let v1 = "31 23 0:28 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu,cpuacct";
        let (mount, controllers) = hierarchy(v1).unwrap();
        assert_eq!(mount, Path::new("/sys/fs/cgroup/cpu"));
        assert_eq!(controllers.unwrap(), ["rw", "cpu", "cpuacct"]);
        let v2 = "29 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw";
        assert_eq!(hierarchy(v2), Some(("/sys/fs/cgroup".into(), None)));
        assert_eq!(hierarchy("29 23 0:26 / /x rw - tmpfs tmpfs rw"), None);
        assert_eq!(hierarchy(""), None);
    }

    #[test]
    fn a_limit_that_cannot_be_set_is_refused() {
        let error = need_controller("tea").unwrap_err().to_string();
        assert!(error.contains("no controller 'tea'"), "{error}");
    }
}
