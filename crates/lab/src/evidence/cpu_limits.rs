//! CPU limits of control groups of both versions (cgroups(7)): reads how long the groups of the
//! watched processes were throttled (cpu.stat).

use std::path::Path;

use fathom_run::evidence::Throttling;

use super::groups::{Controller, Group, groups_of};
use crate::error::{Context, Error, Result};
use crate::restore_settings::ChangedSetting;

/// Maximum number of groups to watch. Processes are in few groups, but libvirt puts each vCPU into
/// its own.
const MAX_GROUPS: usize = 64;

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
    let groups = groups_of(pids, Controller::Cpu).into_iter();
    let limited = groups.filter(|group| is_limited(&group.folder));
    limited.take(MAX_GROUPS).collect()
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
    use std::path::PathBuf;

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
