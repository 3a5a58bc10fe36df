//! Assigns each sample to a component.
//!
//! On the host, the innermost frame that matches a rule decides: a lock taken by ext4 counts for
//! the file system. If no frame matches, the process decides: the cost of a system call itself
//! counts for its caller.

use fathom_run::folded::{QEMU, SERVER, is_kernel, parts};
use fathom_run::{Better, Folded, Measure, Side, Unit};

use super::fold::IN_GUEST;

const GUEST: [&str; 2] = ["guest.kernel", "guest.user"];
const HOST: [&str; 7] = [
    "host.guest",
    "host.kvm",
    "host.qemu",
    "host.server",
    "host.block",
    "host.file-system",
    "host.other",
];

/// Kernel frames of a component, by module or by prefix of the symbol. Leading underscores of the
/// symbol are ignored.
struct Rule {
    component: &'static str,
    objects: &'static [&'static str],
    symbols: &'static [&'static str],
}

const RULES: [Rule; 3] = [
    Rule {
        component: "host.kvm",
        objects: &["kvm.ko", "kvm_intel.ko", "kvm_amd.ko"],
        symbols: &["kvm_", "vmx_", "svm_", "vcpu_", "irqfd_", "ioeventfd_"],
    },
    Rule {
        component: "host.block",
        objects: &[
            "virtio_blk.ko",
            "nvme.ko",
            "nvme_core.ko",
            "scsi_mod.ko",
            "sd_mod.ko",
            "dm_mod.ko",
            "loop.ko",
        ],
        symbols: &[
            "blk_",
            "bio_",
            "submit_bio",
            "blkdev_",
            "block_",
            "virtblk_",
            "nvme_",
            "scsi_",
            "dm_",
            "elv_",
            "dd_",
            "bfq_",
            "kyber_",
            "loop_",
        ],
    },
    Rule {
        component: "host.file-system",
        objects: &[
            "ext4.ko",
            "xfs.ko",
            "btrfs.ko",
            "jbd2.ko",
            "overlay.ko",
            "fuse.ko",
            "nfs.ko",
        ],
        symbols: &[
            "ext4_",
            "xfs_",
            "btrfs_",
            "jbd2_",
            "iomap_",
            "ovl_",
            "fuse_",
            "nfs_",
            "f2fs_",
            "generic_file_",
            "generic_perform_write",
            "filemap_read",
            "filemap_write",
        ],
    },
];

/// Returns the percentage of a side's samples for each component. Empty if there are no samples.
pub fn measures(folded: &Folded, side: Side) -> Vec<Measure> {
    let components: &[&'static str] = match side {
        Side::Guest => &GUEST,
        Side::Host => &HOST,
    };
    let total = folded.total();
    if total == 0 {
        return Vec::new();
    }
    let mut counts = vec![0u64; components.len()];
    for (stack, count) in folded.stacks() {
        let component = of(&stack, side);
        if let Some(at) = components.iter().position(|one| *one == component) {
            counts[at] = counts[at].saturating_add(count);
        }
    }
    let measure = |(component, count): (&&str, u64)| {
        let percent = count as f64 / total as f64 * 100.0;
        let name = format!("profile.{component}");
        Measure::new(name, Unit::Percent, percent, Better::Neither).of(total)
    };
    components.iter().zip(counts).map(measure).collect()
}

/// Returns the component of a stack: the command, then frames from the outermost to the innermost.
fn of(stack: &[&str], side: Side) -> &'static str {
    let [command, frames @ ..] = stack else {
        return "host.other";
    };
    if side == Side::Guest {
        let innermost = frames.last().is_some_and(|frame| is_kernel(parts(frame).1));
        return GUEST[usize::from(!innermost)];
    }
    if frames == [IN_GUEST] {
        return "host.guest";
    }
    let known = frames.iter().rev().find_map(|frame| {
        let (symbol, object) = parts(frame);
        let symbol = symbol.trim_start_matches('_');
        let fits = |rule: &&Rule| {
            rule.objects.contains(&object)
                || rule.symbols.iter().any(|begin| symbol.starts_with(begin))
        };
        // Programs also have functions with such names, for example QEMU's blk_aio_preadv.
        is_kernel(object).then(|| RULES.iter().find(fits))?
    });
    match known {
        Some(rule) => rule.component,
        None if command.starts_with(QEMU) => "host.qemu",
        None if command.starts_with(SERVER) => "host.server",
        None => "host.other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(stack: &str) -> &'static str {
        of(&stack.split(';').collect::<Vec<_>>(), Side::Host)
    }

    #[test]
    fn the_innermost_frame_that_is_known_decides() {
        let server = "server: disk-0;main [fathom];__io_uring_enter [kernel]";
        for (stack, component) in [
            (
                "server: disk-0;main [fathom];memcpy [libc.so.6]",
                "host.server",
            ),
            (server, "host.server"),
            (
                &format!("{server};ext4_file_read_iter [ext4.ko]"),
                "host.file-system",
            ),
            (
                &format!("{server};ext4_file_read_iter [kernel];_raw_spin_lock [kernel]"),
                "host.file-system",
            ),
            (
                &format!(
                    "{server};iomap_dio_rw [kernel];__submit_bio [kernel];_raw_spin_lock [kernel]"
                ),
                "host.block",
            ),
            (
                &format!("{server};eventfd_write [kernel];kvm_arch_set_irq_inatomic [kvm.ko]"),
                "host.kvm",
            ),
            (
                "qemu: CPU 0/KVM;ioctl [libc.so.6];kvm_vcpu_ioctl [kvm.ko];vmx_vcpu_run [kvm_intel.ko]",
                "host.kvm",
            ),
            ("qemu: CPU 0/KVM;[guest]", "host.guest"),
            (
                "qemu: CPU 0/TCG;cpu_exec [qemu-system-x86_64];[unknown] [anon]",
                "host.qemu",
            ),
            (
                "qemu: IO io0;blk_aio_preadv [qemu-system-x86_64]",
                "host.qemu",
            ),
            ("kworker/0:1H;blk_mq_run_work_fn [kernel]", "host.block"),
            (
                "swapper;asm_common_interrupt [kernel];nvme_irq [nvme.ko]",
                "host.block",
            ),
            ("bash;do_syscall_64 [kernel]", "host.other"),
            ("bash", "host.other"),
        ] {
            assert_eq!(host(stack), component, "{stack}");
        }
    }

    #[test]
    fn shares_are_of_a_sides_samples_and_add_up() {
        let mut folded = Folded::default();
        folded.add(["fio", "main [fio]"], 25);
        folded.add(["fio", "main [fio]", "virtio_queue_rq [virtio_blk.ko]"], 75);
        let guest = measures(&folded, Side::Guest);
        let told: Vec<_> = guest
            .iter()
            .map(|m| (m.name.as_str(), m.value, m.samples))
            .collect();
        assert_eq!(
            told,
            [
                ("profile.guest.kernel", 75.0, 100),
                ("profile.guest.user", 25.0, 100)
            ]
        );
        let host: f64 = measures(&folded, Side::Host).iter().map(|m| m.value).sum();
        assert!((host - 100.0).abs() < 1e-9);
        assert_eq!(measures(&Folded::default(), Side::Host), []);
    }
}
