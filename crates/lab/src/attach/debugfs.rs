//! Reads KVM's debugfs files: which thread runs which vCPU, and the offset between a guest's and
//! the host's time stamp counter.

use std::fs;
use std::path::{Path, PathBuf};

use fathom_run::GuestOffset;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

const PLACE: &str = "/sys/kernel/debug";

/// Relation of a vCPU's TSC to the host's: `guest = host * ratio / 2^frac_bits + offset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TscOffset {
    /// Guest's counter minus the scaled host's counter, in ticks of the guest.
    pub offset: i64,
    /// `None` if KVM shows no ratio: both counters then run at the same rate.
    pub ratio: Option<u64>,
    /// Number of fraction bits of `ratio`; 0 if KVM shows none.
    pub frac_bits: u32,
}

/// debugfs. If it was not mounted, it is mounted while the value lives.
struct Debugfs {
    is_ours: bool,
}

impl Debugfs {
    fn open() -> Debugfs {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let is_there = mounts.lines().any(|line| {
            let mut fields = line.split(' ').skip(1);
            fields.next() == Some(PLACE) && fields.next() == Some("debugfs")
        });
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        let mounted =
            !is_there && mount("none", PLACE, "debugfs", flags, None::<&std::ffi::CStr>).is_ok();
        Debugfs { is_ours: mounted }
    }

    /// Returns the folder of a process's virtual machine, `kvm/PID-FD`. Returns `None` if the
    /// process has none or several.
    fn machine(&self, pid: u32) -> Option<PathBuf> {
        let prefix = format!("{pid}-");
        let entries = fs::read_dir(Path::new(PLACE).join("kvm")).ok()?;
        let mut found = entries.flatten().map(|entry| entry.path()).filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(&prefix)
        });
        let machine = found.next()?;
        found.next().is_none().then_some(machine)
    }
}

impl Drop for Debugfs {
    fn drop(&mut self) {
        if self.is_ours {
            let _ = unmount(PLACE, UnmountFlags::empty());
        }
    }
}

fn number<T: std::str::FromStr>(path: &Path) -> Option<T> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Returns the TSC offset of vCPU 0 of a QEMU process. Returns `None` without KVM, without root
/// rights, or if the kernel does not show it.
pub fn tsc_offset(pid: u32) -> Option<TscOffset> {
    let debugfs = Debugfs::open();
    let vcpu = debugfs.machine(pid)?.join("vcpu0");
    Some(TscOffset {
        offset: number(&vcpu.join("tsc-offset"))?,
        ratio: number(&vcpu.join("tsc-scaling-ratio")),
        frac_bits: number(&vcpu.join("tsc-scaling-ratio-frac-bits")).unwrap_or(0),
    })
}

/// Returns the offset for a run directory, from readings before and after the window.
pub fn guest_offset(before: Option<TscOffset>, after: Option<TscOffset>) -> Option<GuestOffset> {
    let (before, after) = (before?, after?);
    Some(GuestOffset {
        before: before.offset,
        after: after.offset,
        ratio: before.ratio,
        frac_bits: before.frac_bits,
    })
}

/// Returns pairs of (vCPU, thread id) of a process, as KVM knows them.
pub(super) fn vcpu_threads(pid: u32) -> Vec<(u32, u32)> {
    let debugfs = Debugfs::open();
    let Some(machine) = debugfs.machine(pid) else {
        return Vec::new();
    };
    let entries = fs::read_dir(machine).into_iter().flatten().flatten();
    let vcpu = |path: PathBuf| {
        let name = path
            .file_name()?
            .to_str()?
            .strip_prefix("vcpu")?
            .parse()
            .ok()?;
        Some((name, number(&path.join("pid"))?))
    };
    entries.filter_map(|entry| vcpu(entry.path())).collect()
}
