//! The measurements of one round.

use std::collections::HashMap;

use fathom_run::{Disk, Kind, Role, Run, flags};

use crate::analysis::Point;
use crate::join::merge::{Seen, Side};
use crate::join::parts::{Share, pins};
use crate::join::way::{Key, Way};

/// The wiki's layers below the guest's benchmark, from the outside in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Row {
    VirtioPci,
    Kvm,
    Server,
    Io,
}

pub(super) const ROWS: [Row; 4] = [Row::VirtioPci, Row::Kvm, Row::Server, Row::Io];

/// A mean of differences.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Mean {
    pub sum: f64,
    pub count: u64,
}

impl Mean {
    fn add(&mut self, value: i64) {
        self.sum += value as f64;
        self.count += 1;
    }

    pub fn value(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }
}

/// The server's rows from followed requests.
#[derive(Debug, Default)]
pub(crate) struct Served {
    requests: u64,
    /// From wake to interrupt, and from submit to result.
    virtio: Mean,
    io: Mean,
    /// The same by the server's own records: from wake, or from pop if the server polled, to
    /// interrupt, or to the used ring if no interrupt was seen. Each is a part of a followed
    /// request, so that its mean is never above the requests' own.
    recorded_virtio: Mean,
    recorded_io: Mean,
}

impl Served {
    pub(crate) fn add(&mut self, way: &Way) {
        self.requests += 1;
        let at = |point| way.points.get(point);
        if let (Some(wake), Some(interrupt)) = (at(Point::Wake), at(Point::Interrupt)) {
            self.virtio.add(interrupt - wake);
        }
        if let (Some(device), Some(result)) = (at(Point::Device), at(Point::Result)) {
            self.io.add(result - device);
        }
        let end = at(Point::Interrupt).or(at(Point::Used));
        if let (Some(pop), Some(_), Some(end)) = (at(Point::Pop), at(Point::Used), end) {
            self.recorded_virtio
                .add(end - at(Point::Wake).unwrap_or(pop));
            if let (Some(device), Some(result)) = (at(Point::Device), at(Point::Result)) {
                self.recorded_io.add(result - device);
            }
        }
    }

    /// Returns a mean if it covers at least 99% of the requests; a few would not be representative.
    fn of_all(&self, mean: Mean) -> Option<Mean> {
        (mean.count > 0 && mean.count * 100 >= self.requests * 99).then_some(mean)
    }
}

/// Kicks that wait for their interrupt, by queue.
type Open = HashMap<Option<u16>, i64>;

/// Computes the means of one round, event by event.
#[derive(Debug, Default)]
pub(crate) struct Means {
    vqs: Vec<u64>,
    irqs: Vec<u64>,
    doorbells: Vec<u64>,
    kick_eventfds: Vec<u64>,
    msi: Vec<(u64, u64)>,
    gsis: Vec<u64>,
    servers: Vec<u32>,
    share: Share,
    guest: Open,
    kvm: Open,
    host: HashMap<Key, i64>,
    pub(super) rows: [Mean; 4],
    /// The server's records show its I/O; otherwise the host's block layer does.
    recorded: bool,
    operations: u64,
    /// The I/O row is from the server's own calls.
    pub(super) io_of_calls: bool,
}

impl Means {
    /// Creates the means for the disk under test of `run`.
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
            gsis: pins(disk),
            servers: servers
                .filter(|thread| server(thread.pid) && thread.role != Role::Vcpu)
                .map(|thread| thread.tid)
                .collect(),
            share: Share::of(run),
            ..Means::default()
        }
    }

    /// Takes the server's rows from followed requests: by its records, else by its calls. In a
    /// round whose requests were not followed, the rows of the records stay.
    pub(crate) fn served(&mut self, served: &Served) {
        if self.recorded {
            if served.requests > 0 {
                self.rows[Row::Server as usize] = served.recorded_virtio;
                self.rows[Row::Io as usize] = served.recorded_io;
            }
            return;
        }
        if let Some(virtio) = served.of_all(served.virtio) {
            self.rows[Row::Server as usize] = virtio;
        }
        if let Some(io) = served.of_all(served.io) {
            self.rows[Row::Io as usize] = io;
            self.io_of_calls = true;
        }
    }

    fn count(&mut self, row: Row, time: i64) {
        self.rows[row as usize].add(time);
    }

    /// Processes an event; `ns` converts other times of its clock.
    pub(crate) fn event(&mut self, seen: &Seen, ns: impl Fn(u64) -> Option<i64>) {
        match seen.side {
            Side::Guest => self.guest(seen),
            Side::Host => self.host(seen, ns),
            Side::Remote => {}
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
                self.interrupt(queue, at);
            }
            // The event does not distinguish queues.
            Kind::KvmSetIrq if args[1] == 1 && self.gsis.contains(&args[0]) => {
                if let (1, Some(&queue)) = (self.kvm.len(), self.kvm.keys().next()) {
                    self.interrupt(queue, at);
                }
            }
            Kind::FathomRequest => {
                let time = |i: usize| ns(args[i]);
                if let (Some(device), Some(result), Some(end)) = (time(2), time(3), time(5)) {
                    self.recorded = true;
                    let (_, flags, _) = seen.event.fathom_rest();
                    // If the server polled, its last wake may be long ago.
                    let start = match flags & flags::POLLED {
                        0 => at,
                        _ => time(0).unwrap_or(at),
                    };
                    self.count(Row::Server, end - start);
                    self.count(Row::Io, result - device);
                }
            }
            Kind::BlockRqIssue if !self.recorded => {
                let key = self.share.key(&seen.event);
                let tid = seen.event.tid;
                if let Some(key) = key.filter(|key| self.share.holds(key, tid)) {
                    self.host.insert(key, at);
                }
            }
            Kind::BlockRqComplete if !self.recorded => {
                let key = self.share.key(&seen.event);
                if let Some(issue) = key.and_then(|key| self.host.remove(&key)) {
                    self.count(Row::Io, at - issue);
                }
            }
            _ => {}
        }
    }

    fn interrupt(&mut self, queue: Option<u16>, at: i64) {
        if let Some(kick) = self.kvm.remove(&queue) {
            self.count(Row::Kvm, at - kick);
        }
    }

    fn rung(&mut self, address: u64, at: i64) {
        if let Some(queue) = self.doorbells.iter().position(|&known| known == address) {
            self.kvm.insert(Some(queue as u16), at);
        }
    }
}
