//! Control groups that the lab creates, of version 1 or 2 (cgroups(7)). The module finds the limits
//! that this machine supports, creates groups with one limit, and removes groups after use.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use std::{fs, io, thread};

use crate::error::{Context, Error, Result};

const ATTEMPTS: u32 = 200;
const POLL: Duration = Duration::from_millis(10);
const PERIOD_US: u64 = 100_000;
const MOUNTS: &str = "/proc/self/mountinfo";

/// A limit on the processes of a control group.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Limit {
    /// CPU time, in CPUs.
    Cpus(f64),
    /// Reads per second from a block device, which is named by its device numbers.
    Reads { device: (u32, u32), per_second: u64 },
}

impl Limit {
    /// For version 1 and version 2: the controller, the limit's file, and the value to write.
    fn parts(self) -> [(&'static str, &'static str, String); 2] {
        match self {
            Limit::Cpus(cpus) => {
                let quota = (cpus * PERIOD_US as f64) as u64;
                [
                    ("cpu", "cpu.cfs_quota_us", quota.to_string()),
                    ("cpu", "cpu.max", format!("{quota} {PERIOD_US}")),
                ]
            }
            Limit::Reads { device, per_second } => {
                let (major, minor) = device;
                let v1 = format!("{major}:{minor} {per_second}");
                let v2 = format!("{major}:{minor} riops={per_second}");
                [
                    ("blkio", "blkio.throttle.read_iops_device", v1),
                    ("io", "io.max", v2),
                ]
            }
        }
    }
}

/// A control group of the lab with one limit. The group is removed on drop, once its processes have
/// ended.
#[derive(Debug)]
pub(crate) struct Limited {
    name: String,
    folder: PathBuf,
}

impl Limited {
    /// Creates a group without processes.
    ///
    /// # Errors
    /// When the caller is not root, or no hierarchy has the controller.
    pub fn new(limit: Limit) -> Result<Limited> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let [v1, v2] = limit.parts();
        let found = hierarchy_with(v1.0, false).map(|mount| (mount, v1.clone()));
        let found = found.or_else(|| Some((hierarchy_with(v2.0, true)?, v2)));
        let (mount, (controller, file, value)) = found.ok_or_else(|| none(v1.0))?;
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fathom-limit-{}-{number}", std::process::id());
        let limited = Limited {
            folder: mount.join(&name),
            name,
        };
        // Only version 2 has this file. If the controller is already enabled or cannot be enabled,
        // the write of the limit succeeds or fails accordingly.
        let _ = fs::write(
            mount.join("cgroup.subtree_control"),
            format!("+{controller}"),
        );
        for (path, value) in [
            (&limited.folder, None),
            (&limited.folder.join(file), Some(value)),
        ] {
            let what = || format!("cannot set {}", path.display());
            match value {
                None => fs::create_dir(path).context(what)?,
                Some(value) => fs::write(path, value).context(what)?,
            }
        }
        Ok(limited)
    }

    /// Moves processes into the group. Processes that they start later belong to it, too.
    ///
    /// # Errors
    /// When a process cannot be moved. Processes that have ended are skipped.
    pub fn take(&self, pids: impl IntoIterator<Item = u32>) -> Result<()> {
        let file = self.folder.join("cgroup.procs");
        for pid in pids {
            match fs::write(&file, pid.to_string()) {
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                other => other.context(|| format!("cannot write to {}", file.display()))?,
            }
        }
        Ok(())
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        remove(&self.name);
    }
}

/// Returns whether this machine can limit reads.
pub(crate) fn can_limit_reads() -> bool {
    let found = hierarchy_with("blkio", false).or_else(|| hierarchy_with("io", true));
    found.is_some()
}

/// Returns the mount point of a hierarchy of that version that has a controller.
fn hierarchy_with(controller: &str, is_v2: bool) -> Option<PathBuf> {
    let mounts = fs::read_to_string(MOUNTS).unwrap_or_default();
    let all = mounts.lines().filter_map(hierarchy);
    let mut all = all.filter(|(_, controllers)| controllers.is_none() == is_v2);
    let found = all.find(|(mount, controllers)| match controllers {
        Some(names) => names.iter().any(|one| one == controller),
        None => fs::read_to_string(mount.join("cgroup.controllers"))
            .is_ok_and(|text| text.split_whitespace().any(|one| one == controller)),
    });
    found.map(|(mount, _)| mount)
}

/// Fails unless groups can have a limit of that kind: `cpu` or `memory`.
///
/// # Errors
/// When no hierarchy has that controller.
pub(crate) fn need_controller(name: &str) -> Result<()> {
    let is_there = [false, true].map(|is_v2| hierarchy_with(name, is_v2).is_some());
    is_there
        .contains(&true)
        .then_some(())
        .ok_or_else(|| none(name))
}

fn none(controller: &str) -> Error {
    Error::Protocol(format!(
        "no limit can be set: this machine's control groups have no controller '{controller}'"
    ))
}

/// Removes the groups of that name from every hierarchy. Retries while a group is busy, because the
/// kernel removes ended processes with a delay.
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

/// Parses a line of mountinfo into the mount point and the controllers, for example `31 23 0:28 /
/// /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu,cpuacct`. Version 2 lists its controllers
/// in a file instead, so they are `None`.
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
    fn a_process_of_a_group_has_its_share_of_a_cpu() {
        let group = Limited::new(Limit::Cpus(0.2)).unwrap();
        let mut spinning = std::process::Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .unwrap();
        group.take([spinning.id()]).unwrap();
        let before = crate::process_tree::cpu_seconds(spinning.id());
        thread::sleep(Duration::from_secs(1));
        let took = crate::process_tree::cpu_seconds(spinning.id()) - before;
        spinning.kill().unwrap();
        spinning.wait().unwrap();
        // A busy machine may give it less.
        assert!(took < 0.4, "{took}");
        let folder = group.folder.clone();
        assert!(folder.exists());
        drop(group);
        assert!(!folder.exists());
    }

    #[test]
    fn a_process_of_a_group_reads_as_often_as_it_may() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("file");
        crate::bed::image::fill(&path, 1 << 20).unwrap();
        let device = crate::evidence::device_numbers(&path).unwrap();
        let per_second = 50;
        let group = Limited::new(Limit::Reads { device, per_second }).unwrap();
        let script = format!(
            "read go; dd if={} of=/dev/null bs=4k count=50 iflag=direct 2>/dev/null",
            path.display()
        );
        let mut reading = std::process::Command::new("sh")
            .args(["-c", &script])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        group.take([reading.id()]).unwrap();
        let begin = std::time::Instant::now();
        drop(reading.stdin.take());
        assert!(reading.wait().unwrap().success());
        // The read takes a second in theory, less the initial burst that the throttle allows.
        assert!(begin.elapsed() > Duration::from_millis(500));
    }

    #[test]
    fn a_limit_that_cannot_be_set_is_refused() {
        let error = need_controller("tea").unwrap_err().to_string();
        assert!(error.contains("no controller 'tea'"), "{error}");
    }
}
