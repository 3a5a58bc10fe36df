//! How a guest's time stamp counter relates to the host's, as KVM tells it in debugfs.

use std::fs;
use std::path::Path;

use fathom_run::GuestOffset;

const KVM: &str = "/sys/kernel/debug/kvm";

/// The relation of vCPU 0 of a QEMU process now; None where the kernel does not tell.
pub(super) fn read(pid: u32) -> Option<GuestOffset> {
    let prefix = format!("{pid}-");
    let machine = fs::read_dir(KVM)
        .ok()?
        .flatten()
        .find(|entry| entry.file_name().to_string_lossy().starts_with(&prefix))?;
    read_vcpu(&machine.path().join("vcpu0"))
}

fn read_vcpu(dir: &Path) -> Option<GuestOffset> {
    let number = |name: &str| {
        let text = fs::read_to_string(dir.join(name)).ok()?;
        text.trim().parse::<i64>().ok()
    };
    let offset = number("tsc-offset")?;
    Some(GuestOffset {
        before: offset,
        after: offset,
        ratio: number("tsc-scaling-ratio").map(i64::cast_unsigned),
        frac_bits: number("tsc-scaling-ratio-frac-bits")
            .and_then(|bits| u32::try_from(bits).ok())
            .unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vcpu_with_and_without_scaling() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read_vcpu(dir.path()), None);
        fs::write(dir.path().join("tsc-offset"), "-14638273006\n").unwrap();
        let offset = read_vcpu(dir.path()).unwrap();
        assert_eq!((offset.before, offset.ratio), (-14_638_273_006, None));
        fs::write(dir.path().join("tsc-scaling-ratio"), "281474976710656\n").unwrap();
        fs::write(dir.path().join("tsc-scaling-ratio-frac-bits"), "48\n").unwrap();
        let offset = read_vcpu(dir.path()).unwrap();
        assert_eq!((offset.ratio, offset.frac_bits), (Some(1 << 48), 48));
    }
}
