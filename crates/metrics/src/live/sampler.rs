//! Computes intervals of all disks of a server.

use super::disk::{Between, Moment};
use super::sample::{DiskSample, FrontEndSample, Sample};
use crate::{GUESTS, Measured, ProcessInfo};
use fathom_trace::Clock;
use std::collections::BTreeMap;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Maximum number of rounds for which a disk without a report is remembered.
///
/// A disk whose process does not respond for a while continues afterwards.
const ROUNDS: u32 = 120;
/// Tolerance in seconds when the age of a disk is compared to the interval to see if it is new.
const SLACK: f64 = 0.5;

/// Computes an interval from each two successive moments.
#[derive(Default)]
pub struct Sampler {
    disks: BTreeMap<String, Known>,
    /// CPU time of processes in ns, by process ID.
    processes: BTreeMap<u32, u64>,
    last: Option<Instant>,
    number: u64,
}

struct Known {
    moment: Moment,
    /// Number of rounds since the last report.
    missed: u32,
}

impl Sampler {
    /// Returns the interval since the previous moment, or `None` at the first one.
    pub fn take(&mut self, disks: Vec<Measured>, own: ProcessInfo, at: Instant) -> Option<Sample> {
        let seconds = self.last.replace(at);
        let seconds = seconds.map(|last| at.duration_since(last).as_secs_f64().max(1e-6));
        let processes = disks.iter().map(|disk| disk.process.clone()).chain([own]);
        let processes: BTreeMap<_, _> = processes.map(|one| (one.pid, one)).collect();
        let cpu_ns = self.cpu_since(&processes);
        self.disks.retain(|_, known| {
            known.missed += 1;
            known.missed <= ROUNDS
        });
        let mut samples: Vec<_> = disks
            .into_iter()
            .filter_map(|disk| self.take_disk(disk, seconds))
            .collect();
        let seconds = seconds?;
        samples.sort_by(|a, b| a.name.cmp(&b.name));
        self.number += 1;
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Some(Sample {
            time_ms: now.map_or(0, |now| now.as_millis() as u64),
            seconds,
            number: self.number,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            cpu_percent: cpu_ns as f64 / seconds / 1e7,
            memory: { processes.values() }
                .fold(0, |sum, process| sum.saturating_add(process.resident)),
            disks: samples,
        })
    }

    fn cpu_since(&mut self, processes: &BTreeMap<u32, ProcessInfo>) -> u64 {
        let now: BTreeMap<_, _> = { processes.iter() }
            .map(|(pid, process)| (*pid, process.cpu_ns))
            .collect();
        let before = std::mem::replace(&mut self.processes, now);
        let used = self.processes.iter();
        // The usage of a process that was not known before cannot be computed.
        used.map(|(pid, now)| now.saturating_sub(*before.get(pid).unwrap_or(now)))
            .fold(0, u64::saturating_add)
    }

    fn take_disk(&mut self, mut measured: Measured, seconds: Option<f64>) -> Option<DiskSample> {
        let name = measured.info.name.clone();
        let now = Moment::of(&mut measured);
        let moment = self.disks.remove(&name).map(|known| known.moment);
        let front_end = front_end_of(&measured);
        let sample = seconds.and_then(|seconds| {
            let is_new = now
                .counted
                .seconds
                .is_some_and(|age| age <= seconds + SLACK);
            // An older disk without a previous moment begins with the next interval.
            (moment.is_some() || is_new).then(|| {
                let between = Between {
                    measured: &measured,
                    before: moment.as_ref(),
                    now: &now,
                    seconds,
                    ns_per_tick: 1e9 / Clock::get().hz(),
                    front_end,
                };
                between.sample()
            })
        });
        let known = Known {
            moment: now,
            missed: 0,
        };
        self.disks.insert(name, known);
        sample
    }
}

/// Returns the virtual machine that uses the disk.
fn front_end_of(measured: &Measured) -> Option<FrontEndSample> {
    let pid = measured.info.front_end.as_ref()?.pid;
    let guest = GUESTS.of(&measured.info.name, pid, measured.front_ends);
    let labels = guest.labels();
    let label = |name: &str| {
        let found = labels.iter().find(|(label, _)| *label == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    Some(FrontEndSample {
        pid,
        vmm: label("vmm"),
        guest: label("guest"),
        uuid: label("uuid"),
    })
}

#[cfg(test)]
mod tests;
