//! Times of the watched processes' threads. A thread that starts within the window is counted from
//! its start. A thread that ends within the window is counted until it was last seen.

use std::collections::BTreeMap;
use std::fs;

use fathom_run::Thread;
use fathom_run::evidence::{ThreadRole, ThreadTime};

use super::schedstat::{self, Times};
use super::{Kind, Watched};
use crate::attach::{server_threads, threads_of};

/// Maximum number of threads of all processes together, over the window.
const MAX_THREADS: usize = 4096;
/// CPU time up to which a thread's name is read again, in nanoseconds. A thread sets its name
/// shortly after its start.
const YOUNG_NS: u64 = 1_000_000;
/// Prefix of the name of an io_uring thread that polls for submissions (IORING_SETUP_SQPOLL).
const SQPOLL: &str = "iou-sqp-";

/// The threads that were seen so far.
pub struct Threads {
    watched: Vec<Watched>,
    seen: BTreeMap<(u32, u32), Seen>,
    is_first: bool,
}

struct Seen {
    thread: Thread,
    role: ThreadRole,
    polls: bool,
    /// Times at the window's begin, or at the thread's start if the thread started later.
    begin: Times,
    last: Times,
    /// Times of earlier threads with the same id.
    before: Times,
    /// The thread's time on a CPU when its name was last read.
    named_ns: u64,
}

impl Threads {
    pub fn new(watched: Vec<Watched>) -> Threads {
        Threads {
            watched,
            seen: BTreeMap::new(),
            is_first: true,
        }
    }

    /// Adds a process that has started since the window's begin.
    pub fn watch(&mut self, process: Watched) {
        self.watched.push(process);
    }

    /// Reads the times of all threads. The first call begins the window.
    pub fn look(&mut self) {
        for index in 0..self.watched.len() {
            let watched = self.watched[index].clone();
            let found = tasks(watched.pid);
            let is_new = |tid: &u32| !self.seen.contains_key(&(watched.pid, *tid));
            if found.iter().any(is_new) {
                self.meet(&watched);
            }
            let mut has_unnamed = false;
            for tid in found {
                let task = format!("/proc/{}/task/{tid}", watched.pid);
                if let Some(seen) = self.seen.get_mut(&(watched.pid, tid))
                    && let Some(times) = schedstat::read(&task)
                {
                    seen.goes_on(times);
                    has_unnamed |= seen.may_have_new_name();
                }
            }
            if has_unnamed {
                self.rename(&watched);
            }
        }
        self.is_first = false;
    }

    /// Reads the names and roles of a process's new threads.
    fn meet(&mut self, watched: &Watched) {
        let threads = match watched.kind {
            Kind::Qemu => threads_of(watched.pid),
            Kind::Server | Kind::Load => server_threads(watched.pid),
        };
        for thread in threads {
            let key = (thread.pid, thread.tid);
            if self.seen.len() >= MAX_THREADS || self.seen.contains_key(&key) {
                continue;
            }
            let role = match watched.kind {
                Kind::Load => ThreadRole::Load,
                _ => ThreadRole::from(thread.role),
            };
            let task = format!("/proc/{}/task/{}", thread.pid, thread.tid);
            let now = schedstat::read(&task).unwrap_or_default();
            let begin = match self.is_first {
                true => now,
                false => now.zero(),
            };
            let seen = Seen {
                polls: thread.name.starts_with(SQPOLL) || watched.polls && role == ThreadRole::Io,
                thread,
                role,
                begin,
                last: now,
                before: now.zero(),
                named_ns: 0,
            };
            self.seen.insert(key, seen);
        }
    }

    /// Returns the threads that serve the disks: those of the servers, or QEMU's if there is no
    /// server.
    pub fn serving(&self) -> impl Iterator<Item = u32> {
        let servers = self.watched.iter().filter(|one| one.kind == Kind::Server);
        let servers: Vec<u32> = servers.map(|one| one.pid).collect();
        let serves = move |one: &&Seen| match one.role {
            ThreadRole::Load | ThreadRole::Vcpu => false,
            _ => servers.is_empty() || servers.contains(&one.thread.pid),
        };
        { self.seen.values() }
            .filter(serves)
            .map(|one| one.thread.tid)
    }

    /// Returns the guest's vCPU threads.
    pub fn vcpus(&self) -> impl Iterator<Item = u32> {
        let all = self.seen.values();
        all.filter(|one| one.role == ThreadRole::Vcpu)
            .map(|one| one.thread.tid)
    }

