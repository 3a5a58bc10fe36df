//! A process's cage, and its threads'.

use crate::kind::{HOT, Kind, Process};
use crate::paths::{self, Allowed};
use crate::program::compile;
use crate::report::Report;
use crate::thread::{Cages, other};
use crate::{Mode, privileges};
use libc::{gid_t, uid_t};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

/// What threads enter; empty as long as the process has no cage.
static CAGES: OnceLock<Cages> = OnceLock::new();
static REPORT: Mutex<Option<Report>> = Mutex::new(None);
/// Threads that could not enter theirs, and the last reason.
static OUTSIDE: AtomicUsize = AtomicUsize::new(0);
static WHY: Mutex<Option<String>> = Mutex::new(None);

/// Cage a server that opens files on demand, by its main thread. The other threads that there are
/// get the process's filter, and enter their own when they like.
pub fn cage_server(mode: Mode) -> Report {
    let mut report = Report::new(mode);
    if mode != Mode::Off {
        report.add_outcome(
            "no new privileges",
            "no program that is started gets more rights",
            privileges::no_new(),
        );
        report.add_outcome(
            "dumps",
            "core files are without memory that is shared with guests",
            without_shared_memory(),
        );
        filter(Process::Server, mode, &mut report);
    }
    keep(report)
}

/// A process that has what it needs, or is sent it by sockets that it has.
#[derive(Default)]
pub struct Tenant {
    pub mode: Mode,
    /// Who it becomes, in any mode; None: it stays who it is.
    pub user: Option<(uid_t, gid_t)>,
    /// It makes connections itself: it stays in the network that it is in.
    pub connects: bool,
    /// All that it may open by name.
    pub allowed: Vec<Allowed>,
    /// Bytes that it may have mapped (RLIMIT_AS), guest memory included; None: any.
    pub address_space: Option<u64>,
}

impl Tenant {
    /// Call it once, on the only thread, with everything open that is not `allowed`. An error: the
    /// process must not go on. Parts that the kernel lacks are no error: the report tells them.
    pub fn lock_up(self) -> io::Result<Report> {
        let mode = self.mode;
        let mut report = Report::new(mode);
        if mode == Mode::On && !self.connects {
            // It is itself a privilege.
            let network = leave_network();
            let what = "a network of its own, without any device";
            report.add_outcome("network", what, network);
        }
        let process = match self.connects {
            true => Process::ConnectingTenant,
            false => Process::Tenant,
        };
        match self.user {
            // Whatever the mode is.
            Some((uid, gid)) => {
                change_user(uid, gid)?;
                report.in_force("user", format!("{uid}, of the group {gid} alone"));
            }
            None if mode == Mode::On => report.missing("user", "none was given"),
            None => {}
        }
        if mode == Mode::On {
            self.restrict(&mut report)?;
        }
        if mode != Mode::Off {
            privileges::no_new()?;
            report.in_force("no new privileges", "no program gets more rights");
            filter(process, mode, &mut report);
        }
        Ok(keep(report))
    }

    fn restrict(self, report: &mut Report) -> io::Result<()> {
        privileges::drop_all()?;
        report.in_force("capabilities", "none, and none to be had");
        report.add_outcome("dumps", "without shared memory", without_shared_memory());
        if let Some(bytes) = self.address_space {
            limit_addresses(bytes)?;
            report.in_force("memory", format!("{bytes} bytes of addresses"));
        }
        privileges::no_new()?;
        paths::restrict_to(self.allowed, self.connects, report).map_err(io::Error::other)
    }
}

/// The process's filter, and the cages of its threads.
fn filter(process: Process, mode: Mode, report: &mut Report) {
    // What only the filter's absence allows comes first.
    let nowhere = nowhere(mode, report);
    let filtered = filter_process(process, mode);
    let is_filtered = filtered.is_ok();
    let what = match mode {
        Mode::Log => "logs system calls that the process has no need of",
        _ => "ends the process that makes a system call it has no need of",
    };
    report.add_outcome("system calls", what, filtered);
    if !is_filtered {
        return report.missing("system calls of threads", "nor are these");
    }
    match Cages::new(mode, nowhere) {
        Ok(cages) => {
            let _ = CAGES.set(cages);
            report.in_force("system calls of threads", "each thread has its own");
        }
        Err(error) => report.missing("system calls of threads", error),
    }
}

