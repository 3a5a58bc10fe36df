//! CPU limits of control groups of version 1 and 2 (cgroups(7)): finds the groups of the watched
//! processes and reads how much they were throttled (cpu.stat).

use crate::mount_table::unescaped;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use fathom_run::evidence::Throttling;

use super::threads::tasks;
use crate::error::{Context, Error, Result};
use crate::restore_settings::ChangedSetting;

/// Maximum number of groups to watch. Processes are in few groups, but libvirt puts each vCPU into
/// its own.
const MAX_GROUPS: usize = 64;

/// A mounted hierarchy that limits CPU time.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hierarchy {
    is_v2: bool,
    /// The group that is the root of the mount.
    root: String,
    mount: PathBuf,
}

/// A group that has a limit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Group {
    /// Name of the group, as in /proc/PID/cgroup.
    name: String,
    folder: PathBuf,
}

/// Counters since the group's limit was set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    periods: u64,
    throttled: u64,
    held_ns: u64,
}

/// Returns the groups with a limit that contain threads of these processes, directly or in
/// subgroups.
pub fn limited(pids: impl Iterator<Item = u32>) -> Vec<Group> {
    let mounts = super::read("/proc/self/mountinfo").unwrap_or_default();
    let hierarchies: Vec<Hierarchy> = mounts.lines().filter_map(hierarchy).collect();
    let tasks = pids.flat_map(|pid| {
        let path = move |tid| format!("/proc/{pid}/task/{tid}/cgroup");
        tasks(pid).into_iter().map(path)
    });
    let texts: BTreeSet<String> = tasks.filter_map(|path| super::read(path).ok()).collect();
    let mut groups = BTreeSet::new();
    for text in texts {
        for hierarchy in &hierarchies {
            let name = text.lines().find_map(|line| group(line, hierarchy.is_v2));
            groups.extend(name.map_or(Vec::new(), |name| hierarchy.upwards(name)));
        }
    }
    let limited = groups.into_iter().filter(|group| is_limited(&group.folder));
    limited.take(MAX_GROUPS).collect()
}

/// Parses a line such as `31 23 0:28 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup
/// rw,cpu,cpuacct`.
fn hierarchy(line: &str) -> Option<Hierarchy> {
    let (mount, kind) = line.split_once(" - ")?;
    let mut kind = kind.split(' ');
    let is_v2 = match kind.next()? {
        "cgroup2" => true,
        "cgroup" if kind.nth(1)?.split(',').any(|one| one == "cpu") => false,
        _ => return None,
    };
    let mut fields = mount.split(' ').skip(3);
    Some(Hierarchy {
        is_v2,
        root: unescaped(fields.next()?),
        mount: unescaped(fields.next()?).into(),
    })
}

/// Parses `1:cpu,cpuacct:/vm1` (version 1) or `0::/machine.slice/vm1` (version 2) to the group's
/// name.
fn group(line: &str, is_v2: bool) -> Option<&str> {
    let mut fields = line.splitn(3, ':');
    let (id, controllers, name) = (fields.next()?, fields.next()?, fields.next()?);
    let is_it = match is_v2 {
        true => id == "0" && controllers.is_empty(),
        false => controllers.split(',').any(|one| one == "cpu"),
    };
    is_it.then_some(name)
}

impl Hierarchy {
    /// Returns the group and its ancestors, as far as the mount shows them.
    fn upwards(&self, name: &str) -> Vec<Group> {
        let below = Path::new(name).strip_prefix(&self.root);
        // Groups outside of the mount or of this process's namespace have `..` in their names.
        let Some(below) = below.ok().filter(|_| !name.contains("/..")) else {
            return Vec::new();
        };
        let group = |below: &Path| Group {
            name: Path::new(&self.root).join(below).display().to_string(),
            folder: self.mount.join(below),
        };
        below.ancestors().map(group).collect()
    }
}

fn is_limited(folder: &Path) -> bool {
    let word = |file: &str| {
        let text = super::read(folder.join(file)).ok()?;
        text.split_ascii_whitespace().next().map(str::to_owned)
    };
    let (v2, v1) = (word("cpu.max"), word("cpu.cfs_quota_us"));
    v2.is_some_and(|quota| quota != "max") || v1.is_some_and(|quota| !quota.starts_with('-'))
}

/// Removes the limit of a group that contains this process. The limit is restored when the returned
/// value is dropped. Other groups are not changed, even if a run directory names them.
///
/// # Errors
/// When this process is in no such group, or lacks the permission.
pub fn lift(name: &str) -> Result<ChangedSetting> {
    let groups = limited(std::iter::once(std::process::id()));
    let Some(group) = groups.into_iter().find(|group| group.name == name) else {
        let text = format!("this process is in no control group {name} with a CPU limit");
        return Err(Error::Protocol(text));
    };
    let folder = group.folder;
    let (v2, v1) = (folder.join("cpu.max"), folder.join("cpu.cfs_quota_us"));
    let (file, none) = if v2.exists() { (v2, "max") } else { (v1, "-1") };
    let before = super::read(&file).context(|| format!("cannot read {}", file.display()))?;
    ChangedSetting::new(&file, none, before.trim())
}

/// Reads a group's counters. Returns `None` if the group no longer exists.
pub fn read(group: &Group) -> Option<Stat> {
    parse(&super::read(group.folder.join("cpu.stat")).ok()?)
}

/// Parses cpu.stat. Version 2 counts microseconds (`throttled_usec`), version 1 nanoseconds
/// (`throttled_time`).
fn parse(text: &str) -> Option<Stat> {
    let number = |key: &str| {
        let mut lines = text.lines().filter_map(|line| line.split_once(' '));
        let (_, value) = lines.find(|(name, _)| *name == key)?;
        value.trim().parse::<u64>().ok()
    };
    let us = || number("throttled_usec").map(|us| us.saturating_mul(1000));
    Some(Stat {
        periods: number("nr_periods")?,
        throttled: number("nr_throttled")?,
        held_ns: us().or_else(|| number("throttled_time"))?,
    })
}

