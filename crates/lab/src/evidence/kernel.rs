//! Times of the busy kernel threads, which are not visible in containers.

use std::collections::BTreeMap;
use std::fs;

use fathom_run::evidence::{ThreadRole, ThreadTime};

use super::schedstat::{self, Stat, Times};

/// Minimum CPU time of a listed thread, as a fraction of the window. A thread below it limits
/// nothing.
const FLOOR: f64 = 0.01;
/// Maximum number of listed threads; the busiest are listed.
const MOST: usize = 16;
/// Maximum number of processes to read from /proc.
const MAX_PROCESSES: usize = 1 << 16;

/// Times of every kernel thread since its start, by process id.
pub struct Kernel(BTreeMap<u32, (String, Times)>);

/// Reads the times of all kernel threads: one small file per process of the machine, and another
/// one per kernel thread.
pub fn look() -> Kernel {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let thread = |pid: u32| {
        let folder = format!("/proc/{pid}");
        let stat = Stat::parse(&super::read(format!("{folder}/stat")).ok()?)?;
        let times = schedstat::read(&folder).filter(|_| stat.is_kernel)?;
        Some((pid, (stat.name, times)))
    };
    Kernel(pids.take(MAX_PROCESSES).filter_map(thread).collect())
}

impl Kernel {
    /// Returns the threads' activity since `before` in a window of `seconds`, the busiest first.
    pub fn since(&self, before: &Kernel, seconds: f64) -> Vec<ThreadTime> {
        let all = self.0.iter().map(|(&pid, (name, now))| {
            let before = before.0.get(&pid).map(|(_, times)| *times);
            // A lower time means that a new thread has reused the process id.
            let before = before.filter(|before| before.cpu_ns <= now.cpu_ns);
            let before = before.unwrap_or_default();
            let spent = |now: u64, before: u64| now.saturating_sub(before) as f64 / 1e9;
            ThreadTime {
                pid,
                tid: pid,
                name: name.clone(),
                role: ThreadRole::Kernel,
                cpu: spent(now.cpu_ns, before.cpu_ns),
                waiting: now
                    .waiting_ns
                    .map(|now| spent(now, before.waiting_ns.unwrap_or(0))),
                ..ThreadTime::default()
            }
        });
        let mut busy: Vec<ThreadTime> = all.filter(|one| one.cpu >= FLOOR * seconds).collect();
        busy.sort_by(|one, other| other.cpu.total_cmp(&one.cpu));
        busy.truncate(MOST);
        busy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(threads: impl IntoIterator<Item = (u32, u64)>) -> Kernel {
        let times = |ms: u64| Times {
            cpu_ns: ms * 1_000_000,
            waiting_ns: Some(0),
        };
        let threads = threads.into_iter();
        Kernel(
            threads
                .map(|(pid, ms)| (pid, (format!("kworker/{pid}"), times(ms))))
                .collect(),
        )
    }

    #[test]
    fn the_busy_ones_are_kept() {
        let before = kernel([(1, 5000), (2, 100), (3, 900)]);
        let after = kernel([(1, 5009), (2, 600), (3, 20), (4, 50)]);
        let busy = after.since(&before, 1.0);
        let seen: Vec<(u32, f64)> = busy.iter().map(|one| (one.pid, one.cpu)).collect();
        assert_eq!(seen, [(2, 0.5), (4, 0.05), (3, 0.02)]);
        let many = kernel((0..100).map(|pid| (pid, 1000)));
        assert_eq!(many.since(&kernel([]), 1.0).len(), MOST);
    }

    #[test]
    fn processes_are_not_the_kernels() {
        let kernel = look();
        assert!(!kernel.0.contains_key(&std::process::id()));
    }
}
