//! Control groups of versions 1 and 2 (cgroups(7)): finds the groups of the watched processes.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::threads::tasks;
use crate::mount_table::unescaped;

/// A controller whose limits are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Controller {
    /// CPU time.
    Cpu,
    /// I/O on block devices.
    Io,
}

/// A mounted hierarchy that has the controller.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hierarchy {
    is_v2: bool,
    /// The group that is the root of the mount.
    root: String,
    mount: PathBuf,
}

/// A control group.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Group {
    /// Name of the group, as in /proc/PID/cgroup.
    pub name: String,
    /// The group's folder.
    pub folder: PathBuf,
}

impl Controller {
    /// Returns the controller's name in version 1.
    fn name_v1(self) -> &'static str {
        match self {
            Controller::Cpu => "cpu",
            Controller::Io => "blkio",
        }
    }
}

/// Returns the groups that contain threads of these processes, and their ancestors whose limits
/// apply, too.
pub fn groups_of(pids: impl Iterator<Item = u32>, controller: Controller) -> BTreeSet<Group> {
    let mounts = super::read("/proc/self/mountinfo").unwrap_or_default();
    let hierarchies = mounts
        .lines()
        .filter_map(|line| hierarchy(line, controller));
    let hierarchies: Vec<Hierarchy> = hierarchies.collect();
    let tasks = pids.flat_map(|pid| {
        let path = move |tid| format!("/proc/{pid}/task/{tid}/cgroup");
        tasks(pid).into_iter().map(path)
    });
    let texts: BTreeSet<String> = tasks.filter_map(|path| super::read(path).ok()).collect();
    let mut groups = BTreeSet::new();
    for text in texts {
        for hierarchy in &hierarchies {
            let find = |line| group(line, hierarchy.is_v2, controller);
            let Some(name) = text.lines().find_map(find) else {
                continue;
            };
            let mut found = hierarchy.upwards(name);
            if !hierarchy.is_v2 && controller == Controller::Io {
                // In version 1, I/O limits of a group do not apply to the groups in it.
                found.truncate(1);
            }
            groups.extend(found);
        }
    }
    groups
}

/// Parses a line such as `31 23 0:28 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup
/// rw,cpu,cpuacct`.
fn hierarchy(line: &str, controller: Controller) -> Option<Hierarchy> {
    let (mount, kind) = line.split_once(" - ")?;
    let mut kind = kind.split(' ');
    let name = controller.name_v1();
    let is_v2 = match kind.next()? {
        "cgroup2" => true,
        "cgroup" if kind.nth(1)?.split(',').any(|one| one == name) => false,
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
fn group(line: &str, is_v2: bool, controller: Controller) -> Option<&str> {
    let mut fields = line.splitn(3, ':');
    let (id, controllers, name) = (fields.next()?, fields.next()?, fields.next()?);
    let is_it = match is_v2 {
        true => id == "0" && controllers.is_empty(),
        false => { controllers.split(',') }.any(|one| one == controller.name_v1()),
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

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str =
        "9:name=systemd:/\n7:blkio:/io\n3:cpuset:/other\n1:cpu,cpuacct:/a/b\n0::/x y\n";

    #[test]
    fn groups_are_found_in_both_versions() {
        let named = |is_v2, controller| {
            let mut lines = V1.lines();
            lines.find_map(|line| group(line, is_v2, controller))
        };
        assert_eq!(named(false, Controller::Cpu), Some("/a/b"));
        assert_eq!(named(false, Controller::Io), Some("/io"));
        assert_eq!(named(true, Controller::Cpu), Some("/x y"));
        assert_eq!(group("0::/a:b", true, Controller::Io), Some("/a:b"));
        assert_eq!(group("1:cpu", false, Controller::Cpu), None);
    }

    #[test]
    fn hierarchies_are_found_where_they_are_mounted() {
        let v1 = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct";
        let v2 = "41 31 0:38 /pod /sys/fs/my\\040cgroup rw shared:9 - cgroup2 cgroup2 rw";
        let cpuset = "34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset";
        let found = hierarchy(v1, Controller::Cpu).unwrap();
        assert_eq!((found.is_v2, found.root.as_str()), (false, "/"));
        assert_eq!(hierarchy(v1, Controller::Io), None);
        let pod = hierarchy(v2, Controller::Io).unwrap();
        assert_eq!(pod.mount, Path::new("/sys/fs/my cgroup"));
        assert_eq!(hierarchy(cpuset, Controller::Cpu), None);
        assert_eq!(hierarchy("31 23 0:28", Controller::Cpu), None);
        let folders = |name| -> Vec<PathBuf> {
            let groups = pod.upwards(name).into_iter();
            groups.map(|group| group.folder).collect()
        };
        let expected = ["a/b", "a", ""].map(|below| pod.mount.join(below));
        assert_eq!(folders("/pod/a/b"), expected);
        assert_eq!(pod.upwards("/pod/a")[0].name, "/pod/a");
        assert!(folders("/podium").is_empty() && folders("/pod/../other").is_empty());
    }
}
