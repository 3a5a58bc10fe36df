//! The steps of a request within QEMU, in the order of the wiki's table of aio=threads and
//! aio=native. Each row is the time since the row before it; the first row is the time since the
//! interrupt of the request before.
//!
//! At depth 1 the means add up to the benchmark's latency, as in the wiki.

mod names;

use std::collections::HashMap;

use fathom_run::qemu_names::Version;
use fathom_run::{Event, Kind};

use crate::analysis::QemuStep;
use crate::distribution::Tally;
use names::{Names, Row, What};

/// Maximum number of requests in flight that are followed.
const MAX_REQUESTS: usize = 1 << 16;
/// Maximum number of devices, then of threads, that are distinguished.
const MAX_DEVICES: usize = 64;
const MAX_THREADS: usize = 512;
/// Maximum number of requests of one thread between two submits.
const MAX_PENDING: usize = 1024;

/// Follows requests through QEMU's events, event by event.
#[derive(Debug)]
pub struct Steps {
    names: Names,
    devices: HashMap<u64, Device>,
    requests: HashMap<Key, Request>,
    threads: HashMap<u32, ThreadState>,
    /// Requests by the number that QEMU's I/O engine gives them.
    submitted: HashMap<u64, Key>,
    ambiguous: u64,
    ignored: u64,
}

/// The addresses of a device and of one of its requests.
type Key = (u64, u64);

/// The times of a request's points.
#[derive(Clone, Copy, Debug, Default)]
struct Request {
    notified: Option<i64>,
    submit: Option<i64>,
    complete: Option<i64>,
    rw_complete: Option<i64>,
    /// The request was submitted together with others, so its submit and completion are unknown.
    is_ambiguous: bool,
}

#[derive(Debug, Default)]
struct Device {
    requests: u64,
    /// The last interrupt, until the next kick.
    interrupted: Option<i64>,
    /// Completed requests that wait for the interrupt.
    done: Vec<Request>,
    rows: [Tally; Row::COUNT],
}

#[derive(Debug, Default)]
struct ThreadState {
    /// The last kick: its device and its time.
    kicked: Option<(u64, i64)>,
    /// Requests taken from the ring and not submitted yet.
    pending: Vec<Key>,
}

impl Steps {
    /// Creates the state for a stream with these strings.
    pub fn new(strings: &[String]) -> Steps {
        Steps {
            names: Names::of(strings),
            devices: HashMap::new(),
            requests: HashMap::new(),
            threads: HashMap::new(),
            submitted: HashMap::new(),
            ambiguous: 0,
            ignored: 0,
        }
    }

    /// Processes an event at `time` in ns. Ignores events other than [`Kind::Qemu`] and
    /// [`Kind::Lost`].
    #[inline]
    pub fn add(&mut self, time: i64, event: &Event) {
        match event.kind {
            Kind::Qemu => {
                if let Some(what) = self.names.what(event.args[0]) {
                    self.take(time, event, what);
                }
            }
            Kind::Lost => self.forget(),
            _ => {}
        }
    }

    fn take(&mut self, time: i64, event: &Event, what: What) {
        let [_, first, second, ..] = event.args;
        match what {
            What::Kick => self.kick(time, event.tid, first),
            What::Taken => self.taken(event.tid, (first, second)),
            What::Submit => self.submit(time, event.tid, self.names.submitted(event)),
            What::Complete => {
                let key = self.submitted.remove(&self.names.completed(event));
                if let Some(request) = key.and_then(|key| self.requests.get_mut(&key)) {
                    request.complete = Some(time);
                }
            }
            What::RwComplete => self.rw_complete(time, (first, second)),
            What::Interrupt => self.interrupt(time, first),
        }
    }

    /// Forgets all requests in flight, as the missing events may belong to any of them.
    fn forget(&mut self) {
        self.requests.clear();
        self.threads.clear();
        self.submitted.clear();
        for device in self.devices.values_mut() {
            device.interrupted = None;
            device.done.clear();
        }
    }

    fn device(&mut self, address: u64) -> Option<&mut Device> {
        if self.devices.len() == MAX_DEVICES && !self.devices.contains_key(&address) {
            self.ignored += 1;
            return None;
        }
        Some(self.devices.entry(address).or_default())
    }

    fn thread(&mut self, tid: u32) -> Option<&mut ThreadState> {
        if self.threads.len() == MAX_THREADS && !self.threads.contains_key(&tid) {
            self.ignored += 1;
            return None;
        }
        Some(self.threads.entry(tid).or_default())
    }

