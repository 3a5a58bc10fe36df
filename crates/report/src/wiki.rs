//! The KVM wiki's arithmetic: means between two events, subtracted from each other.

use std::collections::HashMap;

use fathom_run::{Disk, Kind, Role, Round, Run};

use crate::analysis::{QemuStep, Wiki};
use crate::join::merge::{Seen, Side};
use crate::join::way::Key;

/// The wiki's layers below the guest's benchmark, from the outside in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Row {
    VirtioPci,
    Kvm,
    Server,
    Io,
}

const ROWS: [Row; 4] = [Row::VirtioPci, Row::Kvm, Row::Server, Row::Io];

/// A mean of differences.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Mean {
    sum: f64,
    count: u64,
}

impl Mean {
    fn add(&mut self, value: i64) {
        self.sum += value as f64;
        self.count += 1;
    }

    fn value(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }
}

/// A kick that waits for its interrupt, by queue.
type Open = HashMap<Option<u16>, i64>;

/// The means of one round, event by event.
#[derive(Debug, Default)]
pub(crate) struct Means {
    vqs: Vec<u64>,
    irqs: Vec<u64>,
    doorbells: Vec<u64>,
    kick_eventfds: Vec<u64>,
    msi: Vec<(u64, u64)>,
    servers: Vec<u32>,
    host_dev: Option<u64>,
    guest: Open,
    kvm: Open,
    host: HashMap<Key, i64>,
    rows: [Mean; 4],
    /// The server's records tell of its I/O; else the host's block layer does.
    recorded: bool,
    operations: u64,
}

impl Means {
    /// For the disk under test of `run`.
    pub(crate) fn new(run: &Run) -> Means {
        let none = Disk::default();
        let disk = run.disk().unwrap_or(&none);
        let server = |pid: u32| disk.server_pid.is_none_or(|server| server == pid);
        let servers = run.threads.iter();
        Means {
            vqs: disk.guest_vqs.clone(),
            irqs: disk.guest_irqs.clone(),
            doorbells: disk.doorbells.clone(),
            kick_eventfds: disk.kick_eventfds.clone(),
            msi: disk.msi.clone(),
            servers: servers
                .filter(|thread| server(thread.pid) && thread.role != Role::Vcpu)
                .map(|thread| thread.tid)
                .collect(),
            host_dev: disk.host.as_ref().map(|host| host.dev),
            ..Means::default()
        }
    }

    fn count(&mut self, row: Row, time: i64) {
        self.rows[row as usize].add(time);
    }

    /// Takes an event in; `ns` converts other times of its clock.
    pub(crate) fn event(&mut self, seen: &Seen, ns: impl Fn(u64) -> Option<i64>) {
        match seen.side {
            Side::Guest => self.guest(seen),
            Side::Host => self.host(seen, ns),
        }
    }

    fn guest(&mut self, seen: &Seen) {
        let args = &seen.event.args;
        let queue = |vq: u64| {
            let found = self.vqs.iter().position(|&known| known == vq);
            let strange = vq != 0 && found.is_none() && !self.vqs.is_empty();
            (!strange).then_some(found.filter(|_| vq != 0).map(|queue| queue as u16))
        };
        match seen.event.kind {
            Kind::BenchOperation => self.operations += 1,
            Kind::VpNotify => {
                if let Some(queue) = queue(args[0]) {
                    self.guest.insert(queue, seen.at);
                }
            }
            Kind::VringInterrupt => {
                let known = args[0] == 0 || self.irqs.is_empty() || self.irqs.contains(&args[0]);
                let queue = queue(args[1]).filter(|_| known);
                if let Some(kick) = queue.and_then(|queue| self.guest.remove(&queue)) {
                    self.count(Row::VirtioPci, seen.at - kick);
                }
            }
            _ => {}
        }
    }

