//! How long and how often each thread waited for which lock, from futex calls and from QEMU's own
//! mutex events.

use std::collections::HashMap;

use fathom_run::{Event, Kind, Thread};

use crate::analysis::LockRow;
use crate::calls::{FUTEX, FUTEX_WAIT, is_futex_wait, order, thread_of};
use crate::distribution::Tally;

/// Maximum number of (thread, lock) pairs; waits for further ones are counted as ignored.
const MAX_ROWS: usize = 4096;
/// Maximum number of rows in a report.
const MAX_SHOWN: usize = 200;
/// Maximum number of places in QEMU's source that are kept for a mutex.
const MAX_PLACES: usize = 16;
/// The result of a futex wait that did not wait because the lock had changed.
const EAGAIN: i64 = -11;

/// Collects waits, event by event.
#[derive(Debug, Default)]
pub struct Locks {
    rows: HashMap<Key, Tally>,
    waiting: HashMap<(Source, u32), Wait>,
    /// The places that take each mutex, and how often.
    places: HashMap<u64, Vec<Place>>,
    ignored: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Source {
    Futex,
    Mutex,
}

impl Source {
    fn name(self) -> &'static str {
        match self {
            Source::Futex => "futex",
            Source::Mutex => "qemu mutex",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    source: Source,
    tid: u32,
    address: u64,
}

#[derive(Clone, Copy, Debug)]
struct Wait {
    address: u64,
    since: i64,
}

/// A place in QEMU's source that takes a mutex.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Index of the file's name in the stream's strings.
    file: u64,
    line: u64,
    times: u64,
}

/// The numbers of QEMU's mutex events in a stream's strings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MutexNames {
    lock: Option<u64>,
    locked: Option<u64>,
}

impl MutexNames {
    /// Finds the events in the strings of a stream's header.
    pub fn of(strings: &[String]) -> MutexNames {
        let index = |name: &str| strings.iter().position(|s| s == name).map(|i| i as u64);
        MutexNames {
            lock: index("qemu_mutex_lock"),
            locked: index("qemu_mutex_locked"),
        }
    }
}

impl Locks {
    /// Creates a table without waits.
    pub fn new() -> Locks {
        Locks::default()
    }

    /// Processes a system call event at `time` in ns. Only futex calls count.
    #[inline]
    pub fn add_call(&mut self, time: i64, event: &Event) {
        match event.kind {
            Kind::SysEnter if is_futex_wait(event.args[0], event.args[2]) => {
                self.begin(Source::Futex, event.tid, event.args[1], time);
            }
            Kind::SysEnter => {
                self.waiting.remove(&(Source::Futex, event.tid));
            }
            Kind::SysExit if matches!(event.args[0], FUTEX | FUTEX_WAIT) => {
                let wait = self.waiting.remove(&(Source::Futex, event.tid));
                let waited = event.args[1].cast_signed() != EAGAIN;
                if let Some(wait) = wait.filter(|_| waited) {
                    self.end(Source::Futex, event.tid, wait, time);
                }
            }
            Kind::Lost => self
                .waiting
                .retain(|(source, _), _| *source != Source::Futex),
            _ => {}
        }
    }

    /// Processes an event of QEMU at `time` in ns.
    #[inline]
    pub fn add_qemu(&mut self, time: i64, event: &Event, names: MutexNames) {
        match event.kind {
            Kind::Qemu => {
                let [name, address, line, file, ..] = event.args;
                // Without a thread ID, the end of a wait cannot be matched to its start.
                if Some(name) == names.lock && event.tid != 0 {
                    self.begin(Source::Mutex, event.tid, address, time);
                } else if Some(name) == names.locked {
                    self.count_place(address, file, line);
                    let wait = self.waiting.remove(&(Source::Mutex, event.tid));
                    // Without a wait, the mutex was only tried. With another mutex's wait, events
                    // are missing.
                    if let Some(wait) = wait.filter(|wait| wait.address == address) {
                        self.end(Source::Mutex, event.tid, wait, time);
                    }
                }
            }
            Kind::Lost => self
                .waiting
                .retain(|(source, _), _| *source != Source::Mutex),
            _ => {}
        }
    }

