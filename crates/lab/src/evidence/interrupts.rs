//! Parses /proc/interrupts: how often devices interrupted a machine.

/// Maximum number of lines, more than any machine has.
const MAX_LINES: usize = 4096;
/// Names of clock interrupts, which do not come from disk requests.
const CLOCKS: [&str; 2] = ["timer", "rtc0"];

/// Returns the interrupts of all devices since the machine started, without clocks and interrupts
/// between CPUs. Returns `None` if the text has none.
pub fn parse(text: &str) -> Option<u64> {
    let lines = text.lines().take(MAX_LINES).filter_map(device);
    lines.reduce(u64::saturating_add)
}

/// Parses a line such as ` 24:   1024   77   PCI-MSI 65536-edge   virtio3-req.0`.
fn device(line: &str) -> Option<u64> {
    let (number, rest) = line.split_once(':')?;
    number.trim().parse::<u32>().ok()?;
    if { rest.split_ascii_whitespace() }.any(|word| CLOCKS.contains(&word)) {
        return None;
    }
    // The line has a count per CPU, followed by words.
    let counts = rest
        .split_ascii_whitespace()
        .map_while(|word| word.parse().ok());
    counts.reduce(u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "           CPU0       CPU1
  0:         33          0   IO-APIC   2-edge      timer
  4:       1318          2   IO-APIC   4-edge      ttyS0
  8:          1          0   IO-APIC   8-edge      rtc0
 24:          0          0   PCI-MSI 65536-edge      virtio3-config
 25:      20000       7000   PCI-MSI 65537-edge      virtio3-req.0
NMI:          0          0   Non-maskable interrupts
LOC:      88888      99999   Local timer interrupts
ERR:          0
";

    #[test]
    fn devices_count_and_clocks_do_not() {
        assert_eq!(parse(TEXT), Some(1320 + 27000));
    }

    #[test]
    fn garbage_is_none_or_bounded() {
        for nothing in ["", "CPU0", "0: timer", "x: 5", ": 5", "24:"] {
            assert_eq!(parse(nothing), None, "{nothing}");
        }
        let huge = format!("1: {0}\n2: {0}", u64::MAX);
        assert_eq!(parse(&huge), Some(u64::MAX));
    }
}
