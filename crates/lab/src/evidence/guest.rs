//! The guest's half: what its CPUs did during a script, by two prints of its /proc/stat.

use fathom_run::evidence::Processors;

use super::processors;

const BEFORE: &str = "--- /proc/stat before ---";
const AFTER: &str = "--- /proc/stat after ---";

/// A script (busybox sh) that runs `work` and prints the CPUs' counters before and after it. Its
/// status is that of `work`.
pub fn around(work: &str) -> String {
    let print = |marker: &str| format!("echo '{marker}'; grep '^cpu' /proc/stat");
    let (before, after) = (print(BEFORE), print(AFTER));
    format!("{before}\n(\n{work}\n)\nfathom_status=$?\necho; {after}; (exit $fathom_status)\n")
}

/// Takes apart what such a script has printed: what `work` printed, and what the CPUs did
/// meanwhile. A guest may print anything.
pub fn split(printed: &str) -> (String, Option<Processors>) {
    let marker = |marker: &str| format!("{marker}\n");
    let parts = printed
        .split_once(&marker(BEFORE))
        .and_then(|(_, rest)| rest.rsplit_once(&format!("\n{}", marker(AFTER))));
    let Some((middle, after)) = parts else {
        return (printed.to_owned(), None);
    };
    let is_counter = |line: &str| line.starts_with("cpu");
    let counters: usize = middle
        .split_inclusive('\n')
        .take_while(|line| is_counter(line))
        .map(str::len)
        .sum();
    let (before, work) = middle.split_at(counters);
    let (before, after) = (processors::parse(before), processors::parse(after));
    (work.to_owned(), processors::between(&before, &after))
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
        let (said, processors) = split(&printed);
        let processors = processors.unwrap();
        assert_eq!(said, "");
        assert!(processors.busy.iter().sum::<f64>() > 0.0, "{processors:?}");
    }

    #[test]
    fn what_is_damaged_has_no_figures() {
        let cpu = |ticks: u32| format!("cpu0 {ticks} 0 0 50 0 0 0 0 0 0\n");
        let whole = format!("{BEFORE}\n{}x\n{AFTER}\n{}", cpu(10), cpu(20));
        assert_eq!(split(&whole).1.unwrap().busy, [100.0]);
        for damaged in [
            whole.replace(AFTER, "---"),
            whole.replace(BEFORE, ""),
            whole.replace("cpu0 20", "cpu0 x"),
            String::new(),
        ] {
            assert_eq!(split(&damaged).1, None, "{damaged}");
        }
    }
}