    fn kick(&mut self, time: i64, tid: u32, address: u64) {
        if let Some(thread) = self.thread(tid) {
            thread.kicked = Some((address, time));
        }
        // Only the first kick after an interrupt counts: QEMU checks the queue again before it
        // sleeps.
        let device = self.devices.get_mut(&address);
        if let Some((device, since)) = device.and_then(|d| d.interrupted.take().map(|s| (d, s))) {
            device.rows[Row::Kick as usize].add(time.saturating_sub(since));
        }
    }

    fn taken(&mut self, tid: u32, key: Key) {
        if self.requests.len() == MAX_REQUESTS {
            self.ignored += 1;
            return;
        }
        let Some(thread) = self.thread(tid) else {
            return;
        };
        if thread.pending.len() == MAX_PENDING {
            // No submit follows: the stream lacks the submit events of this engine.
            thread.pending.clear();
        }
        thread.pending.push(key);
        let kicked = thread.kicked.filter(|(address, _)| *address == key.0);
        let request = Request {
            notified: kicked.map(|(_, time)| time),
            ..Request::default()
        };
        self.requests.insert(key, request);
        if let Some(device) = self.device(key.0) {
            device.requests += 1;
        }
    }

    fn submit(&mut self, time: i64, tid: u32, engine: u64) {
        let Some(thread) = self.threads.get_mut(&tid) else {
            return;
        };
        match thread.pending[..] {
            // The submit is for a flush or metadata, not for a guest request.
            [] => {}
            [key] => {
                if let Some(request) = self.requests.get_mut(&key) {
                    request.submit = Some(time);
                }
                if self.submitted.len() < MAX_REQUESTS {
                    self.submitted.insert(engine, key);
                }
            }
            // QEMU sorts and merges requests that it takes together.
            ref several => {
                for key in several {
                    if let Some(request) = self.requests.get_mut(key) {
                        request.is_ambiguous = true;
                        self.ambiguous += 1;
                    }
                }
            }
        }
        thread.pending.clear();
    }

    fn rw_complete(&mut self, time: i64, key: Key) {
        let Some(mut request) = self.requests.remove(&key) else {
            return;
        };
        request.rw_complete = Some(time);
        if let Some(device) = self.devices.get_mut(&key.0)
            && device.done.len() < MAX_REQUESTS
        {
            device.done.push(request);
        }
    }

    fn interrupt(&mut self, time: i64, address: u64) {
        let Some(device) = self.devices.get_mut(&address) else {
            return;
        };
        if device.done.is_empty() {
            return;
        }
        device.interrupted = Some(time);
        for request in std::mem::take(&mut device.done) {
            request.count(time, &mut device.rows);
        }
    }

    /// Returns the rows of the device with the most requests, and notes on them, a line each.
    /// Without requests, the rows are empty. `version` is QEMU's version.
    pub fn finish(self, version: Option<Version>) -> (Vec<QemuStep>, Vec<String>) {
        let mut notes = Vec::new();
        let devices = self.devices.iter();
        let Some((_, device)) = devices.max_by_key(|(address, d)| (d.requests, **address)) else {
            notes.push(
                "QEMU's events: none is of a request to a virtio-blk disk (virtio_blk_handle_*)"
                    .into(),
            );
            return (Vec::new(), notes);
        };
        if device.rows[Row::Interrupt as usize].count() == 0 {
            notes.push("QEMU's events: no request was seen from its kick to its interrupt".into());
            return (Vec::new(), notes);
        }
        if self.ambiguous > 0 {
            notes.push(format!(
                "QEMU's events: {} requests were submitted together with others; only their last \
                 step is known",
                self.ambiguous
            ));
        }
        if self.ignored > 0 {
            notes.push(format!(
                "QEMU's events: {} beyond all bounds left out",
                self.ignored
            ));
        }
        let rows = self.names.rows(version);
        let rows = rows.into_iter().map(|(row, wiki, today)| QemuStep {
            wiki: wiki.to_owned(),
            today,
            time: row.map_or_else(Default::default, |row| device.rows[row as usize].finish()),
        });
        (rows.collect(), notes)
    }
}

impl Request {
    /// Adds the time from each seen point to the next.
    fn count(&self, interrupted: i64, rows: &mut [Tally; Row::COUNT]) {
        let mut before = self.notified;
        let points = [
            (Row::Submit, self.submit),
            (Row::Complete, self.complete),
            (Row::RwComplete, self.rw_complete),
            (Row::Interrupt, Some(interrupted)),
        ];
        for (row, time) in points {
            let Some(time) = time else { continue };
            let known = !self.is_ambiguous || row == Row::Interrupt;
            if let Some(before) = before.filter(|_| known) {
                rows[row as usize].add(time.saturating_sub(before));
            }
            before = Some(time);
        }
    }
}

#[cfg(test)]
mod tests;
