//! Who has a server's disks: this process, or others.

use crate::command::Ask;
use crate::error::Error;
use crate::handover::Estate;
use crate::objects::Outcome;
use crate::reply::{Asker, Shown};
use crate::stop_timeout::StopTimeout;
use fathom_control::RequestError;
use fathom_metrics::Measures;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Disks by name, of which nobody knows here why they are there.
pub trait Host: Send {
    /// Carry a command out; who asks is answered at once, or in a later [`Host::turn`]. What is said
    /// of keeping a disk is not looked at. The answer to `Put` has a member more, `created`: the disk
    /// was not there before.
    fn ask(&mut self, ask: Ask, asker: Asker);

    /// How all disks are, at once or in a later [`Host::turn`]. Without those whose processes have never replied.
    fn list(&mut self, next: Box<dyn FnOnce(Vec<Shown>) + Send>);

    /// What is counted of all disks, at once or in a later [`Host::turn`].
    fn measure_all(&mut self, asker: Box<dyn FnOnce(Measures) + Send>);

    /// One of these is readable when there is something for [`Host::turn`].
    fn events(&self) -> Vec<BorrowedFd<'_>>;

    /// How long [`Host::turn`] can wait.
    fn patience(&self) -> Option<Duration>;

    /// Go on with what has come. False: something has ended that should not.
    fn turn(&mut self) -> bool;

    /// For people: what is served, and where.
    fn describe(&self) -> Vec<String>;

    fn names(&self) -> Vec<String>;

    /// An NBD listener that authenticates nobody, as its address is written; None: there is none.
    fn open_listener(&self) -> Option<String> {
        None
    }

    fn set_stop_timeout(&mut self, timeout: StopTimeout);

    /// Let everybody go, and wait for what is in flight, if that does not take too long.
    fn stop(&mut self) -> Result<(), Error>;

    /// Where the requests spent their time, by disk; as far as it is known here.
    fn outcomes(&self) -> Vec<(String, Outcome)>;

    /// Nobody waits for an answer that another process would have to give if there were an upgrade now.
    fn is_settled(&self) -> bool {
        true
    }

    /// No longer waits for replies of other processes: each command that has none is answered by an error.
    fn give_up_commands(&mut self) {}

    /// For a successor, where there can be one.
    fn estate(&mut self) -> Result<&mut dyn Estate, RequestError>;
}
