//! I/O limits of control groups of both versions (blk-throttle): reads the limits of the watched
//! processes' groups and the I/O of these groups.
//!
//! Sources: Documentation/admin-guide/cgroup-v2.rst (`io.max`, `io.stat`) and
//! Documentation/admin-guide/cgroup-v1/blkio-controller.rst (`blkio.throttle.*`).

use std::path::{Path, PathBuf};

use fathom_run::evidence::{IoLimit, IoLimitKind};

use super::groups::{Controller, Group, groups_of};
use crate::error::{Error, Result};
use crate::restore_settings::ChangedSetting;

/// Maximum number of limits to watch.
const MAX_LIMITS: usize = 64;
/// The limits and counters of version 2.
const MAX_V2: &str = "io.max";
const STAT_V2: &str = "io.stat";

/// All kinds of limits, each with its key in `io.max`, its key in `io.stat`, its file in version 1,
/// and the file and operation of its counter there.
const KINDS: [Names; 4] = [
    Names {
        kind: IoLimitKind::ReadBytes,
        max: "rbps",
        stat: "rbytes",
        file_v1: "blkio.throttle.read_bps_device",
        stat_v1: ("blkio.throttle.io_service_bytes", "Read"),
    },
    Names {
        kind: IoLimitKind::WriteBytes,
        max: "wbps",
        stat: "wbytes",
        file_v1: "blkio.throttle.write_bps_device",
        stat_v1: ("blkio.throttle.io_service_bytes", "Write"),
    },
    Names {
        kind: IoLimitKind::Reads,
        max: "riops",
        stat: "rios",
        file_v1: "blkio.throttle.read_iops_device",
        stat_v1: ("blkio.throttle.io_serviced", "Read"),
    },
    Names {
        kind: IoLimitKind::Writes,
        max: "wiops",
        stat: "wios",
        file_v1: "blkio.throttle.write_iops_device",
        stat_v1: ("blkio.throttle.io_serviced", "Write"),
    },
];

/// Names of a kind of limit in the files of both versions.
#[derive(Debug, PartialEq, Eq)]
struct Names {
    kind: IoLimitKind,
    max: &'static str,
    stat: &'static str,
    file_v1: &'static str,
    stat_v1: (&'static str, &'static str),
}

/// A group's limit for one device.
#[derive(Debug, PartialEq, Eq)]
pub struct Limit {
    group: Group,
    /// Major and minor number: `254:0`.
    device: String,
    names: &'static Names,
    /// Operations or bytes per second.
    allowed: u64,
}

/// Returns the limits of the groups that contain threads of these processes.
pub fn limited(pids: impl Iterator<Item = u32>) -> Vec<Limit> {
    let groups = groups_of(pids, Controller::Io).into_iter();
    groups.flat_map(limits_of).take(MAX_LIMITS).collect()
}

fn limits_of(group: Group) -> Vec<Limit> {
    let v2 = super::read(group.folder.join(MAX_V2)).unwrap_or_default();
    let mut found = Vec::new();
    for names in &KINDS {
        let v1 = super::read(group.folder.join(names.file_v1)).unwrap_or_default();
        let of_v1 = v1.lines().filter_map(|line| line.split_once(' '));
        let of_v2 = v2.lines().filter_map(|line| key(line, names.max));
        let limits = of_v1.chain(of_v2).filter_map(|(device, value)| {
            Some(Limit {
                group: group.clone(),
                device: device.to_owned(),
                names,
                allowed: value.trim().parse().ok()?,
            })
        });
        found.extend(limits);
    }
    found
}

/// Returns the device and the value of a key in a line such as `254:0 rbps=max wbps=1048576`.
fn key<'a>(line: &'a str, key: &str) -> Option<(&'a str, &'a str)> {
    let (device, pairs) = line.split_once(' ')?;
    let mut pairs = pairs.split(' ').filter_map(|pair| pair.split_once('='));
    let (_, value) = pairs.find(|(name, _)| *name == key)?;
    Some((device, value))
}

/// Reads the number of operations or bytes that the limit has counted. Returns `None` if the group
/// no longer exists.
pub fn read(limit: &Limit) -> Option<u64> {
    let names = limit.names;
    let v2 = limit.group.folder.join(STAT_V2);
    if let Ok(text) = super::read(v2) {
        let mut lines = text.lines();
        let line = lines.find(|line| line.split(' ').next() == Some(&limit.device));
        // A group without I/O on the device has no line.
        return match line {
            Some(line) => key(line, names.stat)?.1.parse().ok(),
            None => Some(0),
        };
    }
    let (file, operation) = names.stat_v1;
    let text = super::read(limit.group.folder.join(file)).ok()?;
    let of_line = |line: &str| {
        let mut words = line.split(' ');
        let is_it = words.next()? == limit.device && words.next()? == operation;
        words.next()?.parse().ok().filter(|_| is_it)
    };
    Some(text.lines().find_map(of_line).unwrap_or(0))
}