    fn host(&mut self, seen: &Seen, ns: impl Fn(u64) -> Option<i64>) {
        let (args, at) = (&seen.event.args, seen.at);
        match seen.event.kind {
            Kind::KvmMmio if args[0] == 2 => self.rung(args[2], at),
            Kind::KvmFastMmio => self.rung(args[0], at),
            Kind::KvmPio if args[0] == 1 => self.rung(args[1], at),
            Kind::EventfdSignal if self.doorbells.is_empty() => {
                let queue = self.kick_eventfds.iter().position(|&id| id == args[0]);
                if let Some(queue) = queue {
                    self.kvm.insert(Some(queue as u16), at);
                }
            }
            Kind::KvmMsiSetIrq => {
                let message = self.msi.iter().position(|&m| m == (args[0], args[1]));
                let queue = match message {
                    Some(queue) => Some(queue as u16),
                    None if self.servers.contains(&seen.event.tid) && self.kvm.len() == 1 => {
                        self.kvm.keys().next().copied().flatten()
                    }
                    None => return,
                };
                if let Some(kick) = self.kvm.remove(&queue) {
                    self.count(Row::Kvm, at - kick);
                }
            }
            Kind::FathomRequest => {
                let time = |i: usize| ns(args[i]);
                if let (Some(device), Some(result), Some(end)) = (time(2), time(3), time(5)) {
                    self.recorded = true;
                    self.count(Row::Server, end - at);
                    self.count(Row::Io, result - device);
                }
            }
            Kind::BlockRqIssue if Some(args[0]) == self.host_dev && !self.recorded => {
                self.host
                    .insert(Key::sectors(args[3], args[1], args[2]), at);
            }
            Kind::BlockRqComplete if Some(args[0]) == self.host_dev && !self.recorded => {
                let key = Key::sectors(args[3], args[1], args[2]);
                if let Some(issue) = self.host.remove(&key) {
                    self.count(Row::Io, at - issue);
                }
            }
            _ => {}
        }
    }

    fn rung(&mut self, address: u64, at: i64) {
        if let Some(queue) = self.doorbells.iter().position(|&known| known == address) {
            self.kvm.insert(Some(queue as u16), at);
        }
    }
}

/// What the rounds together say, in the wiki's form.
#[derive(Debug, Default)]
pub(crate) struct Table {
    /// For each row, the (mean, the benchmark's own figure) of each round that measured it.
    rows: [Vec<(f64, Option<f64>)>; 4],
    /// What to know of them.
    notes: Vec<String>,
}

impl Table {
    /// Adds what one round measured.
    pub(crate) fn add(&mut self, round: &Round, means: &Means) {
        let control = round.benchmark.as_ref().map(|benchmark| benchmark.mean_ns);
        for row in ROWS {
            if let Some(mean) = means.rows[row as usize].value() {
                self.rows[row as usize].push((mean, control));
            }
        }
    }

    /// Adds QEMU's own time from the kick to the interrupt, and of its I/O where its events tell.
    /// Each step is the time from the one before; the first, from the interrupt before to the kick,
    /// is no part of QEMU's.
    pub(crate) fn add_qemu(&mut self, round: &Round, steps: &[QemuStep]) {
        let control = round.benchmark.as_ref().map(|benchmark| benchmark.mean_ns);
        let seen = |step: &&QemuStep| step.time.count > 0;
        let within = steps.iter().skip(1).filter(seen);
        let virtio: f64 = within.map(|step| step.time.mean).sum();
        if virtio > 0.0 {
            self.rows[Row::Server as usize].push((virtio, control));
        }
        let io = steps.iter().filter(seen);
        let io = io.map(|step| (step.wiki.as_str(), step.time.mean));
        if let Some((_, mean)) = io
            .into_iter()
            .find(|(wiki, _)| *wiki == "posix_aio_process_queue")
        {
            self.rows[Row::Io as usize].push((mean, control));
        }
    }

    /// The two tables; None when nothing but benchmarks was measured.
    pub(crate) fn finish(mut self, run: &Run) -> Option<Wiki> {
        if self.rows.iter().all(Vec::is_empty) {
            return None;
        }
        let names = names(run);
        let mut rows: Vec<(String, Option<f64>, Option<f64>)> = Vec::new();
        rows.push(("Guest benchmark".into(), self.benchmark(run), None));
        for row in ROWS {
            let measured = &self.rows[row as usize];
            let mean = average(measured.iter().map(|&(mean, _)| mean));
            let control = average(measured.iter().filter_map(|&(_, control)| control));
            rows.push((names[row as usize].clone(), mean, control));
        }
        let on_host = run.rounds.iter().filter(|round| round.on_host);
        let host = average(on_host.filter_map(|round| Some(round.benchmark.as_ref()?.mean_ns)));
        rows.push(("Host benchmark".into(), host, None));
        for (name, mean, _) in &rows {
            if mean.is_none() {
                self.notes.push(format!("{name}: no round measured it"));
            }
        }
        if run.scenario.as_ref().is_some_and(|s| s.iodepth > 1) {
            self.notes.push(
                "the wiki's arithmetic is for one request at a time: with more in flight, read \
                 the exact breakdown"
                    .into(),
            );
        }
        if run.scenario.as_ref().is_some_and(|s| s.polling) {
            self.notes
                .push("the server polls: not every request has a kick to measure from".into());
        }
        let delta = deltas(&rows[..5], &server(run));
        Some(Wiki {
            cumulative: rows
                .into_iter()
                .filter_map(|(name, mean, control)| Some((name, mean?, control)))
                .collect(),
            delta,
            notes: self.notes,
        })
    }