/// Returns the effect of the limit that throttled its threads for the longest time.
pub fn between(
    groups: &[Group],
    before: &[Option<Stat>],
    after: &[Option<Stat>],
) -> Option<Throttling> {
    let stats = before.iter().zip(after);
    let both = groups
        .iter()
        .zip(stats)
        .filter_map(|(group, (before, after))| {
            let (before, after) = ((*before)?, (*after)?);
            Some(Throttling {
                group: group.name.clone(),
                periods: after.periods.saturating_sub(before.periods),
                throttled: after.throttled.saturating_sub(before.throttled),
                seconds: after.held_ns.saturating_sub(before.held_ns) as f64 / 1e9,
            })
        });
    both.max_by(|one, other| one.seconds.total_cmp(&other.seconds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A group that contains this process and has a limit that is never reached.
    struct Own(PathBuf);

    impl Own {
        fn make() -> std::io::Result<Own> {
            let name = format!("fathom-test-lift-{}", std::process::id());
            let root = Path::new("/sys/fs/cgroup");
            let is_v2 = root.join("cgroup.controllers").exists();
            let own = match is_v2 {
                true => {
                    fs::write(root.join("cgroup.subtree_control"), "+cpu")?;
                    Own(root.join(name))
                }
                false => Own(root.join("cpu").join(name)),
            };
            fs::create_dir(&own.0)?;
            match is_v2 {
                true => fs::write(own.0.join("cpu.max"), "99000000 1000000")?,
                false => fs::write(own.0.join("cpu.cfs_quota_us"), "9900000")?,
            }
            fs::write(own.0.join("cgroup.procs"), std::process::id().to_string())?;
            Ok(own)
        }
    }

    impl Drop for Own {
        fn drop(&mut self) {
            let parent = self.0.parent().unwrap().join("cgroup.procs");
            let _ = fs::write(parent, std::process::id().to_string());
            let is_gone = || fs::remove_dir(&self.0).is_ok();
            // A second panic would abort the whole test program.
            match std::thread::panicking() {
                true => drop(is_gone()),
                false => fathom_testing::until("the end of the control group", is_gone),
            }
        }
    }

    #[test]
    fn the_limit_of_a_group_is_lifted_for_a_while() {
        let own = Own::make()
            .expect("this test makes a control group: run it as root where cgroups limit CPU time");
        let is_own = |group: &Group| group.folder == own.0;
        let limited = || {
            limited(std::iter::once(std::process::id()))
                .into_iter()
                .find(is_own)
        };
        let group = limited().expect("it has a limit");
        let lifted = lift(&group.name).unwrap();
        assert_eq!(limited(), None);
        drop(lifted);
        assert_eq!(limited(), Some(group));
        let error = lift("/fathom-test-of-others").unwrap_err().to_string();
        assert!(error.contains("in no control group"), "{error}");
    }

    const V1: &str = "9:name=systemd:/\n7:blkio:/\n3:cpuset:/other\n1:cpu,cpuacct:/a/b\n0::/x y\n";

    #[test]
    fn groups_are_told_in_both_versions() {
        let named = |is_v2| V1.lines().find_map(|line| group(line, is_v2));
        assert_eq!(named(false), Some("/a/b"));
        assert_eq!(named(true), Some("/x y"));
        assert_eq!(group("0::/a:b", true), Some("/a:b"));
        assert_eq!(group("1:cpu", false), None);
    }

    #[test]
    fn hierarchies_are_found_where_they_are_mounted() {
        let v1 = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct";
        let v2 = "41 31 0:38 /pod /sys/fs/my\\040cgroup rw shared:9 - cgroup2 cgroup2 rw";
        let cpuset = "34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset";
        let found = hierarchy(v1).unwrap();
        assert_eq!((found.is_v2, found.root.as_str()), (false, "/"));
        let pod = hierarchy(v2).unwrap();
        assert_eq!(pod.mount, Path::new("/sys/fs/my cgroup"));
        assert_eq!(hierarchy(cpuset), None);
        assert_eq!(hierarchy("31 23 0:28"), None);
        let folders = |name| -> Vec<PathBuf> {
            let groups = pod.upwards(name).into_iter();
            groups.map(|group| group.folder).collect()
        };
        let expected = ["a/b", "a", ""].map(|below| pod.mount.join(below));
        assert_eq!(folders("/pod/a/b"), expected);
        assert_eq!(pod.upwards("/pod/a")[0].name, "/pod/a");
        assert!(folders("/podium").is_empty() && folders("/pod/../other").is_empty());
    }

    #[test]
    fn what_a_limit_did_is_counted_in_both_versions() {
        let v1 = parse("nr_periods 50\nnr_throttled 20\nthrottled_time 1500000000\nnr_bursts 0\n");
        let v2 =
            "usage_usec 9\nuser_usec 9\nnr_periods 150\nnr_throttled 63\nthrottled_usec 5600000\n";
        let group = |name: &str| Group {
            name: name.into(),
            folder: PathBuf::new(),
        };
        let groups = [group("/idle"), group("/vm1"), group("/gone")];
        let found = between(&groups, &[v1, v1, v1], &[v1, parse(v2), None]).unwrap();
        assert_eq!(
            found,
            Throttling {
                group: "/vm1".into(),
                periods: 100,
                throttled: 43,
                seconds: 4.1,
            }
        );
        assert_eq!(parse("usage_usec 9\n"), None);
        assert_eq!(between(&[], &[], &[]), None);
    }
}
