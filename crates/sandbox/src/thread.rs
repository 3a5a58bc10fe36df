//! Sandboxes one thread.

use crate::kind::{HOT, Kind};
use crate::program::compile;
use crate::{Mode, privileges};
use seccompiler::BpfProgram;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// Filters and ruleset of all kinds of threads. The filters are compiled once, so that a new thread
/// allocates nothing for its sandbox.
pub(crate) struct Cages {
    mode: Mode,
    filters: BTreeMap<Kind, BpfProgram>,
    /// A Landlock ruleset that allows nothing. `None` if the kernel has no Landlock.
    nowhere: Option<OwnedFd>,
}

impl Cages {
    pub(crate) fn new(mode: Mode, nowhere: Option<OwnedFd>) -> Result<Cages, String> {
        let mut filters = BTreeMap::new();
        for kind in Kind::ALL {
            if let Some(filter) = kind.filter() {
                filters.insert(kind, compile(filter, &kind.refused(), &HOT, mode)?);
            }
        }
        Ok(Cages {
            mode,
            filters,
            nowhere,
        })
    }

    /// Sandboxes this thread. Steps that its filter forbids come first.
    pub(crate) fn enter(&self, kind: Kind) -> io::Result<()> {
        if self.mode == Mode::On {
            if kind.needs_no_privileges() {
                privileges::drop_of_thread()?;
            }
            if let Some(nowhere) = self.nowhere.as_ref().filter(|_| kind.knows_no_names()) {
                restrict_to(nowhere)?;
            }
        }
        match self.filters.get(&kind) {
            Some(filter) => seccompiler::apply_filter(filter).map_err(other),
            None => Ok(()),
        }
    }
}

pub(crate) fn other(error: seccompiler::Error) -> io::Error {
    match error {
        seccompiler::Error::Prctl(error) | seccompiler::Error::Seccomp(error) => error,
        error => io::Error::other(error.to_string()),
    }
}

fn restrict_to(ruleset: &OwnedFd) -> io::Result<()> {
    privileges::no_new()?;
    let ruleset = ruleset.as_raw_fd();
    // SAFETY: the call uses no memory.
    match unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
