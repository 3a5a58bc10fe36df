//! The samples, histories and problems of servers and their disks.

use fathom_metrics::{BUCKETS_PER_DOUBLING, DiskSample, Sample, bucket_ns};
use fathom_trace::{Stage, quantile};
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// Number of intervals to keep for a disk.
const HISTORY: usize = 240;
/// Number of disks up to which histories are kept. Beyond it, only the watched disk has one.
const REMEMBERED: usize = 1024;
/// Number of histogram buckets, which cover all times up to 2^64 ns.
const BUCKETS: u32 = 64 * BUCKETS_PER_DOUBLING;
/// Time for which a stopped server is still shown: it may only be upgrading.
const FAREWELL: Duration = Duration::from_secs(3);

/// Identifies a disk across all servers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// Name of the server: its socket or its host.
    pub server: String,
    pub disk: String,
}

/// A past interval of a disk.
#[derive(Clone, Debug, Default)]
pub struct Tick {
    /// Number of the interval; consecutive, and at first the server's own.
    pub number: u64,
    pub seconds: f64,
    pub histogram: Vec<(u32, u64)>,
}

struct Server {
    sample: Sample,
    gone: Option<Instant>,
    histories: BTreeMap<String, VecDeque<Tick>>,
}

/// The state of all servers.
#[derive(Default)]
pub struct Model {
    servers: BTreeMap<String, Server>,
    /// Why servers do not respond, by server.
    problems: BTreeMap<String, String>,
}

/// A disk as a row of the table.
#[derive(Clone, Copy)]
pub struct Row<'a> {
    pub server: &'a str,
    pub pid: u32,
    pub disk: &'a DiskSample,
    /// Whether the server has stopped.
    pub is_gone: bool,
}

impl Row<'_> {
    pub fn key(&self) -> Key {
        Key {
            server: self.server.to_owned(),
            disk: self.disk.name.clone(),
        }
    }

    /// Names the users of the disk, briefly.
    pub fn guest(&self) -> String {
        let guest = self
            .disk
            .front_end
            .as_ref()
            .map(|one| match (&one.guest, &one.vmm) {
                (Some(guest), _) => guest.clone(),
                (None, Some(vmm)) => format!("{vmm} {}", one.pid),
                (None, None) => format!("process {}", one.pid),
            });
        let clients = match self.disk.nbd_clients {
            0 => None,
            n => Some(format!("{n} NBD")),
        };
        let programs = match self.disk.fuse_opens {
            0 => None,
            n => Some(format!("{n} FUSE")),
        };
        let users: Vec<_> = guest.into_iter().chain(clients).chain(programs).collect();
        users.join("+")
    }

    /// Mean time of a request in each stage in microseconds, or `None` without requests.
    pub fn stages(&self) -> Option<[f64; Stage::COUNT]> {
        let stages = &self.disk.all.stages_us;
        let of = |stage: Stage| stages.get(stage.name()).copied().unwrap_or(0.0);
        (!stages.is_empty()).then(|| Stage::ALL.map(of))
    }

    /// Requests per second of one operation.
    pub fn iops(&self, op: &str) -> f64 {
        self.disk.op(op).map_or(0.0, |figures| figures.iops)
    }

    pub fn bytes(&self, op: &str) -> f64 {
        self.disk
            .op(op)
            .map_or(0.0, |figures| figures.bytes_per_second)
    }
}

/// Sums over all servers and disks.
#[derive(Debug, Default, PartialEq, Serialize)]
pub struct Totals {
    pub servers: usize,
    pub disks: usize,
    pub read_iops: f64,
    pub write_iops: f64,
    pub other_iops: f64,
    pub read_bytes_per_second: f64,
    pub write_bytes_per_second: f64,
    pub errors_per_second: f64,
    pub cpu_percent: f64,
    /// Median of all requests in microseconds, or `None` if there are too few requests.
    pub p50_us: Option<f64>,
    pub p99_us: Option<f64>,
}

/// Limits the figures of a sample, because a server on another host may send anything.
fn tame(sample: &mut Sample) {
    // The longest interval is one minute; ten leave room for a delayed sample.
    sample.seconds = sample.seconds.clamp(0.1, 600.0);
    for disk in &mut sample.disks {
        disk.histogram.retain(|(bucket, _)| *bucket < BUCKETS);
        disk.histogram
            .iter_mut()
            .for_each(|(_, n)| *n = (*n).min(1 << 40));
    }
}

