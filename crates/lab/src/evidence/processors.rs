//! Parses /proc/stat: a machine's CPU times in ticks since its start (proc_stat(5)).

use fathom_run::evidence::Processors;

pub const PATH: &str = "/proc/stat";
/// Maximum number of CPUs, more than any kernel supports.
const MAX_CPUS: usize = 8192;
/// Number of columns: user, nice, system, idle, iowait, irq, softirq, steal. The following guest
/// columns are included in user and nice.
const COLUMNS: usize = 8;

/// Ticks of one CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    number: u32,
    columns: [u64; COLUMNS],
}

/// Parses the CPUs of a text. Other lines are skipped, because the text may come from a guest.
pub fn parse(text: &str) -> Vec<Cpu> {
    let cpus = text.lines().filter_map(cpu);
    cpus.take(MAX_CPUS).collect()
}

/// Parses a line such as `cpu0 45790 9771 8198 15323 128 0 15 1386 0 0`.
fn cpu(line: &str) -> Option<Cpu> {
    let mut words = line.split_ascii_whitespace();
    let number = words.next()?.strip_prefix("cpu")?.parse().ok()?;
    let mut columns = [0; COLUMNS];
    for column in &mut columns {
        *column = words.next()?.parse().ok()?;
    }
    Some(Cpu { number, columns })
}

/// Returns the CPUs' activity between two texts. Returns `None` if the texts have no CPU in common,
/// or no tick has passed between them.
pub fn between(before: &[Cpu], after: &[Cpu]) -> Option<Processors> {
    let mut processors = Processors::default();
    for after in after {
        // A CPU that appeared during the window is skipped.
        let Some(before) = before.iter().find(|one| one.number == after.number) else {
            continue;
        };
        let (busy, steal, all) = spent(before, after);
        if all > 0 {
            let percent = |part: u64| part as f64 * 100.0 / all as f64;
            processors.busy.push(percent(busy));
            processors.steal.push(percent(steal));
        }
    }
    (!processors.busy.is_empty()).then_some(processors)
}

/// Returns (running, stolen, all) ticks. Idle and iowait may decrease slightly (proc_stat(5)).
fn spent(before: &Cpu, after: &Cpu) -> (u64, u64, u64) {
    let mut ticks = [0; COLUMNS];
    for (column, ticks) in ticks.iter_mut().enumerate() {
        *ticks = after.columns[column].saturating_sub(before.columns[column]);
    }
    let [user, nice, system, idle, iowait, irq, softirq, steal] = ticks;
    let sum = |ticks: &[u64]| ticks.iter().fold(0u64, |sum, one| sum.saturating_add(*one));
    let busy = sum(&[user, nice, system, irq, softirq]);
    (busy, steal, sum(&[busy, steal, idle, iowait]))
}

/// Returns (running, all) ticks of all CPUs since the machine started.
pub fn total(cpus: &[Cpu]) -> (u64, u64) {
    let zero = Cpu {
        number: 0,
        columns: [0; COLUMNS],
    };
    cpus.iter().fold((0u64, 0u64), |(running, all), cpu| {
        let (busy, _, spent) = spent(&zero, cpu);
        (running.saturating_add(busy), all.saturating_add(spent))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "cpu  92116 20409 17265 27532 743 0 247 2813 0 0\n\
        cpu0 45790 9771 8198 15323 128 0 15 1386 0 0\n\
        cpu1 46325 10637 9066 12209 615 0 231 1426 0 0\n\
        intr 680792 0 0 0\nctxt 808089\nbtime 1795395917\n";
    /// 100 ticks later. CPU 0 has run for 60, of them 10 in interrupts, lost 15, and waited for I/O
    /// for 5. CPU 1 was idle, and its iowait has decreased.
    const AFTER: &str = "cpu  0 0 0 0 0 0 0 0 0 0\n\
        cpu0 45820 9771 8218 15343 133 4 21 1401 30 0\n\
        cpu1 46325 10637 9066 12309 614 0 231 1426 0 0\n";

    #[test]
    fn cpus_are_busy_idle_or_stolen() {
        let (before, after) = (parse(BEFORE), parse(AFTER));
        assert_eq!(before.len(), 2);
        let processors = between(&before, &after).unwrap();
        assert_eq!(processors.busy, [60.0, 0.0]);
        assert_eq!(processors.steal, [15.0, 0.0]);
        assert_eq!(between(&before, &before), None);
    }

    #[test]
    fn a_cpu_that_came_meanwhile_is_left_out() {
        let before = parse("cpu1 0 0 0 0 0 0 0 0\n");
        assert_eq!(between(&before, &parse(AFTER)).unwrap().busy.len(), 1);
        assert_eq!(between(&[], &parse(AFTER)), None);
    }

    #[test]
    fn lines_that_are_no_cpus_are_passed_over() {
        let text = "cpux 1 2 3\ncpu0 1 2 3\ncpu0 1 2 3 4 5 6 7 x\n\u{0}cpu1\ncpu99999999999 1\n";
        assert_eq!(parse(text), []);
        let most = format!("cpu0 {}\n", "18446744073709551615 ".repeat(10));
        let zero = "cpu0 0 0 0 0 0 0 0 0\n";
        assert!(between(&parse(zero), &parse(&most)).is_some());
        assert_eq!(total(&parse(&most)), (u64::MAX, u64::MAX));
    }

    #[test]
    fn this_machine_has_cpus() {
        let cpus = parse(&super::super::read(PATH).unwrap());
        assert_eq!(cpus.len(), crate::environment::machine("").cpus as usize);
    }
}
