//! Detects virtual machines whose vCPUs have stopped. With guests of its own, an emulated guest's
//! vCPU may stop with a pending interrupt, for example of its timer (seen with QEMU 10.0). The next
//! interrupt resumes it, but a guest that waits only for its timer gets none.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Time without vCPU activity after which the guest gets an interrupt. Even an idle kernel runs
/// every few seconds.
pub(crate) const STALLED_AFTER: Duration = Duration::from_secs(5);
/// Time without vCPU activity after which the guest is given up.
pub(crate) const DEAD_AFTER: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_secs(1);

/// Watches the vCPUs of one QEMU process.
#[derive(Debug)]
pub(crate) struct VcpuWatchdog {
    tasks: PathBuf,
    ran: Option<u64>,
    beat: Instant,
    looked: Instant,
}

impl VcpuWatchdog {
    pub fn of(qemu: u32) -> VcpuWatchdog {
        let tasks = Path::new("/proc").join(qemu.to_string()).join("task");
        let now = Instant::now();
        VcpuWatchdog {
            ran: cpus_ran(&tasks),
            tasks,
            beat: now,
            looked: now,
        }
    }

    /// Returns how long no vCPU has run. Samples at most once a second; returns `None` in between.
    pub fn check(&mut self) -> Option<Duration> {
        if self.looked.elapsed() < LOOK {
            return None;
        }
        let was_away = self.looked.elapsed() > STALLED_AFTER;
        self.looked = Instant::now();
        let ran = cpus_ran(&self.tasks);
        // After a pause in sampling, nothing is known about the time between.
        let moves = std::mem::replace(&mut self.ran, ran) != ran;
        if ran.is_none() || moves || was_away {
            self.beat = self.looked;
        }
        Some(self.looked - self.beat)
    }
}

/// Returns the nanoseconds that the vCPU threads have run (`CPU 0/TCG`; proc_pid_schedstat(5)), or
/// `None` if that is unknown.
fn cpus_ran(tasks: &Path) -> Option<u64> {
    let is_cpu = |task: &PathBuf| {
        let name = fs::read_to_string(task.join("comm"));
        name.is_ok_and(|name| name.starts_with("CPU "))
    };
    let tasks = fs::read_dir(tasks).ok()?.flatten().map(|task| task.path());
    let ran = tasks.filter(is_cpu).map(|task| {
        let text = fs::read_to_string(task.join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    });
    // Without any vCPU thread, the result is `None`.
    ran.reduce(|one, other| Some(one? + other?)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(tasks: &Path, ran: &[u64]) {
        for (index, ran) in ran.iter().enumerate() {
            let task = tasks.join(index.to_string());
            fs::create_dir_all(&task).unwrap();
            fs::write(task.join("comm"), format!("CPU {index}/TCG\n")).unwrap();
            fs::write(task.join("schedstat"), format!("{ran} 7 9\n")).unwrap();
        }
    }

    #[test]
    fn vcpu_that_does_not_run_is_detected() {
        let dir = tempfile::tempdir().unwrap();
        let tasks = dir.path().to_owned();
        assert_eq!(cpus_ran(&tasks), None);
        set(&tasks, &[5, 6]);
        assert_eq!(cpus_ran(&tasks), Some(11));
        let before = Instant::now().checked_sub(2 * LOOK).unwrap();
        let mut vcpu_watchdog = VcpuWatchdog {
            ran: Some(11),
            beat: before,
            looked: before,
            tasks: tasks.clone(),
        };
        assert!(vcpu_watchdog.check() >= Some(2 * LOOK));
        assert_eq!(vcpu_watchdog.check(), None, "it has just looked");
        // A single running CPU of several is enough.
        set(&tasks, &[5, 7]);
        vcpu_watchdog.looked = before;
        assert_eq!(vcpu_watchdog.check(), Some(Duration::ZERO));
        // The activity of a process that has ended, or without schedstat, is unknown.
        vcpu_watchdog = VcpuWatchdog::of(0);
        (vcpu_watchdog.beat, vcpu_watchdog.looked) = (before, before);
        assert_eq!(vcpu_watchdog.check(), Some(Duration::ZERO));
    }

    #[test]
    fn the_kernel_counts() {
        let count = || {
            // the kernel updates the counter when it deschedules the thread
            std::thread::sleep(Duration::from_millis(1));
            assert!(cpus_ran(Path::new("/proc/self/task")) > Some(0));
        };
        let thread = std::thread::Builder::new().name("CPU 0/test".into());
        thread.spawn(count).unwrap().join().unwrap();
    }
}
