//! The tables of the server's and the vCPUs' threads: system calls, locks, QEMU's steps and a
//! picture, from all rounds that watched them.

use std::collections::HashMap;
use std::path::Path;

use fathom_run::qemu_names::Version;
use fathom_run::{Clock, Event, Kind, Role, Round, Run, Stream, StreamInfo, Thread};

use crate::analysis::{LockRow, Picture, QemuStep, ThreadCalls, TimeLine};
use crate::calls::Calls;
use crate::clock::TimeBase;
use crate::locks::{Locks, MutexNames};
use crate::picture::{self, Moment};
use crate::qemu::Steps;
use crate::time_lines::TimeLines;

/// The names of the streams, as their collectors write them.
const SYSCALLS: &str = "syscalls";
const FUTEX: &str = "futex";
const QEMU: &str = "qemu";
const SYMBOLS: &str = "symbols";
/// The prefix of QEMU's mutex events.
const MUTEX_EVENTS: &str = "qemu_mutex";

/// The results of all threads.
#[derive(Debug, Default)]
pub(crate) struct Threads {
    pub(crate) calls: Vec<ThreadCalls>,
    pub(crate) locks: Vec<LockRow>,
    pub(crate) qemu: Vec<QemuStep>,
    pub(crate) time_lines: Vec<TimeLine>,
    /// The window that `time_lines` show.
    pub(crate) picture: Option<Picture>,
    /// Problems, a line each.
    pub(crate) problems: Vec<String>,
}

/// Reads a run's streams of system calls and of QEMU's events. A damaged stream is read up to the
/// damage, which is listed in the problems.
pub(crate) fn threads(dir: &Path, run: &Run) -> Threads {
    let mut work = Work {
        dir,
        calls: Calls::new(),
        locks: Locks::new(),
        mutexes: Locks::new(),
        steps: None,
        strings: Vec::new(),
        symbols: HashMap::new(),
        found: Threads::default(),
    };
    for round in run.rounds.iter().filter(|round| !round.on_host) {
        work.round(round, run);
    }
    work.finish(run)
}

struct Work<'a> {
    dir: &'a Path,
    calls: Calls,
    locks: Locks,
    mutexes: Locks,
    /// From the first round with QEMU's events; in other rounds, strings have other numbers.
    steps: Option<Steps>,
    /// The strings of the first round with QEMU's mutex events. Tracing these events is so costly
    /// that they have their own round.
    strings: Vec<String>,
    /// Names of addresses, by process and address.
    symbols: HashMap<(u32, u64), String>,
    found: Threads,
}

