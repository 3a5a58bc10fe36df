//! Control groups with a limit, of version 1 or 2.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{fs, thread};

use fathom_run::evidence::IoLimitKind;

/// A script that runs a command in a group.
const IN_GROUP: &str = r#"echo $$ > "$0"/cgroup.procs && exec chrt --rr 1 "$@""#;
/// Period of a CPU limit in microseconds.
const PERIOD_US: u64 = 100_000;

/// A control group with a limit, which is removed on drop. The processes must have ended before.
pub struct Group(PathBuf);

impl Group {
    /// Limits memory to this number of bytes, including the page cache of the processes' files.
    pub fn with_memory(bytes: u64) -> Group {
        let v2 = [("memory.max", bytes.to_string())];
        let v1 = [("memory.limit_in_bytes", bytes.to_string())];
        Group::make("memory", "memory", &v1, &v2)
    }

    /// Limits CPU time to this percentage of one CPU.
    pub fn with_cpu(percent: u64) -> Group {
        let quota = PERIOD_US * percent / 100;
        let v1 = [
            ("cpu.cfs_period_us", PERIOD_US.to_string()),
            ("cpu.cfs_quota_us", quota.to_string()),
        ];
        let v2 = [("cpu.max", format!("{quota} {PERIOD_US}"))];
        Group::make("cpu", "cpu", &v1, &v2)
    }

    /// Limits the I/O per second on a device, in bytes or in requests. `device` has its major and
    /// minor number.
    pub fn with_io(device: (u32, u32), kind: IoLimitKind, most: u64) -> Group {
        let (file, key) = match kind {
            IoLimitKind::ReadBytes => ("blkio.throttle.read_bps_device", "rbps"),
            IoLimitKind::WriteBytes => ("blkio.throttle.write_bps_device", "wbps"),
            IoLimitKind::Reads => ("blkio.throttle.read_iops_device", "riops"),
            IoLimitKind::Writes => ("blkio.throttle.write_iops_device", "wiops"),
        };
        let device = format!("{}:{}", device.0, device.1);
        let v1 = [(file, format!("{device} {most}"))];
        let v2 = [("io.max", format!("{device} {key}={most}"))];
        Group::make("blkio", "io", &v1, &v2)
    }

    /// Makes a group and writes its limits: those of version 1 to the hierarchy with `v1_name`.
    fn make(v1_name: &str, v2_name: &str, v1: &[(&str, String)], v2: &[(&str, String)]) -> Group {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("fathom-test-{v1_name}-{}-{number}", std::process::id());
        let root = Path::new("/sys/fs/cgroup");
        let is_v2 = root.join("cgroup.controllers").exists();
        let (parent, limits) = match is_v2 {
            true => (root.to_owned(), v2),
            false => (root.join(v1_name), v1),
        };
        let group = Group(parent.join(name));
        let make = || {
            if is_v2 {
                fs::write(root.join("cgroup.subtree_control"), format!("+{v2_name}"))?;
            }
            fs::create_dir(&group.0)?;
            { limits.iter() }.try_for_each(|(file, text)| fs::write(group.0.join(file), text))
        };
        make().unwrap_or_else(|error| {
            panic!("this test makes a control group for {v2_name}: run it as root ({error})")
        });
        group
    }

    /// Moves a process with all of its threads into the group.
    pub fn add(&self, pid: u32) {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).unwrap();
    }

    /// Returns the same command, in the group from its first page on, with a real-time priority.
    ///
    /// On a busy machine the load would otherwise wait for a CPU after each read, which would be
    /// its limit.
    pub fn runs(&self, command: &Command) -> Command {
        let mut shell = Command::new("sh");
        shell
            .args(["-c", IN_GROUP])
            .arg(&self.0)
            .arg(command.get_program())
            .args(command.get_args());
        shell
    }
}

impl Drop for Group {
    /// Removes the group, whose processes must have ended.
    fn drop(&mut self) {
        let is_gone = || fs::remove_dir(&self.0).is_ok();
        // A second panic would abort the whole test program.
        match thread::panicking() {
            true => drop(is_gone()),
            false => fathom_testing::until("the end of the control group", is_gone),
        }
    }
}
