//! Kinds of thread, and what each has need of.

use crate::calls;
use crate::program::{Filter, Refused};
use libc::c_long;

/// What a thread is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// The main thread: it has the process's own filter and nothing more.
    Control,
    /// Others that open files, know names, speak HTTP: everything but what is an attack.
    General,
    /// Requests of guests and clients.
    Worker,
    /// Blocking I/O for a worker.
    Io,
    /// A virtual machine's messages, and its memory.
    Session,
    /// Accepts NBD clients.
    NbdListener,
    /// An NBD client's handshake.
    NbdConnection,
    /// Computes for workers, with memory only.
    Helper,
    /// Writes what is logged.
    Log,
    /// Sends signals to other threads here, if they are stuck.
    Watch,
}

impl Kind {
    pub const ALL: [Kind; 10] = [
        Kind::Control,
        Kind::General,
        Kind::Worker,
        Kind::Io,
        Kind::Session,
        Kind::NbdListener,
        Kind::NbdConnection,
        Kind::Helper,
        Kind::Log,
        Kind::Watch,
    ];

    /// Its own filter, beside the process's.
    pub(crate) fn filter(self) -> Option<Filter> {
        Some(match self {
            Kind::Control => return None,
            Kind::General => Filter::Deny(calls::attacks().and(calls::programs())),
            Kind::Worker => Filter::Allow(calls::worker()),
            Kind::Io => Filter::Allow(calls::io()),
            Kind::Session => Filter::Allow(calls::session()),
            Kind::NbdListener => Filter::Allow(calls::nbd_listener()),
            Kind::NbdConnection => Filter::Allow(calls::nbd_connection()),
            Kind::Helper => Filter::Allow(calls::common()),
            Kind::Log => Filter::Allow(calls::log()),
            Kind::Watch => Filter::Allow(calls::common()),
        })
    }

    /// What is answered rather than punished.
    pub(crate) fn refused(self) -> Vec<Refused> {
        // glibc makes threads by clone(2) then, whose flags a filter can see.
        let mut refused = vec![Refused(libc::SYS_clone3, libc::ENOSYS)];
        if self == Kind::Worker {
            // Its ring is there already. A new one would be without restrictions, and a larger one is
            // no necessity.
            refused.push(Refused(libc::SYS_io_uring_setup, libc::EPERM));
        }
        if self.knows_no_names() {
            // glibc's malloc asks /proc and /sys for the system's settings, and does without.
            refused.push(Refused(libc::SYS_openat, libc::EACCES));
        }
        refused
    }

    /// Whether nothing is opened by name, no address is bound and none connected to: then no path and
    /// no port is within reach, by whatever system call, a ring's requests included.
    pub(crate) fn knows_no_names(self) -> bool {
        matches!(
            self,
            Kind::Worker | Kind::Io | Kind::Helper | Kind::Log | Kind::Watch
        )
    }

    /// Whether it has no use for privileges.
    pub(crate) fn needs_no_privileges(self) -> bool {
        self.knows_no_names()
    }
}

/// What the process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Process {
    /// Opens files on demand, and has clients of its API.
    Server,
    /// Has what it needs, or is sent it.
    Tenant,
    /// Likewise, but makes connections itself.
    ConnectingTenant,
}

impl Process {
    /// Of the whole process, its main thread included.
    pub(crate) fn filter(self) -> Filter {
        match self {
            Process::Server => Filter::Deny(calls::attacks()),
            Process::Tenant => Filter::Allow(calls::tenant()),
            Process::ConnectingTenant => Filter::Allow(calls::tenant().and(calls::network())),
        }
    }

    pub(crate) fn refused(self) -> Vec<Refused> {
        vec![Refused(libc::SYS_clone3, libc::ENOSYS)]
    }
}

/// The most frequent calls of the data plane, the most frequent first.
pub(crate) const HOT: [c_long; 8] = [
    libc::SYS_io_uring_enter,
    libc::SYS_write,
    libc::SYS_read,
    libc::SYS_futex,
    libc::SYS_io_submit,
    libc::SYS_io_getevents,
    libc::SYS_ppoll,
    libc::SYS_epoll_pwait2,
];