impl Work<'_> {
    fn round(&mut self, round: &Round, run: &Run) {
        let time = TimeBase::new(&round.clocks, None, false);
        if let Some(info) = self.stream(round, &time, SYMBOLS) {
            self.symbols(round, info);
        }
        if let Some(info) = self.stream(round, &time, SYSCALLS) {
            self.syscalls(round, info, &time);
            if self.found.time_lines.is_empty() {
                self.picture(round, info, &time, run);
            }
        } else if let Some(info) = self.stream(round, &time, FUTEX) {
            // The stream has only futex calls, so it says nothing about the time between them.
            let mut locks = std::mem::take(&mut self.locks);
            self.read(round, info, &time, &mut |time, event| {
                locks.add_call(time, event);
            });
            self.locks = locks;
        }
        if let Some(info) = self.stream(round, &time, QEMU) {
            self.qemu(round, info, &time);
        }
    }

    /// Returns the host's stream of this name. A stream whose times cannot be converted is left
    /// out, with a problem.
    fn stream<'r>(
        &mut self,
        round: &'r Round,
        time: &TimeBase,
        name: &str,
    ) -> Option<&'r StreamInfo> {
        let named = round.streams.iter().find(|info| info.name == name);
        let info = named.filter(|info| is_hosts(info.clock))?;
        if time.knows(info.clock) {
            return Some(info);
        }
        let why = "left out of the tables of threads: no two readings relate its clock to time";
        self.say(round, info, why);
        None
    }

    fn syscalls(&mut self, round: &Round, info: &StreamInfo, time: &TimeBase) {
        let mut calls = std::mem::take(&mut self.calls);
        let mut locks = std::mem::take(&mut self.locks);
        self.read(round, info, time, &mut |time, event| {
            calls.add(time, event);
            locks.add_call(time, event);
        });
        // The next round's first events do not continue this round's calls.
        let gap = Event::new(0, Kind::Lost, 0, 0, &[]);
        calls.add(0, &gap);
        locks.add_call(0, &gap);
        (self.calls, self.locks) = (calls, locks);
    }

    /// Draws the picture around the round's slowest request if it is known, else from the middle.
    fn picture(&mut self, round: &Round, info: &StreamInfo, time: &TimeBase, run: &Run) {
        for mut moment in picture::choose(self.dir, round) {
            let lines = self.time_lines(round, info, time, &moment);
            let length = lines.length();
            let drawn = lines.finish(&run.threads);
            if moment.picture.is_within(length) && !drawn.is_empty() {
                moment.picture.length = length;
                self.found.picture = Some(moment.picture);
                self.found.time_lines = drawn;
                return;
            }
        }
    }

    fn time_lines(
        &mut self,
        round: &Round,
        info: &StreamInfo,
        time: &TimeBase,
        moment: &Moment,
    ) -> TimeLines {
        let mut lines = match moment.window {
            Some((start, end)) => TimeLines::within(start, end),
            None => TimeLines::first(moment.picture.length),
        };
        let first = match moment.window {
            Some(_) => 0,
            None => info.events / 2,
        };
        let mut number = 0;
        // Damage was already reported when the calls were read.
        let said = self.found.problems.len();
        self.read(round, info, time, &mut |time, event| {
            if number >= first {
                lines.add(time, event);
            }
            number += 1;
        });
        self.found.problems.truncate(said);
        lines
    }

    fn qemu(&mut self, round: &Round, info: &StreamInfo, time: &TimeBase) {
        let Some(strings) = self.strings_of(round, info) else {
            return;
        };
        let is_mutex = |name: &String| name.starts_with(MUTEX_EVENTS);
        let has_mutexes = self.strings.is_empty() && strings.iter().any(is_mutex);
        let has_steps = self.steps.is_none() && strings.iter().any(|name| !is_mutex(name));
        if !has_mutexes && !has_steps {
            return;
        }
        let mut steps = has_steps.then(|| Steps::new(&strings));
        let mut mutexes = std::mem::take(&mut self.mutexes);
        let names = MutexNames::of(&strings);
        self.read(round, info, time, &mut |time, event| {
            if let Some(steps) = &mut steps {
                steps.add(time, event);
            }
            if has_mutexes {
                mutexes.add_qemu(time, event, names);
            }
        });
        self.mutexes = mutexes;
        self.steps = steps.or(self.steps.take());
        if has_mutexes {
            self.strings = strings;
        }
    }

    fn symbols(&mut self, round: &Round, info: &StreamInfo) {
        let Some(strings) = self.strings_of(round, info) else {
            return;
        };
        let mut symbols = std::mem::take(&mut self.symbols);
        let time = TimeBase::new(&round.clocks, None, false);
        self.read(round, info, &time, &mut |_, event| {
            let [pid, address, name, ..] = event.args;
            let name = usize::try_from(name)
                .ok()
                .and_then(|name| strings.get(name));
            if let (Kind::Symbol, Ok(pid), Some(name)) = (event.kind, pid.try_into(), name) {
                symbols.insert((pid, address), name.clone());
            }
        });
        self.symbols = symbols;
    }

    fn strings_of(&mut self, round: &Round, info: &StreamInfo) -> Option<Vec<String>> {
        match round.open(self.dir, info) {
            Ok(stream) => Some(stream.header().strings.clone()),
            Err(error) => {
                self.say(round, info, &error.to_string());
                None
            }
        }
    }

    fn say(&mut self, round: &Round, info: &StreamInfo, problem: &str) {
        let line = format!("{}: {}: {problem}", round.name, info.name);
        self.found.problems.push(line);
    }

    /// Passes every event of a stream to `take`, with its time in ns.
    fn read(
        &mut self,
        round: &Round,
        info: &StreamInfo,
        time: &TimeBase,
        take: &mut dyn FnMut(i64, &Event),
    ) {
        let mut seen = 0;
        let read = round.open(self.dir, info).and_then(|mut stream| {
            read_all(&mut stream, &mut |event| {
                seen += 1;
                if let Some(ns) = time.ns(info.clock, event.time) {
                    take(ns, event);
                }
            })?;
            Ok(stream.is_cut())
        });
        match read {
            Err(error) => self.say(
                round,
                info,
                &format!("{error}; the tables of threads end after {seen} events"),
            ),
            Ok(cut) if cut || seen < info.events => {
                let wanted = info.events;
                self.say(
                    round,
                    info,
                    &format!("ends after {seen} of {wanted} events, as do the tables of threads"),
                );
            }
            Ok(_) => {}
        }
        if let Some(lost) = info.lost.filter(|&lost| lost > 0) {
            let line = format!("{lost} events were dropped: their calls and locks are missing");
            self.say(round, info, &line);
        }
    }

    fn finish(self, run: &Run) -> Threads {
        let mut found = self.found;
        let (calls, notes) = self.calls.finish(&run.threads);
        found.problems.extend(notes);
        found.calls = calls;
        let mutexes = self.mutexes.taken_at(&self.strings);
        let is_qemu = |thread: &&Thread| thread.role == Role::Vcpu;
        let qemu = run.threads.iter().find(is_qemu).map(|thread| thread.pid);
        let symbol = |pid, address| {
            let mutex = mutexes.get(&address);
            let mutex = mutex.filter(|_| pid == 0 || Some(pid) == qemu);
            lock_name(&self.symbols, mutex, pid, address)
        };
        for locks in [self.locks, self.mutexes] {
            let (rows, notes) = locks.finish(&run.threads, &self.strings, &symbol);
            found.locks.extend(rows);
            found.problems.extend(notes);
        }
        if let Some(steps) = self.steps {
            let version = run.environment.qemu.as_deref().and_then(version);
            let (steps, notes) = steps.finish(version);
            found.qemu = steps;
            found.problems.extend(notes);
        }
        found
    }
}

