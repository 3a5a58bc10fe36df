//! Counts the kicks of a guest's virtio drivers with probes on the kernel's notify functions. A hit
//! costs the guest little, and the same with every server.

/// Script for the guest's shell that sets the probes in the first window: on the functions of the
/// transports that the guest's devices have, PCI or MMIO. The probes record nothing: their trace
/// instance is off, and hits are counted nevertheless. Without kprobes, the script does nothing.
pub const PROBE: &str = "(
t=/sys/kernel/tracing
[ -d $t/events ] || mount -t tracefs none $t
[ -d $t/instances/fathom_kicks ] || {
    mkdir $t/instances/fathom_kicks
    echo 0 >$t/instances/fathom_kicks/tracing_on
    set -- /sys/bus/pci/drivers/virtio-pci/*:*
    [ -e \"$1\" ] && pci='vp_notify vp_notify_with_data'
    set -- /sys/bus/platform/drivers/virtio-mmio/*/virtio*
    [ -e \"$1\" ] && mmio='vm_notify vm_notify_with_data'
    for f in $pci $mmio; do
        echo \"p:fathom/fathom_kick_$f $f\" >>$t/kprobe_events
        echo 1 >$t/instances/fathom_kicks/events/fathom/fathom_kick_$f/enable
    done
}
) >/dev/null 2>&1";

/// Script for the guest's shell that prints the lines for [`parse`].
pub const PRINT: &str = "grep fathom_kick_ /sys/kernel/tracing/kprobe_profile 2>/dev/null";

/// Returns the number of kicks since the probes were set, from lines such as
/// `  fathom_kick_vp_notify    1024    0`. Returns `None` without such a line.
pub fn parse(text: &str) -> Option<u64> {
    let hits = text.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let is_ours = words.next()?.starts_with("fathom_kick_");
        is_ours.then(|| words.next()?.parse::<u64>().ok())?
    });
    hits.reduce(u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_are_found_among_other_lines() {
        let text = "cpu0 1 2\n  0:  33  IO-APIC\n  fathom_kick_vp_notify        1024       3\n";
        assert_eq!(parse(text), Some(1024));
        let both = format!("{text}  fathom_kick_vm_notify 7 0\n");
        assert_eq!(parse(&both), Some(1031));
        for nothing in ["", "fathom_kick_x", "fathom_kick_x x", "fathom_kicks 1"] {
            assert_eq!(parse(nothing), None, "{nothing}");
        }
    }

    /// Runs the script in a made-up /sys of a microvm: the function of the PCI driver must have no
    /// probe, because its zero hits would count as zero kicks.
    #[test]
    fn only_transports_of_devices_are_probed() {
        for (device, function, other) in [
            ("pci/drivers/virtio-pci/0000:00:01.0", "vp_notify", "vm_"),
            ("platform/drivers/virtio-mmio/a/virtio0", "vm_notify", "vp_"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let path = |name: &str| dir.path().join(name);
            std::fs::create_dir_all(path("kernel/tracing/events")).unwrap();
            std::fs::create_dir_all(path("kernel/tracing/instances")).unwrap();
            std::fs::create_dir_all(path("bus").join(device)).unwrap();
            let script = PROBE.replace("/sys/", &format!("{}/", dir.path().display()));
            let ran = std::process::Command::new("sh")
                .args(["-c", &script])
                .status();
            ran.unwrap();
            let probes = std::fs::read_to_string(path("kernel/tracing/kprobe_events")).unwrap();
            let line = format!("p:fathom/fathom_kick_{function} {function}\n");
            assert!(
                probes.starts_with(&line) && !probes.contains(other),
                "{probes}"
            );
        }
    }
}