/// Returns the limit of which the largest part was used in a window of `seconds`.
pub fn between(
    limits: &[Limit],
    before: &[Option<u64>],
    after: &[Option<u64>],
    seconds: f64,
) -> Option<IoLimit> {
    let counts = before.iter().zip(after);
    let used = limits
        .iter()
        .zip(counts)
        .filter_map(|(limit, (before, after))| {
            Some(IoLimit {
                group: limit.group.name.clone(),
                device: device_name(&limit.device),
                kind: limit.names.kind,
                allowed: limit.allowed as f64,
                used: (*after)?.saturating_sub((*before)?),
            })
        });
    let share = |one: &IoLimit| one.used as f64 / (one.allowed * seconds).max(f64::MIN_POSITIVE);
    used.max_by(|one, other| share(one).total_cmp(&share(other)))
}

/// Returns the name of a device in /sys/block, or its numbers if there is no such device.
fn device_name(numbers: &str) -> String {
    let is_number = numbers.chars().all(|c| c.is_ascii_digit() || c == ':');
    let path = Path::new("/sys/dev/block").join(numbers);
    let target = std::fs::read_link(path).ok().filter(|_| is_number);
    let name = target.as_deref().and_then(Path::file_name);
    name.map_or_else(|| numbers.to_owned(), |name| name.to_string_lossy().into())
}

/// Removes a limit of a group that contains this process. The limit is restored when the returned
/// value is dropped. Other groups are not changed, even if a run directory names them.
///
/// # Errors
/// When this process's groups have no such limit, or when the permission is missing.
pub fn lift(limit: &IoLimit) -> Result<ChangedSetting> {
    let own = limited(std::iter::once(std::process::id())).into_iter();
    let is_it = |own: &Limit| {
        own.group.name == limit.group
            && own.names.kind == limit.kind
            && device_name(&own.device) == limit.device
    };
    let Some(own) = own.into_iter().find(is_it) else {
        let text = format!(
            "this process is in no control group {} with that I/O limit",
            limit.group
        );
        return Err(Error::Protocol(text));
    };
    let (file, none, before) = own.settings();
    ChangedSetting::new(&file, &none, &before)
}

