//! Counts the kicks of a guest's virtio drivers with a probe on the kernel's notify function. A hit
//! costs the guest little, and the same with every server.

/// Script for the guest's shell that sets the probe in the first window. The probe records nothing:
/// its trace instance is off, and hits are counted nevertheless. Without kprobes, the script does
/// nothing.
pub const PROBE: &str = "(
t=/sys/kernel/tracing
[ -d $t/events ] || mount -t tracefs none $t
[ -d $t/instances/fathom_kicks ] || {
    mkdir $t/instances/fathom_kicks
    echo 0 >$t/instances/fathom_kicks/tracing_on
    echo 'p:fathom/fathom_kick vp_notify' >>$t/kprobe_events
    echo 1 >$t/instances/fathom_kicks/events/fathom/fathom_kick/enable
}
) >/dev/null 2>&1";

/// Script for the guest's shell that prints the line for [`parse`].
pub const PRINT: &str = "grep fathom_kick /sys/kernel/tracing/kprobe_profile 2>/dev/null";

/// Returns the number of kicks since the probe was set, from a line `  fathom_kick    1024    0`.
pub fn parse(text: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let is_ours = words.next()? == "fathom_kick";
        is_ours.then(|| words.next()?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_are_found_among_other_lines() {
        let text = "cpu0 1 2\n  0:  33  IO-APIC\n  fathom_kick        1024               3\n";
        assert_eq!(parse(text), Some(1024));
        for nothing in ["", "fathom_kick", "fathom_kick x", "fathom_kicks 1"] {
            assert_eq!(parse(nothing), None, "{nothing}");
        }
    }
}
