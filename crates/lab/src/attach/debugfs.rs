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

/// Returns the TSC offsets of the vCPUs of a QEMU process. Returns none without KVM, without root
/// rights, or if the kernel does not show them.
pub fn tsc_offsets(pid: u32) -> Vec<TscOffset> {
    let debugfs = Debugfs::open();
    let offset = |vcpu: PathBuf| {
        Some(TscOffset {
            offset: number(&vcpu.join("tsc-offset"))?,
            ratio: number(&vcpu.join("tsc-scaling-ratio")),
            frac_bits: number(&vcpu.join("tsc-scaling-ratio-frac-bits")).unwrap_or(0),
        })
    };
    let machine = debugfs.machine(pid);
    let vcpus = machine.iter().flat_map(|machine| vcpus_in(machine));
    // An offset that cannot be read is not known to be the same as the others.
    let all: Option<Vec<TscOffset>> = vcpus.map(|(_, path)| offset(path)).collect();
    all.unwrap_or_default()
}

/// Returns the offset for a run directory, from readings of all vCPUs before and after the window.
///
/// # Errors
/// When the offset is not the same for all vCPUs: no offset relates the guest's clock.
pub fn guest_offset(
    before: &[TscOffset],
    after: &[TscOffset],
) -> std::result::Result<Option<GuestOffset>, &'static str> {
    let (Some(first), Some(last)) = (before.first(), after.first()) else {
        return Ok(None);
    };
    if before.iter().any(|one| one != first) || after.iter().any(|one| one != last) {
        return Err(
            "the TSC offsets of the guest's vCPUs differ: the clocks are related by causality \
             instead",
        );
    }
    Ok(Some(GuestOffset {
        before: first.offset,
        after: last.offset,
        ratio: first.ratio,
        frac_bits: first.frac_bits,
    }))
}

/// Returns pairs of (vCPU, folder) of a virtual machine's folder.
fn vcpus_in(machine: &Path) -> Vec<(u32, PathBuf)> {
    let entries = fs::read_dir(machine).into_iter().flatten().flatten();
    let vcpu = |path: PathBuf| {
        let name = path.file_name()?.to_str()?;
        let number = name.strip_prefix("vcpu")?.parse().ok()?;
        Some((number, path))
    };
    entries.filter_map(|entry| vcpu(entry.path())).collect()
}

/// Returns pairs of (vCPU, thread id) of a process, as KVM knows them.
pub(super) fn vcpu_threads(pid: u32) -> Vec<(u32, u32)> {
    let debugfs = Debugfs::open();
    let Some(machine) = debugfs.machine(pid) else {
        return Vec::new();
    };
    let thread = |(vcpu, path): (u32, PathBuf)| Some((vcpu, number(&path.join("pid"))?));
    vcpus_in(&machine).into_iter().filter_map(thread).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offset_holds_only_if_all_vcpus_have_it() {
        let offset = |offset| TscOffset {
            offset,
            ratio: None,
            frac_bits: 0,
        };
        let (same, other) = ([offset(-7); 2], [offset(-7), offset(-9)]);
        let found = guest_offset(&same, &same).unwrap().unwrap();
        assert_eq!((found.before, found.after), (-7, -7));
        assert!(guest_offset(&same, &other).is_err());
        assert!(guest_offset(&other, &same).is_err());
        assert_eq!(guest_offset(&[], &same), Ok(None));
    }
}
