//! Watches a disk for a while, and converts its figures to evidence.

use super::host::{Idle, free_memory};
use super::interrupt::Interrupt;
use super::live_disk::{LiveDisk, Seen};
use anyhow::{Context, bail};
use fathom_advise::{
    Engine, Evidence, Filter, Host, OwnThreads, Polling, Pool, SharedThreads, Storage, Tables,
    Threads, Verdict,
};
use fathom_formats::served::DEFAULT_METADATA_CACHE;
use fathom_metrics::{DiskSample, LimiterKind, Sample};
use fathom_storage::EngineKind;
use fathom_trace::SlowRequest;
use fathom_units::short_duration;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Interval at which a wait checks whether a signal has arrived.
const STEP: Duration = Duration::from_millis(100);
/// Time after the end of an interval in which its numbers must arrive.
const LATE: Duration = Duration::from_secs(10);
/// Minimum number of steps between reads from which their direction is known. Random reads go
/// forward in 11 of 12 steps in 3 of 1000 windows.
const STEPS: usize = 12;

/// The figures of a disk over a window.
pub struct Watched {
    before: Seen,
    pub after: Seen,
    /// The numbers of all disks of the server.
    sample: Sample,
    slow: Vec<SlowRequest>,
    host: Host,
}

/// Watches the disk for `window`, from half a second to a minute.
pub fn watch(disk: &LiveDisk, window: Duration, stop: &Interrupt) -> anyhow::Result<Watched> {
    let before = disk.seen()?;
    let idle = Idle::read();
    let sample = interval(disk, window, stop)?;
    let free_cpus = idle.and_then(|idle| idle.free_since()).unwrap_or(0.0);
    Ok(Watched {
        before,
        after: disk.seen()?,
        sample,
        slow: disk.slow()?,
        host: Host {
            free_cpus,
            free_memory: free_memory(),
        },
    })
}

/// Returns the live numbers of the next interval.
fn interval(disk: &LiveDisk, window: Duration, stop: &Interrupt) -> anyhow::Result<Sample> {
    let call = disk.disk().server.get(&["v1", "live"]);
    let mut lines = call
        .parameter("interval", &short_duration(window))
        .stream()?;
    let until = Instant::now() + window + LATE;
    while Instant::now() < until {
        stop.check()?;
        if let Some(line) = lines.next(STEP)? {
            let sample = serde_json::from_slice(&line);
            return sample.context("the server is of another version; use its program");
        }
    }
    bail!(
        "disk '{}': the server sent no numbers; see its log",
        disk.name()
    )
}

impl Watched {
    /// Returns the numbers of the disk.
    ///
    /// # Errors
    /// Fails if the disk was removed while it was watched.
    pub fn numbers(&self) -> anyhow::Result<&DiskSample> {
        let name = &self.after.state.name;
        let found = self.sample.disks.iter().find(|disk| disk.name == *name);
        found.with_context(|| {
            format!("disk '{name}': was removed and added again; repeat the command")
        })
    }

    /// Returns the evidence about the disk.
    ///
    /// # Errors
    /// Fails like [`Watched::numbers`].
    pub fn evidence(&self) -> anyhow::Result<Evidence> {
        let disk = self.numbers()?;
        let stage = |name: &str| disk.all.stages_us.get(name).copied().unwrap_or(0.0);
        let mean_us = disk.all.mean_us.unwrap_or(0.0);
        let reads = disk.op("read").map_or(0, |read| read.requests);
        Ok(Evidence {
            verdict: verdict(disk.limiter.kind),
            size: disk.size,
            storage: self.storage(),
            mean_us,
            map: share(stage("map"), mean_us),
            device: share(stage("device"), mean_us),
            in_flight: disk.mean_in_flight,
            reads: share(reads as f64, disk.all.requests as f64),
            forward: forward(self.reads()),
            threads: self.threads(disk),
            tables: self.tables(disk),
            filters: self.filters(disk.seconds),
            host: self.host,
        })
    }

    fn storage(&self) -> Storage {
        let image = &self.after.options.image;
        match image.kind().name {
            _ if image.path().is_some() => Storage::File,
            "memory" | "null" => Storage::Memory,
            _ => Storage::Server,
        }
    }

    /// Returns the slow reads of the window in the order of their ends.
    fn reads(&self) -> Vec<&SlowRequest> {
        let begin = self
            .sample
            .time_ms
            .saturating_sub((self.sample.seconds * 1e3) as u64);
        let is_read = |one: &&SlowRequest| one.op == "read" && one.time_ms >= begin;
        let mut reads: Vec<_> = self.slow.iter().filter(is_read).collect();
        reads.sort_by_key(|one| one.time_ms);
        reads
    }

    fn threads(&self, disk: &DiskSample) -> Threads {
        if let Some(pool) = &disk.pool {
            return Threads::Shared(self.shared(disk, pool));
        }
        let options = &self.after.options;
        let has_requests = |rate: f64| rate >= 0.01 * disk.all.iops && rate > 0.0;
        let queues = disk.queues.iter();
        let queues = queues
            .filter(|queue| has_requests(queue.requests_per_second))
            .count();
        let sleeps: f64 = disk.workers.iter().map(|one| one.sleeps_per_second).sum();
        let pinned = options.cpus.as_ref().map(|cpus| cpus.share(0, 1).len());
        let small = |count: usize| u16::try_from(count).unwrap_or(u16::MAX);
        Threads::Own(OwnThreads {
            count: options.iothreads.unwrap_or(1),
            cpu: disk.cpu_percent.unwrap_or(0.0) / 100.0,
            pinned: pinned.map(small),
            sources: small(queues.saturating_add(disk.nbd_clients as usize)),
            polling: match options.poll.unwrap_or_default() {
                fathom_core::Polling::Auto | fathom_core::Polling::AutoWithin(_) => Polling::Auto,
                fathom_core::Polling::Off => Polling::Off,
                fathom_core::Polling::Fixed(time) => Polling::Fixed(time),
            },
            sleeps: ratio(sleeps, disk.all.iops),
            engine: match options.aio.unwrap_or_default() {
                EngineKind::IoUring => Engine::IoUring,
                EngineKind::Native => Engine::Native,
                EngineKind::Threads => Engine::Threads,
            },
        })
    }

