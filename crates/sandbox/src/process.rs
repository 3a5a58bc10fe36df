//! Sandboxes a process and its threads.

use crate::kind::{HOT, Kind, Process};
use crate::paths::{self, Allowed};
use crate::program::compile;
use crate::report::Report;
use crate::thread::{Cages, other};
use crate::{Mode, privileges};
use libc::{gid_t, uid_t};
use parking_lot::Mutex;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Filters of threads; empty while the process has no sandbox.
static CAGES: OnceLock<Cages> = OnceLock::new();
static REPORT: Mutex<Option<Report>> = Mutex::new(None);
/// Number of threads that could not enter their sandbox, and the last error.
static OUTSIDE: AtomicUsize = AtomicUsize::new(0);
static WHY: Mutex<Option<String>> = Mutex::new(None);

/// Sandboxes a server that opens files on demand. The main thread must call this function.
///
/// Other threads that already run get the process's filter, and may enter their own filters later.
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

/// A process that has all its resources, or receives them over its sockets.
#[derive(Default)]
pub struct Tenant {
    /// Strictness of the sandbox.
    pub mode: Mode,
    /// User and group that the process changes to, in any mode. `None` keeps the current user.
    pub user: Option<(uid_t, gid_t)>,
    /// Whether the process makes connections itself, and so stays in its network namespace.
    pub connects: bool,
    /// Files and directories that the process may open by name.
    pub allowed: Vec<Allowed>,
    /// Limit of mapped memory in bytes (RLIMIT_AS), guest memory included. `None` sets no limit.
    pub address_space: Option<u64>,
}

impl Tenant {
    /// Sandboxes this process, once.
    ///
    /// The caller must be the only thread, and must have opened everything that is not in
    /// `allowed`.
    ///
    /// # Errors
    /// After an error the process must not continue. Features that the kernel lacks are no error;
    /// the report names them.
    pub fn lock_up(self) -> io::Result<Report> {
        let mode = self.mode;
        let mut report = Report::new(mode);
        if mode == Mode::On && !self.connects {
            // Leaving the network namespace requires a privilege, so it comes first.
            let network = leave_network();
            let what = "a network of its own, without any device";
            report.add_outcome("network", what, network);
        }
        let process = match self.connects {
            true => Process::ConnectingTenant,
            false => Process::Tenant,
        };
        match self.user {
            // The user changes in every mode.
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

/// Installs the process's filter, and prepares the filters of its threads.
fn filter(process: Process, mode: Mode, report: &mut Report) {
    // The Landlock ruleset comes first, because the filter forbids its system calls.
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

/// Returns the Landlock ruleset for threads that open nothing by name. `None` if the sandbox is not
/// on, or Landlock is unavailable.
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

/// Sandboxes this thread, once, when it starts. Does nothing in a process without a sandbox.
///
/// If this fails, the thread continues under the process's filter, and [`report`] counts this
/// thread as unfiltered.
pub fn enter(kind: Kind) {
    let Some(cages) = CAGES.get() else {
        return;
    };
    if let Err(error) = cages.enter(kind) {
        OUTSIDE.fetch_add(1, Ordering::Relaxed);
        *WHY.lock() = Some(format!("{kind:?}: {error}"));
    }
}

/// Returns the parts of the sandbox that are in force now. `None` if no sandbox was requested.
pub fn report() -> Option<Report> {
    let mut report = REPORT.lock().clone()?;
    let outside = OUTSIDE.load(Ordering::Relaxed);
    if outside > 0 {
        report
            .parts
            .retain(|part| part.name != "system calls of threads");
        let why = WHY.lock().clone();
        let why = why.unwrap_or_default();
        report.missing(
            "system calls of threads",
            format_args!("{outside} threads have none: {why}"),
        );
    }
    Some(report)
}

fn keep(report: Report) -> Report {
    *REPORT.lock() = Some(report.clone());
    report
}

/// Changes the user permanently, without the capabilities of the old user.
fn change_user(uid: uid_t, gid: gid_t) -> io::Result<()> {
    if !privileges::is_user(uid, gid) {
        // After the change, the process could no longer drop the bounding set.
        privileges::drop_bounding_set_if_possible()?;
        privileges::become_user(uid, gid)?;
    }
    privileges::no_new()?;
    if !privileges::is_user(uid, gid) {
        return Err(io::Error::other("the user has not changed"));
    }
    // /proc/self would belong to root, so that the process could not reopen its files through it.
    privileges::stay_dumpable()
}

/// Moves the process to a network namespace without devices, in case it creates a socket after
/// all.
fn leave_network() -> io::Result<()> {
    // SAFETY: the call uses no memory.
    match unsafe { libc::unshare(libc::CLONE_NEWNET) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Limits core dumps to anonymous private memory and ELF headers, see core(5).
fn without_shared_memory() -> io::Result<()> {
    std::fs::write("/proc/self/coredump_filter", "0x31")
}

/// Limits the bytes of memory that the process can map.
fn limit_addresses(to: u64) -> io::Result<()> {
    let limit = libc::rlimit {
        rlim_cur: to,
        rlim_max: to,
    };
    // SAFETY: the call reads one rlimit.
    match unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
