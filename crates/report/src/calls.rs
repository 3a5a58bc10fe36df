//! The system calls of each thread, and the time in user space after each: the wiki's table of
//! the iothread and the vCPU.

mod names;

use std::collections::HashMap;

use fathom_run::{Event, Kind, Role, Thread};

use crate::analysis::{CallRow, ThreadCalls};
use crate::distribution::Tally;

pub(crate) use names::{Call, FUTEX, FUTEX_WAIT, is_futex_wait};

/// Maximum number of threads; a server has some dozens. Events of further threads are counted.
const MAX_THREADS: usize = 512;

/// Collects system calls, event by event, from a stream with all calls of its threads. The memory
/// depends only on the number of threads and of their kinds of calls.
#[derive(Debug, Default)]
pub struct Calls {
    threads: HashMap<u32, State>,
    ignored: u64,
    unpaired: u64,
}

/// The state of one thread.
#[derive(Debug, Default)]
struct State {
    rows: Vec<Row>,
    now: Place,
}

/// Where a thread is.
#[derive(Clone, Copy, Debug, Default)]
enum Place {
    /// Unknown: events are missing, or the tracing began within a call.
    #[default]
    Unknown,
    /// In a call since that time; the first field is an index of `rows`.
    Kernel(usize, i64),
    /// In user space since that time, after a call; the first field is an index of `rows`.
    User(usize, i64),
}

#[derive(Debug)]
struct Row {
    call: Call,
    time: Tally,
    post: Tally,
}

impl Calls {
    /// Creates an empty table.
    pub fn new() -> Calls {
        Calls::default()
    }

    /// Processes an event; `time` is its time in ns. Ignores events other than [`Kind::SysEnter`],
    /// [`Kind::SysExit`] and [`Kind::Lost`].
    #[inline]
    pub fn add(&mut self, time: i64, event: &Event) {
        match event.kind {
            Kind::SysEnter => {
                let call = Call::new(event.args[0], event.args[2]);
                if let Some(state) = self.state(event.tid) {
                    self.unpaired += state.enter(time, call);
                }
            }
            Kind::SysExit => {
                if let Some(state) = self.state(event.tid) {
                    self.unpaired += state.exit(time, event.args[0]);
                }
            }
            // The dropped event may belong to any thread, so the state of every thread is unknown.
            Kind::Lost => {
                let states = self.threads.values_mut();
                states.for_each(|state| state.now = Place::Unknown);
            }
            _ => {}
        }
    }

    fn state(&mut self, tid: u32) -> Option<&mut State> {
        if self.threads.len() == MAX_THREADS && !self.threads.contains_key(&tid) {
            self.ignored += 1;
            return None;
        }
        Some(self.threads.entry(tid).or_default())
    }

    /// Returns the table, with threads by role and calls by total time, and notes on it, a line
    /// each. `threads` lists the known threads.
    pub fn finish(self, threads: &[Thread]) -> (Vec<ThreadCalls>, Vec<String>) {
        let mut notes = Vec::new();
        if self.ignored > 0 {
            notes.push(format!(
                "system calls: {} events of threads beyond the first {MAX_THREADS} are left out",
                self.ignored
            ));
        }
        if self.unpaired > 0 {
            notes.push(format!(
                "system calls: {} entries or returns have no counterpart and are left out",
                self.unpaired
            ));
        }
        let tables = self.threads.into_iter();
        let mut tables: Vec<ThreadCalls> = tables
            .map(|(tid, state)| ThreadCalls {
                thread: thread_of(threads, tid),
                calls: state.finish(),
            })
            .filter(|table| !table.calls.is_empty())
            .collect();
        tables.sort_by_key(|table| order(&table.thread));
        (tables, notes)
    }
}

impl State {
    /// Returns 1 when the return of an earlier call is missing.
    fn enter(&mut self, time: i64, call: Call) -> u64 {
        let unpaired = match self.now {
            Place::User(row, since) => {
                self.rows[row].post.add(time.saturating_sub(since));
                0
            }
            Place::Kernel(..) => 1,
            Place::Unknown => 0,
        };
        self.now = Place::Kernel(self.row(call), time);
        unpaired
    }

    /// Returns 1 when the return belongs to another call than the one entered.
    fn exit(&mut self, time: i64, nr: u64) -> u64 {
        match self.now {
            Place::Kernel(row, since) if self.rows[row].call.nr() == nr => {
                self.rows[row].time.add(time.saturating_sub(since));
                self.now = Place::User(row, time);
                0
            }
            Place::Kernel(..) | Place::User(..) => {
                self.now = Place::Unknown;
                1
            }
            Place::Unknown => 0,
        }
    }

    /// Returns the row of a call. A thread makes few kinds of calls: a linear search beats hashing.
    fn row(&mut self, call: Call) -> usize {
        if let Some(row) = self.rows.iter().position(|row| row.call == call) {
            return row;
        }
        self.rows.push(Row {
            call,
            time: Tally::new(),
            post: Tally::new(),
        });
        self.rows.len() - 1
    }

    fn finish(self) -> Vec<CallRow> {
        let rows = self.rows.into_iter().filter(|row| row.time.count() > 0);
        let mut rows: Vec<CallRow> = rows
            .map(|row| CallRow {
                name: row.call.name().into_owned(),
                time: row.time.finish(),
                post: row.post.finish(),
                total: row.time.sum(),
                post_total: row.post.sum(),
            })
            .collect();
        rows.sort_by(|a, b| b.total.cmp(&a.total).then_with(|| a.name.cmp(&b.name)));
        rows
    }
}

/// Returns the thread with this ID; a thread that is not in the list has no role.
pub(crate) fn thread_of(threads: &[Thread], tid: u32) -> Thread {
    let found = threads.iter().find(|thread| thread.tid == tid);
    found.cloned().unwrap_or(Thread {
        pid: 0,
        tid,
        name: String::new(),
        role: Role::Other,
        vcpu: None,
    })
}

/// Returns the sort key for the wiki's order: the I/O thread, the vCPUs, then the rest.
pub(crate) fn order(thread: &Thread) -> (u8, u32, u32) {
    let role = match thread.role {
        Role::Io => 0,
        Role::Vcpu => 1,
        Role::Main => 2,
        Role::Pool => 3,
        Role::Other => 4,
    };
    (role, thread.vcpu.unwrap_or(0), thread.tid)
}

#[cfg(test)]
mod tests;