fn filter_process(process: Process, mode: Mode) -> Result<(), String> {
    let program = compile(process.filter(), &process.refused(), &HOT, mode)?;
    let applied = seccompiler::apply_filter_all_threads(&program);
    applied.map_err(|error| match other(error).raw_os_error() {
        Some(libc::EINVAL | libc::ENOSYS) => "this kernel has no filters of system calls".into(),
        Some(errno) => io::Error::from_raw_os_error(errno).to_string(),
        None => "a thread has other filters".into(),
    })
}

/// The ruleset of threads that know no names; None: they do without.
fn nowhere(mode: Mode, report: &mut Report) -> Option<OwnedFd> {
    if mode != Mode::On {
        return None;
    }
    let made = paths::version().map_err(str::to_owned);
    let made = made.and_then(|_| paths::nowhere().map_err(|error| error.to_string()));
    match made {
        Ok(nowhere) => {
            report.in_force("paths of threads", "the data plane opens nothing by name");
            nowhere
        }
        Err(why) => {
            report.missing("paths of threads", why);
            None
        }
    }
}

/// Shut this thread in; once, at its start. It does nothing in a process without a cage. A thread
/// that cannot be shut in goes on under the process's filter, and the report tells of it.
pub fn enter(kind: Kind) {
    let Some(cages) = CAGES.get() else {
        return;
    };
    if let Err(error) = cages.enter(kind) {
        OUTSIDE.fetch_add(1, Ordering::Relaxed);
        *WHY.lock().unwrap_or_else(|e| e.into_inner()) = Some(format!("{kind:?}: {error}"));
    }
}

/// What is in force now; None: nobody has asked for a cage.
pub fn report() -> Option<Report> {
    let mut report = REPORT.lock().unwrap_or_else(|e| e.into_inner()).clone()?;
    let outside = OUTSIDE.load(Ordering::Relaxed);
    if outside > 0 {
        report
            .parts
            .retain(|part| part.name != "system calls of threads");
        let why = WHY.lock().unwrap_or_else(|e| e.into_inner()).clone();
        let why = why.unwrap_or_default();
        report.missing(
            "system calls of threads",
            format_args!("{outside} threads have none: {why}"),
        );
    }
    Some(report)
}

fn keep(report: Report) -> Report {
    *REPORT.lock().unwrap_or_else(|e| e.into_inner()) = Some(report.clone());
    report
}

/// Without a way back, and without the capabilities that the old one had.
fn change_user(uid: uid_t, gid: gid_t) -> io::Result<()> {
    if !privileges::is_user(uid, gid) {
        // Who has become another could not lower the bounding set any more.
        privileges::drop_bounding_set_if_possible()?;
        privileges::become_user(uid, gid)?;
    }
    privileges::no_new()?;
    if !privileges::is_user(uid, gid) {
        return Err(io::Error::other("the user has not changed"));
    }
    // Another user's process is not its own: it could not open its files once more by /proc.
    privileges::stay_dumpable()
}

/// A network namespace without devices, for whoever makes a socket nevertheless.
fn leave_network() -> io::Result<()> {
    // SAFETY: no memory.
    match unsafe { libc::unshare(libc::CLONE_NEWNET) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// See core(5): anonymous private memory and ELF headers, and no more.
fn without_shared_memory() -> io::Result<()> {
    std::fs::write("/proc/self/coredump_filter", "0x31")
}

/// Bytes that it may have mapped.
fn limit_addresses(to: u64) -> io::Result<()> {
    let limit = libc::rlimit {
        rlim_cur: to,
        rlim_max: to,
    };
    // SAFETY: a structure to read.
    match unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
