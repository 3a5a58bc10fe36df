//! How often a guest's virtio drivers kicked: the hits of a probe at the kernel's function that
//! does. A hit costs the guest a little, the same whoever serves the disk.

/// For the guest's shell: the probe is there from the first window on. It records nothing: its own
/// instance of the tracer is off, and hits are counted all the same. Without kprobes nothing
/// happens.
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

/// For the guest's shell: what is parsed here.
pub const PRINT: &str = "grep fathom_kick /sys/kernel/tracing/kprobe_profile 2>/dev/null";

/// The kicks since there is a probe: `  fathom_kick    1024    0`.
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
