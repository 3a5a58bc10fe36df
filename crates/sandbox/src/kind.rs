//! Kinds of threads and processes, with the system calls that each needs.

use crate::calls;
use crate::program::{Filter, Refused};
use libc::c_long;

/// Purpose of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// The main thread, which has only the process's filter.
    Control,
    /// Opens files by name, connects or speaks HTTP. Only calls of attackers are forbidden.
    General,
    /// Executes requests of guests and clients.
    Worker,
    /// Does blocking I/O for a worker.
    Io,
    /// Handles the vhost-user messages of a virtual machine, and maps its memory.
    Session,
    /// Accepts NBD clients.
    NbdListener,
    /// Does the handshake with an NBD client.
    NbdConnection,
    /// Serves a file by FUSE.
    Fuse,
    /// Computes for workers, in memory only.
    Helper,
    /// Writes log messages.
    Log,
    /// Sends signals to threads of this process that are stuck.
    Watch,
}

impl Kind {
    /// All kinds of threads.
    pub const ALL: [Kind; 11] = [
        Kind::Control,
        Kind::General,
        Kind::Worker,
        Kind::Io,
        Kind::Session,
        Kind::NbdListener,
        Kind::NbdConnection,
        Kind::Fuse,
        Kind::Helper,
        Kind::Log,
        Kind::Watch,
    ];

    /// Returns the thread's own filter, in addition to the process's filter.
    pub(crate) fn filter(self) -> Option<Filter> {
        Some(match self {
            Kind::Control => return None,
            Kind::General => Filter::Deny(calls::attacks().and(calls::programs())),
            Kind::Worker => Filter::Allow(calls::worker()),
            Kind::Io => Filter::Allow(calls::io()),
            Kind::Session => Filter::Allow(calls::session()),
            Kind::NbdListener => Filter::Allow(calls::nbd_listener()),
            Kind::NbdConnection => Filter::Allow(calls::nbd_connection()),
            Kind::Fuse => Filter::Allow(calls::fuse()),
            Kind::Helper => Filter::Allow(calls::common()),
            Kind::Log => Filter::Allow(calls::log()),
            Kind::Watch => Filter::Allow(calls::common()),
        })
    }

    /// Returns the calls that fail with an error instead of ending the process.
    pub(crate) fn refused(self) -> Vec<Refused> {
        // glibc then creates threads by clone(2), whose flags a filter can see.
        let mut refused = vec![Refused(libc::SYS_clone3, libc::ENOSYS)];
        if self == Kind::Worker {
            // The worker's io_uring instance already exists. A new one would have no restrictions,
            // and a larger one is not necessary.
            refused.push(Refused(libc::SYS_io_uring_setup, libc::EPERM));
        }
        if self.knows_no_names() {
            // glibc's malloc opens files in /proc and /sys for system settings, and works without
            // them.
            refused.push(Refused(libc::SYS_openat, libc::EACCES));
        }
        refused
    }

    /// Returns whether the thread opens nothing by name, binds no address and makes no connection.
    ///
    /// No path and no port is accessible to such a thread, by any system call or io_uring request.
    pub(crate) fn knows_no_names(self) -> bool {
        matches!(
            self,
            Kind::Worker | Kind::Io | Kind::Helper | Kind::Log | Kind::Watch
        )
    }

    /// Returns whether the thread needs no capabilities.
    pub(crate) fn needs_no_privileges(self) -> bool {
        self.knows_no_names()
    }
}

/// Kind of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Process {
    /// Opens files on demand, and serves API clients.
    Server,
    /// Has its resources at the start, or receives them over sockets.
    Tenant,
    /// A tenant that makes connections itself.
    ConnectingTenant,
}

impl Process {
    /// Returns the filter of the whole process, including its main thread.
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

/// The most frequent calls of the data plane, in descending order of frequency.
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