    fn begin(&mut self, source: Source, tid: u32, address: u64, since: i64) {
        // A thread has at most one wait per source; the limit bounds memory for damaged files.
        if self.waiting.len() >= 2 * MAX_ROWS {
            self.ignored += 1;
            return;
        }
        self.waiting.insert((source, tid), Wait { address, since });
    }

    fn end(&mut self, source: Source, tid: u32, wait: Wait, time: i64) {
        let key = Key {
            source,
            tid,
            address: wait.address,
        };
        if self.rows.len() == MAX_ROWS && !self.rows.contains_key(&key) {
            self.ignored += 1;
            return;
        }
        self.rows
            .entry(key)
            .or_default()
            .add(time.saturating_sub(wait.since));
    }

    fn count_place(&mut self, address: u64, file: u64, line: u64) {
        if self.places.len() == MAX_ROWS && !self.places.contains_key(&address) {
            return;
        }
        let places = self.places.entry(address).or_default();
        let same = |place: &&mut Place| (place.file, place.line) == (file, line);
        if let Some(place) = places.iter_mut().find(same) {
            place.times += 1;
        } else if places.len() < MAX_PLACES {
            let times = 1;
            places.push(Place { file, line, times });
        }
    }

    /// Returns where QEMU takes each mutex, by address, as text for the reader.
    pub(crate) fn taken_at(&self, strings: &[String]) -> HashMap<u64, String> {
        let places = self.places.iter();
        places
            .filter_map(|(address, places)| Some((*address, describe(places, strings)?)))
            .collect()
    }

    /// Returns the table, longest total wait first, and notes on it, a line each. `threads` lists
    /// the known threads, and `strings` are those of QEMU's stream. `symbol` returns the name of an
    /// address in a process (pid, address), if known.
    pub fn finish(
        self,
        threads: &[Thread],
        strings: &[String],
        symbol: &dyn Fn(u32, u64) -> Option<String>,
    ) -> (Vec<LockRow>, Vec<String>) {
        let mut notes = Vec::new();
        if self.ignored > 0 {
            notes.push(format!(
                "locks: {} waits beyond the first {MAX_ROWS} locks are left out",
                self.ignored
            ));
        }
        let places = &self.places;
        let mut rows: Vec<LockRow> = self
            .rows
            .iter()
            .map(|(key, tally)| {
                let thread = thread_of(threads, key.tid);
                let name = match key.source {
                    Source::Futex => symbol(thread.pid, key.address),
                    Source::Mutex => places.get(&key.address).and_then(|p| describe(p, strings)),
                };
                LockRow {
                    thread,
                    address: key.address,
                    name,
                    source: key.source.name(),
                    time: tally.finish(),
                    total: tally.sum(),
                }
            })
            .collect();
        rows.sort_by(|a, b| {
            let rest = |row: &LockRow| (order(&row.thread), row.address);
            b.total.cmp(&a.total).then_with(|| rest(a).cmp(&rest(b)))
        });
        if rows.len() > MAX_SHOWN {
            notes.push(format!(
                "locks: the {MAX_SHOWN} of {} with the longest waits are shown",
                rows.len()
            ));
            rows.truncate(MAX_SHOWN);
        }
        (rows, notes)
    }
}

