//! CPU time and CPU lists.

use std::collections::HashMap;
use std::fs;

use rustix::thread::{CpuSet, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

use crate::error::{Error, Result};

/// Returns the CPU time of the calling thread in ns.
pub fn thread_ns() -> u64 {
    let t = clock_gettime(ClockId::ThreadCPUTime);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Pins the calling thread to a CPU.
pub fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    if cpu >= CpuSet::MAX_CPU {
        return Err(Error::Options(format!("--cpus: CPU {cpu} does not exist")));
    }
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(|_| {
        Error::Options(format!(
            "--cpus: CPU {cpu} does not exist, or is not allowed"
        ))
    })
}

/// Parses a CPU list such as `0,2-5`, in the syntax of taskset.
pub fn parse_list(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last >= CpuSet::MAX_CPU {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

/// CPU time of every thread of a process at one point in time.
#[derive(Clone, Debug, Default)]
pub struct ProcessCpu {
    threads: HashMap<String, u64>,
}

impl ProcessCpu {
    /// Reads the first field of `/proc/PID/task/*/schedstat`, the time on a CPU in ns. Returns
    /// `None` if the process has exited or is not visible.
    pub fn read(pid: u32) -> Option<ProcessCpu> {
        let mut threads = HashMap::new();
        for task in fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten() {
            let text = fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
            if let Some(ns) = text.split(' ').next().and_then(|f| f.parse().ok()) {
                threads.insert(task.file_name().to_string_lossy().into_owned(), ns);
            }
        }
        (!threads.is_empty()).then_some(ProcessCpu { threads })
    }

    /// Returns the CPU time in ns between `earlier` and `self`, of the threads that still exist.
    pub fn since(&self, earlier: &ProcessCpu) -> u64 {
        let spent = |(tid, now): (&String, &u64)| {
            now.saturating_sub(earlier.threads.get(tid).copied().unwrap_or(0))
        };
        self.threads.iter().map(spent).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_those_of_taskset() {
        assert_eq!(parse_list("0"), Some(vec![0]));
        assert_eq!(parse_list("1,3-5"), Some(vec![1, 3, 4, 5]));
        for bad in ["", "a", "3-1", "1,,2", "-1", "0-99999"] {
            assert_eq!(parse_list(bad), None, "{bad}");
        }
    }

    #[test]
    fn our_own_time_moves_when_we_work() {
        let pid = std::process::id();
        let (before, mine) = (ProcessCpu::read(pid).unwrap(), thread_ns());
        while thread_ns() - mine < 50_000_000 {}
        // The kernel updates the figure of a running thread only at timer ticks.
        let spent = ProcessCpu::read(pid).unwrap().since(&before);
        assert!(spent > 30_000_000, "{spent}");
    }
}
