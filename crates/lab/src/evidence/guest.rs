//! The guest's part of the evidence: its CPUs' activity, device interrupts and driver kicks during
//! a script. All are differences between two outputs of /proc/stat, /proc/interrupts and the hits
//! of a probe.

use fathom_run::evidence::Processors;

use super::{interrupts, kicks, processors};

const BEFORE: &str = "--- counters before ---";
const AFTER: &str = "--- counters after ---";
const END: &str = "--- counters end ---";

/// Counts of a guest between two outputs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counted {
    /// Activity of the guest's CPUs; `None` if the guest did not print it.
    pub processors: Option<Processors>,
    /// Interrupts of all devices except clocks.
    pub interrupts: Option<u64>,
    /// Kicks of all virtio devices.
    pub kicks: Option<u64>,
}

/// Returns a script that prints those counters that exist.
pub fn print() -> String {
    let (probe, kicks) = (kicks::PROBE, kicks::PRINT);
    format!("{{ {probe}\ngrep '^cpu' /proc/stat; cat /proc/interrupts; {kicks}; }} || true")
}

/// Returns a script for busybox sh that runs `work` and prints the counters before and after it.
/// The script's exit status is that of `work`.
pub fn around(work: &str) -> String {
    let print = print();
    format!(
        "echo '{BEFORE}'\n{print}\necho '{END}'\n(\n{work}\n)\nfathom_status=$?\n\
         echo; echo '{AFTER}'\n{print}\n(exit $fathom_status)\n"
    )
}

/// Splits the output of such a script into the output of `work` and the counts. The output is
/// untrusted: a guest may print anything.
pub fn split(printed: &str) -> (String, Counted) {
    let line = |marker: &str| format!("{marker}\n");
    let parts = printed
        .split_once(&line(BEFORE))
        .and_then(|(_, rest)| rest.split_once(&line(END)))
        .and_then(|(before, rest)| {
            let (work, after) = rest.rsplit_once(&format!("\n{}", line(AFTER)))?;
            Some((before, work, after))
        });
    let Some((before, work, after)) = parts else {
        return (printed.to_owned(), Counted::default());
    };
    (work.to_owned(), between(before, after))
}

/// Returns the counts between two outputs.
pub fn between(before: &str, after: &str) -> Counted {
    let (began, ended) = (processors::parse(before), processors::parse(after));
    let interrupts = interrupts::parse(before).zip(interrupts::parse(after));
    let kicks = kicks::parse(before).zip(kicks::parse(after));
    let since = |(before, after): (u64, u64)| after.checked_sub(before);
    Counted {
        processors: processors::between(&began, &ended),
        interrupts: interrupts.and_then(since),
        kicks: kicks.and_then(since),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_script_is_run_between_two_prints() {
        let script = around("echo first\nprintf last; exit 3");
        let output = Command::new("busybox").args(["sh", "-c", &script]).output();
        let output = output.expect("this test needs busybox: run `make setup`");
        assert_eq!(output.status.code(), Some(3));
        let printed = String::from_utf8(output.stdout).unwrap();
        assert_eq!(split(&printed).0, "first\nlast");
    }

    #[test]
    fn the_cpus_are_those_of_the_work() {
        let busy = around("i=0; while [ $i -lt 200000 ]; do i=$((i + 1)); done");
        let printed = crate::host::run("busybox", &["sh", "-c", &busy]).unwrap();
        let (said, counted) = split(&printed);
        let processors = counted.processors.unwrap();
        assert_eq!(said, "");
        assert!(processors.busy.iter().sum::<f64>() > 0.0, "{processors:?}");
    }

    #[test]
    fn what_is_damaged_has_no_figures() {
        let cpu = |ticks: u32| format!("cpu0 {ticks} 0 0 50 0 0 0 0 0 0\n");
        let counters = |n: u32| format!("{} 24: {n} virtio0\n", cpu(n));
        let whole = format!(
            "{BEFORE}\n{}{END}\nx\n{AFTER}\n{}",
            counters(10),
            counters(20)
        );
        let counted = split(&whole).1;
        assert_eq!(counted.processors.unwrap().busy, [100.0]);
        assert_eq!(counted.interrupts, Some(10));
        for damaged in [
            whole.replace(AFTER, "---"),
            whole.replace(BEFORE, ""),
            whole.replace(END, ""),
            whole.replace("20", "x"),
            String::new(),
        ] {
            assert_eq!(split(&damaged).1, Counted::default(), "{damaged}");
        }
    }
}