/// Returns the name of a futex: its symbol, and the place where QEMU takes it, if it is a QEMU
/// mutex, whose futex has the mutex's address. `pid` is 0 for a thread that the run does not list.
fn lock_name(
    symbols: &HashMap<(u32, u64), String>,
    mutex: Option<&String>,
    pid: u32,
    address: u64,
) -> Option<String> {
    let of_any = || {
        let mut names = symbols.iter().filter(|((_, at), _)| *at == address);
        let (_, name) = names.next()?;
        names.next().is_none().then_some(name)
    };
    let symbol = match pid {
        0 => of_any(),
        _ => symbols.get(&(pid, address)),
    };
    match (symbol, mutex) {
        (Some(symbol), Some(place)) => Some(format!("{symbol}, taken at {place}")),
        (Some(symbol), None) => Some(symbol.clone()),
        (None, place) => place.map(|place| format!("taken at {place}")),
    }
}

fn read_all(stream: &mut Stream, take: &mut dyn FnMut(&Event)) -> fathom_run::Result<()> {
    while let Some(event) = stream.next_event()? {
        take(&event);
    }
    Ok(())
}

fn is_hosts(clock: Clock) -> bool {
    matches!(
        clock,
        Clock::HostTsc | Clock::HostMonotonic | Clock::HostRealtime
    )
}

/// Parses major and minor from `QEMU emulator version 10.0.2 (Debian ...)`, `10.0.2` and similar.
fn version(text: &str) -> Option<Version> {
    text.split([' ', '(', ')']).find_map(|word| {
        let (major, rest) = word.split_once('.')?;
        let minor = rest.split(|c: char| !c.is_ascii_digit()).next()?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    })
}

#[cfg(test)]
mod tests;
