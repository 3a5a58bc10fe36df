//! What goes from one process to another.

use super::state::{DiskState, Progress, State};
use fathom_core::Legacy;
use fathom_exports::nbd::ClientState;
use fathom_exports::vhost_user::Frozen;
use fathom_exports::{Bound, Descriptors};
use fathom_metrics::DiskCounts;
use std::time::Instant;

/// What a successor gets. Exports stand still until theirs are dropped.
pub struct Given {
    /// Without the disks.
    pub state: State,
    /// Those of `state`.
    pub files: Descriptors,
    pub disks: Vec<GivenDisk>,
}

pub struct GivenDisk {
    /// Without its export.
    pub state: DiskState,
    pub export: Option<Frozen>,
    /// By its parts.
    pub lent: Legacy,
}

/// Disks that can go to another process.
pub trait Estate {
    /// Refuses what cannot be handed over, before anything is changed; one line for the user.
    fn may_be_handed_over(&self) -> Result<(), String>;

    /// Whether NBD clients by TLS, which cannot go along, end with this process; otherwise nothing goes
    /// while there are some.
    fn let_encrypted_end(&mut self, end: bool);

    /// What there is, from now on as it is; [`Estate::take_back`] ends that.
    fn give(&self) -> Result<Given, String>;

    /// So that less has to be written while guests wait.
    fn flush_early(&self);

    /// NBD clients wait from now on, have nothing in flight and use no disk; or not all of them by then.
    fn hold_clients(&self, deadline: Instant) -> Result<(Vec<ClientState>, Descriptors), String>;

    /// Nothing is in flight any more: what the parts of each disk leave.
    fn leave(&self) -> Result<Vec<Legacy>, String> {
        Ok(Vec::new())
    }

    /// The parts of each disk go on from there.
    fn take_left(&mut self, _left: Vec<Legacy>) -> Result<(), String> {
        Ok(())
    }

    /// A successor goes on with everything: what is still to be done, until then.
    fn end(&self, _deadline: Instant) {}

    /// A predecessor's wait here; it has let go of the disks.
    fn adopt_clients(
        &self,
        clients: Vec<ClientState>,
        files: &mut Descriptors,
    ) -> Result<(), String>;

    /// Nobody goes on with it: serve NBD clients again.
    fn take_back(&self);

    fn counts(&self) -> Vec<DiskCounts>;

    /// Count on from there.
    fn inherit(&mut self, counts: &[DiskCounts]);

    /// All is this process's from now on, NBD's sockets included.
    fn own(&mut self, bounds: Vec<Bound>);

    /// Other processes that have the disks are to become such of this program; each is told of, and
    /// the end. Does not wait for it.
    fn renew(&mut self, tell: Box<dyn FnMut(Progress) + Send>);
}
