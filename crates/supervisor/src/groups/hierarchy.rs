//! Finds the kernel's control groups: version 2 has one hierarchy for all controllers, version 1
//! several hierarchies for one or some controllers each. The process is in one group of each
//! hierarchy.

use fathom_units::cause;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Name of the group that this process moves to, so that groups next to it can have controllers.
/// Version 2 permits no process in a group whose children have controllers. systemd's
/// DelegateSubgroup= may have made the group.
const LEAF: &str = "supervisor";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    One,
    Two,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Controller {
    Memory,
    Cpu,
    Tasks,
}

impl Controller {
    /// The kernel's name of the controller.
    pub fn name(self) -> &'static str {
        match self {
            Controller::Memory => "memory",
            Controller::Cpu => "cpu",
            Controller::Tasks => "pids",
        }
    }

    /// The configuration's key that needs the controller.
    pub fn key(self) -> &'static str {
        match self {
            Controller::Memory => "memory-max",
            Controller::Cpu => "cpu-max",
            Controller::Tasks => "tasks-max",
        }
    }
}

/// The group below which groups with a controller can be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Base {
    pub version: Version,
    pub dir: PathBuf,
}

impl Base {
    /// Finds the base for a controller. The error is one line for the user.
    pub fn find(controller: Controller) -> Result<Base, String> {
        let read = |path: &str| {
            fs::read_to_string(path).map_err(|error| format!("{path}: {}", cause(error)))
        };
        let (mounts, own) = (read("/proc/self/mountinfo")?, read("/proc/self/cgroup")?);
        if let Some(dir) = unified(&mounts, &own)
            && controllers(&dir, "cgroup.controllers").contains(&controller.name().to_owned())
        {
            let version = Version::Two;
            return Ok(Base { version, dir });
        }
        let version = Version::One;
        let dir = separate(&mounts, &own, controller.name());
        dir.map(|dir| Base { version, dir }).ok_or_else(|| {
            format!(
                "control group controller '{}' is not available; start the server in a control \
                 group to which the controller is delegated (systemd: Delegate=yes)",
                controller.name()
            )
        })
    }

    /// Enables the controller for groups below this one. The error is one line for the user.
    pub fn enable(&self, controller: Controller) -> Result<(), String> {
        if self.version == Version::One {
            return Ok(());
        }
        match enable(&self.dir, controller) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {}
            done => return done.map_err(|error| self.problem(&error)),
        }
        let leaf = self.dir.join(LEAF);
        make(&leaf).map_err(|error| self.problem(&error))?;
        // Writing 0 moves this process, with all its threads.
        let moved = fs::write(leaf.join("cgroup.procs"), "0");
        moved.map_err(|error| self.problem(&error))?;
        enable(&self.dir, controller).map_err(|error| match error.kind() {
            io::ErrorKind::ResourceBusy => format!(
                "other processes are in the control group {}; start the server in its own \
                 control group (systemd: Delegate=yes)",
                self.dir.display()
            ),
            _ => self.problem(&error),
        })
    }

    pub fn problem(&self, error: &io::Error) -> String {
        format!(
            "cannot create control groups in {}: {}; start the server as root, or in a \
             control group that is delegated to it (systemd: Delegate=yes)",
            self.dir.display(),
            cause(error)
        )
    }
}

/// Enables a controller for the groups below this one.
pub fn enable(dir: &Path, controller: Controller) -> io::Result<()> {
    const FILE: &str = "cgroup.subtree_control";
    let name = controller.name();
    match controllers(dir, FILE).iter().any(|other| other == name) {
        true => Ok(()),
        false => fs::write(dir.join(FILE), format!("+{name}")),
    }
}

/// Creates a group, unless the group exists.
pub fn make(dir: &Path) -> io::Result<()> {
    match fs::create_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

fn controllers(dir: &Path, file: &str) -> Vec<String> {
    let text = fs::read_to_string(dir.join(file)).unwrap_or_default();
    text.split_whitespace().map(str::to_owned).collect()
}

/// Returns the group below which this process makes groups, in version 2.
fn unified(mounts: &str, own: &str) -> Option<PathBuf> {
    let path = own.lines().find_map(|line| line.strip_prefix("0::"))?;
    let dir = place(mounts, path, |kind, _| kind == "cgroup2")?;
    match dir.file_name() {
        Some(name) if name == LEAF => dir.parent().map(Path::to_owned),
        _ => Some(dir),
    }
}

/// Returns the group of this process, in the hierarchy of version 1 with this controller.
fn separate(mounts: &str, own: &str, controller: &str) -> Option<PathBuf> {
    let has = |list: &str| list.split(',').any(|one| one == controller);
    let path = own.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let is_it = fields.next().is_some_and(has);
        fields.next().filter(|_| is_it)
    })?;
    place(mounts, path, |kind, options| {
        kind == "cgroup" && has(options)
    })
}

/// Returns the directory of a group whose path the kernel reports, below a mount of this type and
/// these options.
fn place(mounts: &str, path: &str, is_it: impl Fn(&str, &str) -> bool) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let (before, behind) = line.split_once(" - ")?;
        let mut before = before.split(' ').skip(3);
        let (root, at) = (before.next()?, before.next()?);
        let mut behind = behind.split(' ');
        let (kind, options) = (behind.next()?, behind.nth(1)?);
        if !is_it(kind, options) {
            return None;
        }
        // Only a part of the hierarchy may be mounted there, and groups outside of that part are
        // not visible.
        let below = Path::new(path).strip_prefix(root).ok()?;
        let is_seen = below.components().all(|part| part.as_os_str() != "..");
        is_seen.then(|| Path::new(at).join(below))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIFIED: &str = "\
        24 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
        35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
    const SEPARATE: &str = "\
        31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
        32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
        35 31 0:32 /box /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
        41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";

    #[test]
    fn a_group_is_where_its_hierarchy_is_mounted() {
        let dir = |dir: &str| Some(PathBuf::from(dir));
        for (own, wanted) in [
            ("0::/\n", dir("/sys/fs/cgroup")),
            ("0::/a.slice/b\n", dir("/sys/fs/cgroup/a.slice/b")),
            // The process was moved by itself, or by systemd.
            ("0::/b/supervisor\n", dir("/sys/fs/cgroup/b")),
            ("0::/../x\n", None),
            ("1:cpu:/\n", None),
        ] {
            assert_eq!(unified(UNIFIED, own), wanted, "{own}");
        }
        let own = "4:memory:/box/a\n2:cpu,cpuacct:/x\n1:name=systemd:/\n0::/\n";
        for (controller, wanted) in [
            ("cpu", dir("/sys/fs/cgroup/cpu,cpuacct/x")),
            ("memory", dir("/sys/fs/cgroup/memory/a")),
            ("pids", None),
        ] {
            assert_eq!(separate(SEPARATE, own, controller), wanted, "{controller}");
        }
        // The group is not in the mounted part.
        assert_eq!(separate(SEPARATE, "4:memory:/other\n", "memory"), None);
        assert_eq!(separate(UNIFIED, "0::/\n", "memory"), None);
    }
}