    /// Returns the CPU seconds of all I/O threads and workers since the window's begin, or `None`
    /// if no such thread was seen.
    pub fn workers(&self) -> Option<f64> {
        let workers = self.seen.values().filter(|one| one.role == ThreadRole::Io);
        workers
            .map(|one| one.spent().cpu_ns as f64 / 1e9)
            .reduce(|sum, one| sum + one)
    }

    /// Returns every thread's times in the window, up to the last [`look`](Self::look).
    pub fn times(&mut self) -> Vec<ThreadTime> {
        for watched in self.watched.clone() {
            self.rename(&watched);
        }
        let time = |seen: &Seen| {
            let spent = seen.spent();
            ThreadTime {
                pid: seen.thread.pid,
                tid: seen.thread.tid,
                name: seen.thread.name.clone(),
                role: seen.role,
                vcpu: seen.thread.vcpu,
                cpu: spent.cpu_ns as f64 / 1e9,
                waiting: spent.waiting_ns.map(|ns| ns as f64 / 1e9),
                polls: seen.polls,
                polled: None,
            }
        };
        self.seen.values().map(time).collect()
    }

    /// Reads the names and roles of a process's threads again.
    fn rename(&mut self, watched: &Watched) {
        let mut before = std::mem::take(&mut self.seen);
        self.meet(watched);
        for (key, met) in &self.seen {
            if let Some(seen) = before.get_mut(key) {
                (seen.role, seen.polls) = (met.role, met.polls);
                seen.thread = met.thread.clone();
                seen.named_ns = seen.last.cpu_ns;
            }
        }
        self.seen = before;
    }
}

impl Seen {
    /// Whether the thread may have given itself a name since the name was last read.
    fn may_have_new_name(&self) -> bool {
        self.named_ns < YOUNG_NS && self.last.cpu_ns > self.named_ns
    }

    fn goes_on(&mut self, now: Times) {
        if now.cpu_ns < self.last.cpu_ns {
            // The thread id now belongs to a new thread.
            self.before = self.spent();
            self.begin = now.zero();
        }
        self.last = now;
    }

    fn spent(&self) -> Times {
        let since =
            |last: u64, begin: u64, before: u64| last.saturating_sub(begin).saturating_add(before);
        let (last, begin, before) = (self.last, self.begin, self.before);
        // A thread that has not run yet has no counter of waiting time.
        let waiting = last.waiting_ns.map(|last| {
            let (begin, before) = (begin.waiting_ns, before.waiting_ns);
            since(last, begin.unwrap_or(0), before.unwrap_or(0))
        });
        Times {
            cpu_ns: since(last.cpu_ns, begin.cpu_ns, before.cpu_ns),
            waiting_ns: waiting,
        }
    }
}

impl Times {
    /// Returns the times of such a thread at its start.
    fn zero(self) -> Times {
        Times {
            cpu_ns: 0,
            waiting_ns: self.waiting_ns.map(|_| 0),
        }
    }
}

/// Returns the ids of a process's threads.
pub fn tasks(pid: u32) -> Vec<u32> {
    let entries = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten();
    let numbers = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.take(MAX_THREADS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(cpu_ns: u64, waiting_ns: u64) -> Times {
        Times {
            cpu_ns,
            waiting_ns: Some(waiting_ns),
        }
    }

    #[test]
    fn a_number_that_is_used_again_is_another_thread() {
        let mut seen = Seen {
            thread: Thread {
                pid: 1,
                tid: 2,
                name: "worker 0".into(),
                role: fathom_run::Role::Io,
                vcpu: None,
            },
            role: ThreadRole::Io,
            polls: false,
            begin: times(1000, 10),
            last: times(1000, 10),
            before: times(0, 0),
            named_ns: 1000,
        };
        seen.goes_on(times(1500, 30));
        assert_eq!(seen.spent(), times(500, 20));
        seen.goes_on(times(200, 5));
        assert_eq!(seen.spent(), times(700, 25));
        seen.goes_on(times(300, 5));
        assert_eq!(seen.spent(), times(800, 25));
    }

    #[test]
    fn processes_that_are_not_there_have_no_threads() {
        let mut threads = Threads::new(vec![Watched::new(u32::MAX, Kind::Server)]);
        threads.look();
        assert_eq!(threads.times(), []);
        assert_eq!(threads.workers(), None);
    }
}