    /// The benchmark's figure from the rounds that the row below it comes from, so that their
    /// difference means something; else from the untraced rounds.
    fn benchmark(&self, run: &Run) -> Option<f64> {
        let same = self.rows.iter().find(|rows| !rows.is_empty());
        let same = same.and_then(|rows| average(rows.iter().filter_map(|&(_, control)| control)));
        let untraced = run
            .rounds
            .iter()
            .filter(|round| !round.on_host && round.traced.is_empty())
            .filter_map(|round| Some(round.benchmark.as_ref()?.mean_ns));
        same.or_else(|| average(untraced))
    }
}

fn average(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0u32), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

/// Who serves the disk, as the wiki's rows name it.
fn server(run: &Run) -> String {
    let server = run.scenario.as_ref().map(|s| s.server.as_str());
    let device = run.disk().map(|disk| disk.device.as_str());
    match (server, device) {
        (Some("fathom"), _) => "Fathom",
        (Some("qsd"), _) => "QSD",
        (Some("qemu"), _) => "QEMU",
        (_, Some("vhost-user-blk")) => "Fathom",
        _ => "QEMU",
    }
    .into()
}

fn names(run: &Run) -> [String; 4] {
    let server = server(run);
    let threads = run.scenario.as_ref().is_some_and(|s| s.aio == "threads");
    let io = match server == "QEMU" && threads {
        true => "QEMU paio".into(),
        false => "Host I/O".into(),
    };
    [
        "Guest virtio-pci".into(),
        "Host kvm.ko".into(),
        format!("{server} virtio"),
        io,
    ]
}

/// Differences of successive rows; where a row is missing, the layers on both its sides are one.
fn deltas(rows: &[(String, Option<f64>, Option<f64>)], server: &str) -> Vec<(String, f64, f64)> {
    let layers = [
        "Guest".into(),
        "Host/guest switching".into(),
        format!("Host/{server} switching"),
        server.to_owned(),
        "Host I/O".into(),
    ];
    let Some(whole) = rows.first().and_then(|row| row.1) else {
        return Vec::new();
    };
    let mut out = Vec::new();
    let (mut name, mut from) = (String::new(), None);
    for (i, (_, mean, _)) in rows.iter().enumerate() {
        if let (Some(from), Some(to)) = (from, *mean) {
            let delta: f64 = from - to;
            out.push((std::mem::take(&mut name), delta, delta / whole * 100.0));
        }
        from = mean.or(from);
        if !name.is_empty() {
            name.push_str(" + ");
        }
        name.push_str(&layers[i]);
    }
    if let Some(rest) = from {
        out.push((name, rest, rest / whole * 100.0));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The wiki's own figures, its own deltas.
    #[test]
    fn the_wikis_table_comes_out_of_the_wikis_figures() {
        let row = |name: &str, mean| (name.to_owned(), Some(mean), None);
        let rows = [
            row("Guest benchmark", 196_528.0),
            row("Guest virtio-pci", 170_829.0),
            row("Host kvm.ko", 163_268.0),
            row("QEMU virtio", 159_628.0),
            row("QEMU paio", 130_235.0),
        ];
        let told: Vec<(String, i64, String)> = deltas(&rows, "QEMU")
            .into_iter()
            .map(|(name, ns, percent)| (name, ns as i64, format!("{percent:.2}")))
            .collect();
        let wiki = [
            ("Guest", 25_699, "13.08"),
            ("Host/guest switching", 7_561, "3.85"),
            ("Host/QEMU switching", 3_640, "1.85"),
            ("QEMU", 29_393, "14.96"),
            ("Host I/O", 130_235, "66.27"),
        ];
        for (told, (name, ns, percent)) in told.iter().zip(wiki) {
            assert_eq!(
                (told.0.as_str(), told.1, told.2.as_str()),
                (name, ns, percent)
            );
        }
        assert_eq!(told.len(), 5);
    }

    #[test]
    fn layers_around_a_missing_row_are_one() {
        let row = |mean| (String::new(), mean, None);
        let rows = [Some(100.0), Some(90.0), None, Some(70.0), Some(50.0)].map(row);
        let told = deltas(&rows, "Fathom");
        assert_eq!(told[1].0, "Host/guest switching + Host/Fathom switching");
        assert_eq!(told[1].1, 20.0);
        assert_eq!(told.iter().map(|(_, ns, _)| ns).sum::<f64>(), 100.0);
    }
}
