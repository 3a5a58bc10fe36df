//! Reads /proc/PID/task/TID/schedstat, or stat if the kernel has no schedstat: a thread's time on a
//! CPU and its time waiting for one.

use rustix::param::clock_ticks_per_second;

/// Times since the thread's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    pub cpu_ns: u64,
    /// Time ready to run but not running. The kernel adds a wait at its end.
    pub waiting_ns: Option<u64>,
}

/// Reads a thread's times. `task` is its folder in /proc. Returns `None` if the thread has ended.
pub fn read(task: &str) -> Option<Times> {
    let exact = super::read(format!("{task}/schedstat")).ok();
    exact.and_then(|text| parse(&text)).or_else(|| {
        let text = super::read(format!("{task}/stat")).ok()?;
        Some(Stat::parse(&text)?.times())
    })
}

/// Parses `2447477 4757141 2`: ns on a CPU, ns waiting, number of runs. All are zero if the kernel
/// does not count.
fn parse(text: &str) -> Option<Times> {
    let mut words = text.split_ascii_whitespace().map(str::parse::<u64>);
    let mut next = || words.next()?.ok();
    let (cpu_ns, waiting, turns) = (next()?, next()?, next()?);
    let times = Times {
        cpu_ns,
        waiting_ns: Some(waiting),
    };
    (turns > 0).then_some(times)
}

/// The fields used of proc_pid_stat(5).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    pub name: String,
    pub is_kernel: bool,
    ticks: u64,
}

/// PF_KTHREAD of linux/sched.h.
const KERNEL: u64 = 0x0020_0000;

impl Stat {
    /// Parses `358 (a name) S 356 ...`. The name may hold any character, also parentheses.
    pub fn parse(text: &str) -> Option<Stat> {
        let (front, rest) = text.rsplit_once(')')?;
        let (_, name) = front.split_once('(')?;
        // The first of these fields is field 3, the state.
        let fields: Vec<&str> = rest.split_ascii_whitespace().take(13).collect();
        let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
        Some(Stat {
            name: name.to_owned(),
            is_kernel: number(9)? & KERNEL != 0,
            ticks: number(14)?.checked_add(number(15)?)?,
        })
    }

    fn times(&self) -> Times {
        let per_second = clock_ticks_per_second().max(1);
        Times {
            cpu_ns: self.ticks.saturating_mul(1_000_000_000 / per_second),
            waiting_ns: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_texts_tell_a_threads_time() {
        let exact = parse("2447477 4757141 2\n").unwrap();
        assert_eq!(
            (exact.cpu_ns, exact.waiting_ns),
            (2_447_477, Some(4_757_141))
        );
        assert_eq!(parse("0 0 0\n"), None);
        assert_eq!(parse("1 2"), None);
        let stat = "358 (a) (b) S 356 356 29629 0 -1 4194304 201 102 0 1 30 12 0 0 20 0 1 0 82290";
        let stat = Stat::parse(stat).unwrap();
        assert_eq!(
            (stat.name.as_str(), stat.is_kernel, stat.ticks),
            ("a) (b", false, 42)
        );
        let times = stat.times();
        assert_eq!(
            times.cpu_ns,
            42 * (1_000_000_000 / clock_ticks_per_second())
        );
        assert_eq!(times.waiting_ns, None);
        let kernel = "2 (kthreadd) S 0 0 0 0 -1 2129984 0 0 0 0 0 1 0 0 20 0 1 0 8 0 0";
        assert!(Stat::parse(kernel).unwrap().is_kernel);
        for text in [
            "",
            "1 (x",
            "1 (x) S 1",
            "1 x) S 1 2 3 4 5 6 7 8 9 10 11 12 13",
        ] {
            assert_eq!(Stat::parse(text), None, "{text}");
        }
    }

    #[test]
    fn this_thread_has_run() {
        // The kernel counts at ticks, so this thread must run until the next one.
        let deadline = fathom_testing::Deadline::new("CPU time of this thread");
        while read("/proc/thread-self").unwrap().cpu_ns == 0 {
            deadline.check();
        }
        assert_eq!(read("/proc/0"), None);
    }
}