/// Describes a mutex by the place that takes it most often, as QEMU's events do not name it.
fn describe(places: &[Place], strings: &[String]) -> Option<String> {
    let Place { file, line, .. } = *places.iter().max_by_key(|place| place.times)?;
    let file = strings.get(usize::try_from(file).ok()?)?;
    Some(match places.len() - 1 {
        0 => format!("{file}:{line}"),
        1 => format!("{file}:{line} and one more place"),
        more => format!("{file}:{line} and {more} more places"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn futex(time: i64, tid: u32, address: u64, operation: u64, result: i64) -> [(i64, Event); 2] {
        let args = [FUTEX, address, operation, 0, 0];
        let result = result.cast_unsigned();
        [
            (0, Event::new(0, Kind::SysEnter, 0, tid, &args)),
            (time, Event::new(0, Kind::SysExit, 0, tid, &[FUTEX, result])),
        ]
    }

    fn table(locks: Locks) -> Vec<(u32, u64, u64, i64, Option<String>)> {
        let strings = ["a.c", "b.c"].map(str::to_owned);
        let symbol = |_, address| (address == 0x10).then(|| "the_lock".to_owned());
        let (rows, notes) = locks.finish(&[], &strings, &symbol);
        assert!(notes.is_empty(), "{notes:?}");
        let row = |r: LockRow| (r.thread.tid, r.address, r.time.count, r.total, r.name);
        rows.into_iter().map(row).collect()
    }

    #[test]
    fn waits_are_counted_by_thread_and_lock() {
        let mut locks = Locks::new();
        for (time, tid, address, operation, result) in [
            (50, 1, 0x10, 128, 0),
            (70, 1, 0x10, 9 | 128, 0),
            (500, 1, 0x20, 128, -110),
            (60, 2, 0x10, 128, 0),
            // No waits: the first wakes another thread, the second finds the lock changed.
            (90, 1, 0x10, 129, 1),
            (90, 1, 0x10, 128, EAGAIN),
        ] {
            for (time, event) in futex(time, tid, address, operation, result) {
                locks.add_call(time, &event);
            }
        }
        let name = || Some("the_lock".to_owned());
        assert_eq!(
            table(locks),
            [
                (1, 0x20, 1, 500, None),
                (1, 0x10, 2, 120, name()),
                (2, 0x10, 1, 60, name()),
            ]
        );
    }

    #[test]
    fn a_wait_over_missing_events_is_none() {
        let mut locks = Locks::new();
        let [enter, exit] = futex(900, 1, 0x10, 128, 0);
        locks.add_call(0, &enter.1);
        locks.add_call(1, &Event::new(0, Kind::Lost, 0, 0, &[1]));
        locks.add_call(900, &exit.1);
        locks.add_call(901, &exit.1);
        locks.add_call(902, &enter.1);
        let read = Event::new(0, Kind::SysEnter, 0, 1, &[0]);
        locks.add_call(903, &read);
        locks.add_call(999, &exit.1);
        assert!(table(locks).is_empty());
    }

    #[test]
    fn qemus_mutexes_have_the_place_that_takes_them_as_their_name() {
        let names = [
            "qemu_mutex_unlock",
            "qemu_mutex_lock",
            "x",
            "qemu_mutex_locked",
        ];
        let names = MutexNames::of(&names.map(str::to_owned));
        let event = |name, tid, mutex, line, file| {
            Event::new(0, Kind::Qemu, 0, tid, &[name, mutex, line, file])
        };
        let mut locks = Locks::new();
        for (start, end, tid, mutex, line) in [
            (0, 30, 1, 7, 91),
            (40, 41, 1, 7, 95),
            (50, 52, 1, 7, 95),
            (10, 15, 2, 8, 12),
        ] {
            locks.add_qemu(start, &event(1, tid, mutex, line, 1), names);
            locks.add_qemu(end, &event(3, tid, mutex, line, 1), names);
            locks.add_qemu(end, &event(0, tid, mutex, line, 1), names);
        }
        // A mutex that was only tried; then a wait for one mutex that ends with another.
        locks.add_qemu(60, &event(3, 3, 7, 95, 1), names);
        locks.add_qemu(70, &event(1, 3, 7, 95, 1), names);
        locks.add_qemu(80, &event(3, 3, 8, 95, 1), names);
        let place = |text: &str| Some(text.to_owned());
        assert_eq!(
            table(locks),
            [
                (1, 7, 3, 33, place("b.c:95 and one more place")),
                (2, 8, 1, 5, place("b.c:95 and one more place")),
            ]
        );
    }

    #[test]
    fn a_flood_of_locks_is_bounded_and_said() {
        let mut locks = Locks::new();
        for address in 0..3 * MAX_ROWS as u64 {
            for (time, event) in futex(5, 1, address, 0, 0) {
                locks.add_call(time, &event);
            }
        }
        let (rows, notes) = locks.finish(&[], &[], &|_, _| None);
        assert_eq!(rows.len(), MAX_SHOWN);
        assert!(notes[0].contains("8192 waits"), "{notes:?}");
    }
}