/// Merges the latency histograms of the disks.
fn merge(rows: &[&Row<'_>]) -> BTreeMap<u32, u64> {
    let mut merged = BTreeMap::new();
    for (bucket, n) in rows.iter().flat_map(|row| &row.disk.histogram) {
        let sum: &mut u64 = merged.entry(*bucket).or_default();
        *sum = sum.saturating_add(*n);
    }
    merged
}

/// Returns a quantile in microseconds. `max` is the largest latency in microseconds.
fn quantile_of(histogram: &BTreeMap<u32, u64>, max: f64, q: f64) -> Option<f64> {
    let ranges = histogram.iter();
    let ranges =
        ranges.map(|(bucket, n)| (bucket_ns(*bucket), bucket_ns(bucket.saturating_add(1)), *n));
    quantile(ranges, max * 1e3, q).map(|ns| ns / 1e3)
}

impl Model {
    /// Adds a sample of a server. `watched` is the disk that the user is looking at.
    pub fn take(&mut self, server: String, mut sample: Sample, watched: Option<&Key>) {
        tame(&mut sample);
        self.problems.remove(&server);
        let histories = self.servers.remove(&server).map(|known| known.histories);
        let mut histories = histories.unwrap_or_default();
        let is_watched =
            |name: &str| watched.is_some_and(|key| key.server == server && key.disk == name);
        let others = self.servers.values().map(|known| known.sample.disks.len());
        let all = others.sum::<usize>() + sample.disks.len() <= REMEMBERED;
        let is_there = |name: &str| sample.disks.iter().any(|disk| disk.name == name);
        histories.retain(|name, _| is_there(name) && (all || is_watched(name)));
        for disk in sample
            .disks
            .iter()
            .filter(|disk| all || is_watched(&disk.name))
        {
            let history: &mut VecDeque<Tick> = histories.entry(disk.name.clone()).or_default();
            // The server's own numbers begin again after an upgrade, so they are continued here.
            let number = history.back().map_or(sample.number, |last| last.number + 1);
            history.push_back(Tick {
                number,
                seconds: sample.seconds,
                histogram: disk.histogram.clone(),
            });
            history.drain(..history.len().saturating_sub(HISTORY));
        }
        let known = Server {
            sample,
            gone: None,
            histories,
        };
        self.servers.insert(server, known);
    }

    pub fn lose(&mut self, server: &str, problem: Option<String>, now: Instant) {
        if let Some(known) = self.servers.get_mut(server) {
            known.gone.get_or_insert(now);
        }
        if let Some(problem) = problem {
            self.problems.insert(server.to_owned(), problem);
        }
    }

    /// Removes servers that stopped long enough ago; returns whether one was removed.
    pub fn expire(&mut self, now: Instant) -> bool {
        let before = self.servers.len();
        let is_there = |gone: Option<Instant>| gone.is_none_or(|gone| now < gone + FAREWELL);
        self.servers.retain(|_, server| is_there(server.gone));
        self.servers.len() < before
    }

    /// Deletes all histories, because one chart cannot mix intervals of different lengths.
    pub fn forget_histories(&mut self) {
        self.servers
            .values_mut()
            .for_each(|server| server.histories.clear());
    }

    pub fn rows(&self) -> Vec<Row<'_>> {
        let rows = self.servers.iter().flat_map(|(name, server)| {
            server.sample.disks.iter().map(move |disk| Row {
                server: name,
                pid: server.sample.pid,
                disk,
                is_gone: server.gone.is_some(),
            })
        });
        rows.collect()
    }

    pub fn row(&self, key: &Key) -> Option<Row<'_>> {
        let server = self.servers.get(&key.server)?;
        let disk = server
            .sample
            .disks
            .iter()
            .find(|disk| disk.name == key.disk)?;
        Some(Row {
            server: self.servers.get_key_value(&key.server)?.0,
            pid: server.sample.pid,
            disk,
            is_gone: server.gone.is_some(),
        })
    }

    pub fn history(&self, key: &Key) -> Option<&VecDeque<Tick>> {
        self.servers.get(&key.server)?.histories.get(&key.disk)
    }

    /// Returns the latest samples of running servers, with their names.
    pub fn samples(&self) -> impl Iterator<Item = (&str, &Sample)> + Clone {
        let there = self
            .servers
            .iter()
            .filter(|(_, server)| server.gone.is_none());
        there.map(|(name, server)| (&**name, &server.sample))
    }

    pub fn problems(&self) -> impl Iterator<Item = (&str, &str)> {
        let all = self.problems.iter();
        all.map(|(server, problem)| (&**server, &**problem))
    }

    /// Whether the server has a problem, so that callers should not wait for its samples.
    pub fn has_problem(&self, server: &str) -> bool {
        self.problems.contains_key(server)
    }

    /// Returns the totals of all running servers, and of their disks in `rows`.
    ///
    /// A stopped server is still shown for a while, but does not count: after an upgrade, its
    /// successor has the same disks.
    pub fn totals(&self, rows: &[Row<'_>]) -> Totals {
        let rows: Vec<_> = rows.iter().filter(|row| !row.is_gone).collect();
        // `fold`, because an empty `sum` of floats is -0.
        let sum = |of: &dyn Fn(&Row<'_>) -> f64| {
            let each = rows.iter().map(|row| of(row));
            each.fold(0.0, |a, b| a + b)
        };
        let (read_iops, write_iops) = (sum(&|row| row.iops("read")), sum(&|row| row.iops("write")));
        let servers = self.samples();
        let histogram = merge(&rows);
        let max = rows
            .iter()
            .filter_map(|row| row.disk.all.max_us)
            .fold(0.0, f64::max);
        Totals {
            servers: servers.clone().count(),
            disks: rows.len(),
            read_iops,
            write_iops,
            other_iops: (sum(&|row| row.disk.all.iops) - read_iops - write_iops).max(0.0),
            read_bytes_per_second: sum(&|row| row.bytes("read")),
            write_bytes_per_second: sum(&|row| row.bytes("write")),
            errors_per_second: sum(&|row| row.disk.all.errors_per_second),
            cpu_percent: servers
                .map(|(_, sample)| sample.cpu_percent)
                .fold(0.0, |a, b| a + b),
            p50_us: quantile_of(&histogram, max, 0.5),
            p99_us: quantile_of(&histogram, max, 0.99),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::samples::{disk, sample};

    #[test]
    fn servers_come_and_go() {
        let mut model = Model::default();
        let now = Instant::now();
        model.take(
            "a".into(),
            sample(1, vec![disk("x", 100.0), disk("y", 50.0)]),
            None,
        );
        model.take("b".into(), sample(2, vec![disk("x", 10.0)]), None);
        let rows = model.rows();
        assert_eq!(rows.len(), 3);
        let totals = model.totals(&rows);
        assert_eq!(
            (totals.servers, totals.disks, totals.read_iops),
            (2, 3, 160.0)
        );
        assert_eq!(totals.read_bytes_per_second, 160.0 * 4096.0);
        model.lose("a", None, now);
        let rows = model.rows();
        assert!(rows.len() == 3 && rows[0].is_gone);
        assert_eq!(model.samples().count(), 1);
        // Only the running server counts, also in percentiles.
        let totals = model.totals(&rows);
        assert_eq!(
            (totals.servers, totals.disks, totals.read_iops),
            (1, 1, 10.0)
        );
        model.expire(now + Duration::from_secs(2));
        assert_eq!(model.rows().len(), 3);
        // The server was upgraded: its disks continue.
        model.take("a".into(), sample(1, vec![disk("x", 1.0)]), None);
        let none = Model::default().totals(&[]);
        assert!(none.cpu_percent.is_sign_positive() && none.read_iops.is_sign_positive());
        let key = |disk: &str| Key {
            server: "a".into(),
            disk: disk.into(),
        };
        let numbers = model
            .history(&key("x"))
            .unwrap()
            .iter()
            .map(|tick| tick.number);
        assert_eq!(numbers.collect::<Vec<_>>(), [1, 2]);
        assert!(model.history(&key("y")).is_none());
        model.lose("a", Some("no".into()), now);
        model.expire(now + Duration::from_secs(4));
        assert_eq!(model.rows().len(), 1);
        assert!(model.row(&key("x")).is_none());
        assert_eq!(model.problems().collect::<Vec<_>>(), [("a", "no")]);
    }

    #[test]
    fn upgraded_server_counts_once() {
        let mut model = Model::default();
        let disks = || vec![disk("x", 100.0)];
        model.take("run/1.sock".into(), sample(1, disks()), None);
        model.lose("run/1.sock", None, Instant::now());
        // The successor has another socket, and the predecessor is still shown.
        model.take("run/2.sock".into(), sample(2, disks()), None);
        let rows = model.rows();
        let totals = model.totals(&rows);
        assert_eq!((rows.len(), totals.disks, totals.read_iops), (2, 1, 100.0));
        assert_eq!((totals.cpu_percent, totals.p99_us), (25.0, None));
        assert_eq!(totals.read_bytes_per_second, 409_600.0);
    }

    #[test]
    fn memory_is_bounded() {
        let mut model = Model::default();
        let many = || {
            (0..1200)
                .map(|n| disk(&n.to_string(), 1.0))
                .collect::<Vec<_>>()
        };
        let key = Key {
            server: "a".into(),
            disk: "7".into(),
        };
        for _ in 0..HISTORY + 5 {
            model.take("a".into(), sample(1, many()), Some(&key));
        }
        assert_eq!(model.history(&key).unwrap().len(), HISTORY);
        assert_eq!(model.servers["a"].histories.len(), 1);
    }
}
