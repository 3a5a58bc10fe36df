//! A launch: from the start of the VMM until the guest's agent answers, and the shutdown.

use std::time::{Duration, Instant};

use fathom_run::{Better, Measure, Span, Unit};

use crate::agent::READY;
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::machine::Machine;

const SHORT: Duration = Duration::from_secs(60);
/// Kernel message printed just before its first process starts.
const FIRST_PROCESS: &str = "Run /init as init process";
/// SeaBIOS messages printed when it starts and before it starts the kernel.
const SEABIOS: [&str; 2] = ["SeaBIOS (version", "Booting from ROM"];
/// Lane of the time line with the consecutive parts.
const LANE: &str = "machine";

/// Times of the events of a launch.
pub(super) struct Launch {
    started: Instant,
    /// QEMU's monitor answered; its machine was complete.
    monitor: Instant,
    /// SeaBIOS started and ended, if its messages were seen.
    firmware: Option<[Instant; 2]>,
    /// The kernel's clock was 0.
    pub(super) kernel: Instant,
    first_process: Instant,
    ready: Instant,
    /// The agent had answered.
    pub(super) answered: Instant,
    /// The lab began to power off the guest.
    asked: Instant,
    off: Instant,
    /// QEMU had ended.
    gone: Instant,
    /// CPU time of QEMU until the agent had answered, in seconds.
    cpu: f64,
}

impl Launch {
    /// Launches a machine. Calls `look`, which may use the guest, after the boot has been measured.
    ///
    /// # Errors
    /// If the guest does not boot (with the end of its console) or does not power off.
    pub fn run(
        machine: &Machine,
        look: &mut dyn FnMut(&mut Guest) -> Result<()>,
    ) -> Result<Launch> {
        let mut guest = Guest::boot(machine)?;
        guest.check("true", SHORT)?;
        let answered = Instant::now();
        let cpu = cpu_time(guest.pid());
        let (started, monitor) = guest.begin();
        let said = guest.check("dmesg", SHORT)?;
        let seen = |marker: &str| guest.console().seen_at(marker);
        let ready = seen(READY);
        let firmware = SEABIOS.map(seen);
        // The message has both clocks, so that the kernel's clock can be converted to the host's.
        let (Some(ready), Some(clock)) = (ready, clock_of(&said, READY)) else {
            return Err(Error::Protocol(
                "the guest's kernel does not say when its agent was ready".into(),
            ));
        };
        let kernel = ready.checked_sub(clock).unwrap_or(started);
        let first_process = clock_of(&said, FIRST_PROCESS).map_or(ready, |clock| kernel + clock);
        look(&mut guest)?;
        let asked = Instant::now();
        let (off, gone) = guest.power_off_now()?;
        Ok(Launch {
            started,
            monitor,
            firmware: match firmware {
                [Some(begin), Some(end)] => Some([begin, end]),
                _ => None,
            },
            kernel,
            first_process,
            ready,
            answered,
            asked,
            off,
            gone,
            cpu,
        })
    }

    fn boot(&self) -> Duration {
        self.answered - self.started
    }

    fn shutdown(&self) -> Duration {
        self.gone - self.asked
    }

    /// Returns each part of the launch with its begin and end.
    fn parts(&self) -> [(&'static str, Instant, Instant); 7] {
        [
            ("vmm", self.started, self.monitor),
            ("firmware", self.monitor, self.kernel.max(self.monitor)),
            ("kernel", self.kernel, self.first_process),
            ("user-space", self.first_process, self.ready),
            ("agent", self.ready, self.answered),
            ("shutdown.guest", self.asked, self.off),
            ("shutdown.vmm", self.off, self.gone),
        ]
    }

    /// Returns the measures. The first is the experiment's main result.
    pub fn measures(&self) -> Vec<Measure> {
        let lower = |name: &str, seconds: f64| {
            Measure::new(name, Unit::Seconds, seconds, Better::Lower).of(1)
        };
        let mut all = vec![
            lower("boot", self.boot().as_secs_f64()),
            lower("shutdown", self.shutdown().as_secs_f64()),
            lower("launch", (self.boot() + self.shutdown()).as_secs_f64()),
        ];
        let part = |(name, begin, end): (&str, Instant, Instant)| {
            let seconds = (end - begin).as_secs_f64();
            Measure::new(name, Unit::Seconds, seconds, Better::Neither).of(1)
        };
        all.extend(self.parts().map(part));
        all.push(lower("vmm.cpu", self.cpu));
        all
    }

    /// Seconds since the VMM's start.
    pub fn since(&self, when: Instant) -> f64 {
        when.saturating_duration_since(self.started).as_secs_f64()
    }

    /// Returns the parts as spans. The time between the answer and the shutdown belongs to no part.
    pub fn spans(&self) -> Vec<Span> {
        let span =
            |name: &str, begin, end| Span::new(LANE, name, self.since(begin), self.since(end));
        let parts = self.parts().into_iter();
        let mut spans: Vec<Span> = parts.map(|(name, from, to)| span(name, from, to)).collect();
        if let Some([begin, end]) = self.firmware {
            spans.push(Span {
                lane: "firmware".into(),
                ..span("SeaBIOS", begin, end)
            });
        }
        spans
    }
}

/// Returns the kernel's time stamp of the first message that contains `marker`.
fn clock_of(messages: &str, marker: &str) -> Option<Duration> {
    let line = messages.lines().find(|line| line.contains(marker))?;
    let (_, rest) = line.split_once('[')?;
    let (seconds, _) = rest.split_once(']')?;
    Duration::try_from_secs_f64(seconds.trim().parse().ok()?).ok()
}

/// Returns the CPU time of all threads of a process, also of those that have ended, in seconds.
fn cpu_time(pid: u32) -> f64 {
    let mut clock = 0;
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: both arguments are places for the results. A process that has ended is an error.
    let is_read = unsafe {
        libc::clock_getcpuclockid(pid as libc::pid_t, &mut clock) == 0
            && libc::clock_gettime(clock, &mut time) == 0
    };
    match is_read {
        true => time.tv_sec as f64 + time.tv_nsec as f64 / 1e9,
        false => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_includes_threads_that_have_ended() {
        let worked = std::thread::spawn(|| {
            let own = || {
                let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
                time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
            };
            while own() < 0.05 {}
            own()
        });
        let worked = worked.join().unwrap();
        assert!(cpu_time(std::process::id()) >= worked);
    }

    #[test]
    fn the_kernels_clock_is_read_off_its_messages() {
        let said = "[    0.000000] Linux version 6.1\n[    1.001386] Run /init as init process\n\
                    [    1.5] FATHOM-LAB READY\nno time Run /init\n";
        let at = |marker| clock_of(said, marker).map(|clock| clock.as_micros());
        assert_eq!(at(FIRST_PROCESS), Some(1_001_386));
        assert_eq!(at(READY), Some(1_500_000));
        assert_eq!(at("no time"), None);
        assert_eq!(clock_of("[-1] x", "x"), None);
    }
}
