//! The host of a server's disks: this process, or the processes of tenants.

use crate::error::Error;
use crate::handover::HandoverHost;
use crate::outcome::Outcome;
use crate::stop_timeout::StopTimeout;
use fathom_control::RequestError;
use fathom_metrics::Measures;
use fathom_requests::{Ask, Responder, Shown};
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// The owner of disks that are served. The controller knows their definitions, the host does not.
pub trait Host: Send {
    /// Carries a command out. The reply comes at once, or in a later [`Host::turn`].
    fn ask(&mut self, ask: Ask, responder: Responder);

    /// Shows all disks, at once or in a later [`Host::turn`]. Disks whose processes have never
    /// replied are left out.
    fn list(&mut self, next: Box<dyn FnOnce(Vec<Shown>) + Send>);

    /// Returns the measurements of all disks, at once or in a later [`Host::turn`].
    fn measure_all(&mut self, responder: Box<dyn FnOnce(Measures) + Send>);

    /// File descriptors, one of which is readable when [`Host::turn`] has work to do.
    fn events(&self) -> Vec<BorrowedFd<'_>>;

    /// Time after which [`Host::turn`] must be called in any case.
    fn patience(&self) -> Option<Duration>;

    /// Handles events. False: a thread that serves clients has ended, which is an error.
    fn turn(&mut self) -> bool;

    /// Lines for the log: the disks, and where clients connect.
    fn describe(&self) -> Vec<String>;

    /// Returns the names of all disks.
    fn names(&self) -> Vec<String>;

    /// Address of an NBD listener that authenticates no client. None: there is no such listener.
    fn open_listener(&self) -> Option<String> {
        None
    }

    /// Sets the timeout of a later [`Host::stop`].
    fn set_stop_timeout(&mut self, timeout: StopTimeout);

    /// Disconnects front-ends and clients, and waits for requests in flight, with a timeout.
    fn stop(&mut self) -> Result<(), Error>;

    /// Statistics of each disk, as far as they are known in this process.
    fn outcomes(&self) -> Vec<(String, Outcome)>;

    /// Whether no reply of another process is outstanding, so that an upgrade is possible.
    fn is_settled(&self) -> bool {
        true
    }

    /// Answers each command whose reply is outstanding by an error.
    fn give_up_commands(&mut self) {}

    /// Returns the host as a [`HandoverHost`], or an error if its disks cannot be handed over.
    fn handover_host(&mut self) -> Result<&mut dyn HandoverHost, RequestError>;
}