impl Limit {
    /// Returns the file of the limit, the text that removes the limit, and the text that sets it.
    fn settings(&self) -> (PathBuf, String, String) {
        let (folder, device, allowed) = (&self.group.folder, &self.device, self.allowed);
        let v2 = folder.join(MAX_V2);
        if v2.exists() {
            let set = |value: &str| format!("{device} {}={value}", self.names.max);
            return (v2, set("max"), set(&allowed.to_string()));
        }
        let v1 = folder.join(self.names.file_v1);
        (v1, format!("{device} 0"), format!("{device} {allowed}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::{Read, Write};
    use std::process::{Command, Stdio};

    /// Returns a folder like that of a group, with these files.
    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    fn limits(folder: &tempfile::TempDir) -> Vec<Limit> {
        limits_of(Group {
            name: "/vm1".into(),
            folder: folder.path().into(),
        })
    }

    fn kinds(limits: &[Limit]) -> Vec<(&str, IoLimitKind, u64)> {
        let all = limits.iter();
        all.map(|one| (&*one.device, one.names.kind, one.allowed))
            .collect()
    }

    #[test]
    fn limits_of_version_2_are_read() {
        let folder = folder(&[
            (
                MAX_V2,
                "8:16 rbps=2097152 wbps=max riops=max wiops=120\n8:0 rbps=max\n",
            ),
            (
                STAT_V2,
                "253:0 rbytes=9\n8:16 rbytes=8192 wbytes=4096 rios=2 wios=7 dbytes=0 dios=0\n",
            ),
        ]);
        let limits = limits(&folder);
        let expected = [
            ("8:16", IoLimitKind::ReadBytes, 2 << 20),
            ("8:16", IoLimitKind::Writes, 120),
        ];
        assert_eq!(kinds(&limits), expected);
        assert_eq!(
            limits.iter().map(read).collect::<Vec<_>>(),
            [Some(8192), Some(7)]
        );
        let (file, none, before) = limits[1].settings();
        assert_eq!(file, folder.path().join(MAX_V2));
        assert_eq!((&*none, &*before), ("8:16 wiops=max", "8:16 wiops=120"));
    }

    #[test]
    fn limits_of_version_1_are_read() {
        let counts = "8:16 Read 3\n8:16 Write 4\n8:16 Total 7\nTotal 7\n";
        let folder = folder(&[
            ("blkio.throttle.read_iops_device", "8:16 300\n8:0 x\n"),
            ("blkio.throttle.write_bps_device", "8:32 1024\n"),
            ("blkio.throttle.io_serviced", counts),
            ("blkio.throttle.io_service_bytes", "Total 0\n"),
        ]);
        let limits = limits(&folder);
        let expected = [
            ("8:32", IoLimitKind::WriteBytes, 1024),
            ("8:16", IoLimitKind::Reads, 300),
        ];
        assert_eq!(kinds(&limits), expected);
        assert_eq!(
            limits.iter().map(read).collect::<Vec<_>>(),
            [Some(0), Some(3)]
        );
        let (file, none, before) = limits[1].settings();
        assert_eq!(file, folder.path().join("blkio.throttle.read_iops_device"));
        assert_eq!((&*none, &*before), ("8:16 0", "8:16 300"));
    }

    #[test]
    fn the_limit_that_is_used_most_is_returned() {
        let folder = folder(&[(MAX_V2, "999:0 rbps=1000 wbps=1000 riops=max wiops=max\n")]);
        let limits = limits(&folder);
        let before = [Some(5), Some(5)];
        let found = between(&limits, &before, &[Some(505), Some(9905)], 10.0).unwrap();
        assert_eq!((found.kind, found.used), (IoLimitKind::WriteBytes, 9900));
        assert_eq!((&*found.group, &*found.device), ("/vm1", "999:0"));
        let gone = between(&limits, &before, &[Some(505), None], 10.0).unwrap();
        assert_eq!(gone.kind, IoLimitKind::ReadBytes);
        assert_eq!(between(&[], &[], &[], 10.0), None);
        assert_eq!(between(&limits, &[None, None], &before, 10.0), None);
    }

    /// A group with a limit, which is removed on drop.
    struct Made(PathBuf);

    impl Made {
        /// Makes a group that may read this often from a device.
        fn limiting(device: &str, reads: u32) -> Made {
            let name = format!("fathom-test-io-{}", std::process::id());
            let root = Path::new("/sys/fs/cgroup");
            let is_v2 = root.join("cgroup.controllers").exists();
            let (parent, file, text) = match is_v2 {
                true => (root.to_owned(), MAX_V2, format!("{device} riops={reads}")),
                false => (
                    root.join("blkio"),
                    "blkio.throttle.read_iops_device",
                    format!("{device} {reads}"),
                ),
            };
            if is_v2 {
                fs::write(root.join("cgroup.subtree_control"), "+io").unwrap();
            }
            let made = Made(parent.join(name));
            fs::create_dir(&made.0)
                .expect("this test makes a control group: run it as root where cgroups limit I/O");
            fs::write(made.0.join(file), text).unwrap();
            made
        }
    }

    impl Drop for Made {
        fn drop(&mut self) {
            let is_gone = || fs::remove_dir(&self.0).is_ok();
            match std::thread::panicking() {
                true => drop(is_gone()),
                false => fathom_testing::until("the end of the control group", is_gone),
            }
        }
    }

    /// `dd` reads with O_DIRECT in a group that may make 1000 reads per second.
    #[test]
    fn the_kernel_counts_what_a_limit_allows() {
        let mut image = tempfile::Builder::new().tempfile_in(".").unwrap();
        image.write_all(&vec![7; 64 * 4096]).unwrap();
        image.as_file().sync_all().unwrap();
        let (major, minor) = super::super::device_numbers(image.path())
            .expect("this test needs a build on a file system with a block device");
        let made = Made::limiting(&format!("{major}:{minor}"), 1000);
        let mut child = Command::new("sh")
            .args([
                "-c",
                "read go && exec dd iflag=direct bs=4k status=none \"if=$0\"",
            ])
            .arg(image.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        fs::write(made.0.join("cgroup.procs"), child.id().to_string()).unwrap();
        let limits: Vec<Limit> = limited(std::iter::once(child.id()));
        let before: Vec<Option<u64>> = limits.iter().map(read).collect();
        child.stdin.take().unwrap().write_all(b"go\n").unwrap();
        let mut data = Vec::new();
        child.stdout.take().unwrap().read_to_end(&mut data).unwrap();
        assert_eq!(data, [7; 64 * 4096]);
        let after: Vec<Option<u64>> = limits.iter().map(read).collect();
        assert!(child.wait().unwrap().success());
        let used = between(&limits, &before, &after, 1.0).unwrap();
        assert_eq!((used.kind, used.allowed), (IoLimitKind::Reads, 1000.0));
        assert!(used.used >= 64, "{used:?}");
        let error = lift(&used).unwrap_err().to_string();
        assert!(error.contains("in no control group"), "{error}");
    }
}