    fn shared(&self, disk: &DiskSample, pool: &str) -> SharedThreads {
        let mut pools = BTreeMap::new();
        for other in &self.sample.disks {
            if let Some((name, cpu)) = other.pool.as_ref().zip(other.pool_cpu_percent) {
                pools.insert(name.clone(), cpu / 100.0);
            }
        }
        pools.remove(pool);
        let neighbours = self.sample.disks.iter();
        let neighbours =
            neighbours.filter(|one| one.pool.as_deref() == Some(pool) && one.name != disk.name);
        let rate: f64 = neighbours.clone().map(|one| one.all.iops).sum();
        let busiest = neighbours.max_by(|one, other| one.all.iops.total_cmp(&other.all.iops));
        let busiest = busiest.filter(|one| one.all.iops > disk.all.iops);
        SharedThreads {
            pool: pool.to_owned(),
            others: share(rate, rate + disk.all.iops),
            busiest: busiest.map(|one| one.name.clone()),
            pools: { pools.into_iter() }
                .map(|(name, cpu)| Pool { name, cpu })
                .collect(),
        }
    }

    fn tables(&self, disk: &DiskSample) -> Option<Tables> {
        let after = self.after.state.image.as_ref()?;
        let before = self
            .before
            .state
            .image
            .as_ref()
            .map_or(0, |image| image.table_reads);
        let reads = after.table_reads.saturating_sub(before);
        Some(Tables {
            cache: self
                .after
                .options
                .metadata_cache
                .unwrap_or(DEFAULT_METADATA_CACHE),
            reads: ratio(reads as f64, disk.all.requests as f64),
        })
    }

    fn filters(&self, seconds: f64) -> Vec<Filter> {
        let before = |index: usize| self.before.state.filters.get(index)?.held_ns;
        let filters = self.after.state.filters.iter().enumerate();
        let filter = |(index, filter): (usize, &fathom_stack::FilterInfo)| Filter {
            name: filter.name.clone(),
            options: filter.options.clone().into_iter().collect(),
            text: filter.to_string(),
            held: filter.held_ns.map(|held| {
                let held = held.saturating_sub(before(index).unwrap_or(0));
                share(held as f64 / 1e9, seconds)
            }),
        };
        filters.map(filter).collect()
    }
}

fn verdict(kind: LimiterKind) -> Verdict {
    match kind {
        LimiterKind::Idle => Verdict::Idle,
        LimiterKind::Frozen => Verdict::Frozen,
        LimiterKind::Stuck => Verdict::Stuck,
        LimiterKind::Filter => Verdict::Filter,
        LimiterKind::Thread => Verdict::Thread,
        LimiterKind::Tables => Verdict::Tables,
        LimiterKind::Client => Verdict::Client,
        LimiterKind::Latency => Verdict::Latency,
        LimiterKind::Unknown => Verdict::Unknown,
    }
}

/// Returns `part / whole`, or 0 without a whole.
fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

/// Returns `part / whole`, at most 1: the counters are not read at the same instant.
fn share(part: f64, whole: f64) -> f64 {
    ratio(part, whole).min(1.0)
}

/// Returns the share of steps between successive reads that lead to a higher offset.
///
/// Reads that ended in the same millisecond have no order, and make no step.
fn forward(reads: Vec<&SlowRequest>) -> Option<f64> {
    let steps = reads.windows(2).filter_map(|pair| match pair {
        [one, next] if one.time_ms < next.time_ms => Some(one.offset < next.offset),
        _ => None,
    });
    let (all, ahead) = steps.fold((0, 0), |(all, ahead), is_ahead| {
        (all + 1, ahead + usize::from(is_ahead))
    });
    (all >= STEPS).then(|| ahead as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(time_ms: u64, offset: u64) -> SlowRequest {
        SlowRequest {
            id: String::new(),
            time_ms,
            op: "read".into(),
            offset,
            len: 4096,
            queue: 0,
            error: 0,
            polled: false,
            total_ns: 1,
            stages: BTreeMap::new(),
            longest: "device".into(),
        }
    }

    #[test]
    fn sequential_reads_go_forward() {
        let of = |reads: &[SlowRequest]| forward(reads.iter().collect());
        let sequential: Vec<_> = (0..13).map(|n| read(n * 250, n << 20)).collect();
        assert_eq!(of(&sequential), Some(1.0));
        assert_eq!(of(&sequential[..12]), None);
        let random: Vec<_> = (0..20).map(|n| read(n, n * 7 % 5)).collect();
        assert!(of(&random).unwrap() < 0.7);
        // The order of these reads is not known.
        let at_once: Vec<_> = (0..20).map(|n| read(5, n)).collect();
        assert_eq!(of(&at_once), None);
    }
}
