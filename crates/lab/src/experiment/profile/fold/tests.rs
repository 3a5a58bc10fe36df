use proptest::prelude::*;

use super::*;

const MODULES: &str = "virtio_pci 24576 0 - Live 0x0000000000000000\nvirtio_blk 28672 1 - Live \
                       0xffffffffc0120000\nbroken\n";

/// Output of perf 6.1.
const TEXT: &str = "\
swapper     0/0     K     
\tffffffff821f4dab pv_native_safe_halt ([kernel.kallsyms])
\tffffffff821f68b5 default_idle ([kernel.kallsyms])
\tffffffff813c59a6 do_idle ([kernel.kallsyms])

swapper     0/0     K     
\tffffffffc0123456 virtblk_done ([kernel.kallsyms])
\tffffffff81e11c7d asm_common_interrupt ([kernel.kallsyms])
\tffffffff813c59a6 do_idle ([kernel.kallsyms])

worker 0 25743/25746 K     
\tffffffff82203a31 _raw_spin_unlock_irq ([kernel.kallsyms])
\tffffffff82203a35 _raw_spin_unlock_irq ([kernel.kallsyms])
\tffffffff81e11c7d entry_SYSCALL_64_after_hwframe ([kernel.kallsyms])
\t          848683 <fathom_virtio::blk_queue::BlkQueue as fathom_core::source::Source>::notify (/usr/bin/fathom)
\t          ad22c9 std::sys::{closure#0} (/usr/bin/fathom (deleted))
\t    7f00a1b2c3d4 [unknown] (//anon)
\t    7f00a1b2c3d8 [unknown] (//anon)
\t    7f00a1b2c3dc [unknown] (//anon)

CPU 0/KVM 120/125 G     
\tffffffff81000010 [unknown] ([guest.kernel.kallsyms])

:120 120/120 G     
\tffffffff81000010 [unknown] ([guest.kernel.kallsyms])

CPU 0/KVM 120/125 KGg   
\t    7f00a1b2c3dc [unknown] ([unknown])
\t    7f00a1b2c3df [unknown] ([unknown])

";

fn fold(text: &[u8], known: &[Known]) -> Vec<String> {
    let mut folder = Folder::new(known.to_vec(), Modules::parse(MODULES));
    text.chunks(7).for_each(|chunk| folder.push(chunk));
    folder.finish().lines()
}

#[test]
fn samples_become_stacks() {
    let known = [(120, "qemu: "), (25743, "server: ")];
    let notify =
        "<fathom_virtio::blk_queue::BlkQueue as fathom_core::source::Source>::notify [fathom]";
    let expected = [
        "qemu: CPU 0/KVM;[guest] 2".to_owned(),
        "qemu: vCPUs;[guest] 1".to_owned(),
        format!(
            "server: worker 0;[unknown] [anon];std::sys::{{closure#0}} [fathom];{notify};\
             entry_SYSCALL_64_after_hwframe [kernel];_raw_spin_unlock_irq [kernel] 1"
        ),
        "swapper;do_idle [kernel];asm_common_interrupt [kernel];virtblk_done [virtio_blk.ko] 1"
            .to_owned(),
    ];
    assert_eq!(fold(TEXT.as_bytes(), &known), expected);
    // Text that is cut anywhere yields no additional stacks.
    for end in 0..TEXT.len() {
        let part = fold(&TEXT.as_bytes()[..end], &known);
        assert!(part.len() <= expected.len(), "{part:?}");
    }
}

#[test]
fn a_sample_without_a_call_graph_is_a_line() {
    let text = "          fathom 25803/25806 K      ffffffff81589536 __rseq_handle ([kernel.kallsyms])
 qemu-storage-da 25801/25801 U          5651f40bbe19 virtio_blk_process_req (/usr/bin/qemu-storage-daemon)
 qemu-storage-da 25801/25801 U          5651f422f151 [unknown] (/usr/bin/qemu-storage-daemon)
         swapper     0/0     K      ffffffff821f4dab pv_native_safe_halt ([kernel.kallsyms])
         swapper     0/1     K      ffffffff821f4dab nvme_irq (/lib/modules/6.1/nvme-core.ko.xz)
";
    let expected = [
        "fathom;__rseq_handle [kernel] 1",
        "qemu-storage-da;[unknown] [qemu-storage-daemon] 1",
        "qemu-storage-da;virtio_blk_process_req [qemu-storage-daemon] 1",
        "swapper;nvme_irq [nvme-core.ko] 1",
    ];
    assert_eq!(fold(text.as_bytes(), &[]), expected);
}

#[test]
fn a_line_without_end_takes_no_memory() {
    let mut folder = Folder::default();
    for _ in 0..1000 {
        folder.push(&[b'a'; 10_000]);
    }
    assert!(format!("{folder:?}").len() < 100_000);
    folder.push(b"\nx 1/1 U\n");
    for i in 0..10_000 {
        folder.push(format!("\t{i:x} f{i} (/x)\n").as_bytes());
    }
    assert_eq!(
        folder.stacks.sample.as_ref().unwrap().frames.len(),
        MAX_FRAMES
    );
    assert_eq!(folder.finish().total(), 1);
}

proptest! {
    #[test]
    fn any_text_is_folded(text in proptest::collection::vec(any::<u8>(), 0..2000)) {
        fold(&text, &[(1, "qemu: ")]);
    }

    /// Text made of parts of real output, which the parser accepts more often than random bytes.
    #[test]
    fn any_text_of_its_parts_is_folded(parts in proptest::collection::vec(
        prop_oneof![
            Just("\n"), Just("\t"), Just(" "), Just("/"), Just("0/0"), Just("swapper"), Just("12/13 K"),
            Just("ffffffff82203a31"), Just("7f00"), Just("("), Just(")"), Just("["), Just("]"),
            Just(" ([kernel.kallsyms])\n"), Just(" (deleted))"), Just("symbol"), Just(";"), Just("\u{e9}"),
        ], 0..200))
    {
        let lines = fold(parts.concat().as_bytes(), &[(12, "server: ")]);
        for line in lines {
            let (stack, count) = line.rsplit_once(' ').unwrap();
            prop_assert!(count.parse::<u64>().is_ok());
            prop_assert!(stack.split(';').all(|frame| !frame.is_empty()));
        }
    }
}
