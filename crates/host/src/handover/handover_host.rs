//! Interface of a host whose disks can be handed over to another process.

use super::state::{DiskState, Progress, State};
use fathom_core::HandoverState;
use fathom_exports::nbd::ClientState;
use fathom_exports::vhost_user::Frozen;
use fathom_metrics::DiskCounts;
use fathom_sockets::{Bound, Descriptors};
use std::time::Instant;

/// The state that a successor gets. Exports are stopped until this value is dropped.
pub struct Given {
    /// The state of the server, without the disks.
    pub state: State,
    /// The files of `state`.
    pub files: Descriptors,
    /// The disks, in the order in which the successor gets them. Empty if tenants have the disks.
    pub disks: Vec<GivenDisk>,
}

/// The state of one disk that the successor gets.
pub struct GivenDisk {
    /// The state of the disk, without its export.
    pub state: DiskState,
    /// The frozen export for a front-end. `None`: the disk has no such export.
    pub export: Option<Frozen>,
    /// State that the parts of the disk pass while requests continue.
    pub lent: HandoverState,
}

/// A host whose disks can be handed over to another process.
pub trait HandoverHost {
    /// Checks whether all disks can be handed over, without any change. The error is one line for
    /// the user.
    fn may_be_handed_over(&self) -> Result<(), String>;

    /// Sets whether the connections of NBD clients with TLS end, because they cannot be handed
    /// over. Otherwise such a connection prevents the handover.
    fn let_encrypted_end(&mut self, end: bool);

    /// Returns the state of all disks, which do not change from now on, until
    /// [`HandoverHost::take_back`].
    fn give(&self) -> Result<Given, String>;

    /// Flushes the disks, so that less remains to be written while guests wait.
    fn flush_early(&self);

    /// Stops NBD clients: they have no requests in flight and use no disk. Fails if that takes
    /// longer than the deadline.
    fn hold_clients(&self, deadline: Instant) -> Result<(Vec<ClientState>, Descriptors), String>;

    /// Returns the state that the parts of each disk leave, when no requests are in flight.
    fn final_states(&self) -> Result<Vec<HandoverState>, String> {
        Ok(Vec::new())
    }

    /// Gives the parts of each disk the state that the predecessor's parts have left.
    fn restore(&mut self, _left: Vec<HandoverState>) -> Result<(), String> {
        Ok(())
    }

    /// Does the remaining work of disks that a successor serves, until the deadline.
    fn end(&self, _deadline: Instant) {}

    /// Takes over the predecessor's stopped NBD clients. The predecessor has released the disks.
    fn adopt_clients(
        &self,
        clients: Vec<ClientState>,
        files: &mut Descriptors,
    ) -> Result<(), String>;

    /// Serves NBD clients again, after a failed handover.
    fn take_back(&self);

    /// Returns the final counters of each disk, in the order of the disks.
    fn counts(&self) -> Vec<DiskCounts>;

    /// Continues the predecessor's counters.
    fn continue_counts(&mut self, counts: &[DiskCounts]);

    /// Takes ownership of everything, including the NBD sockets.
    fn own(&mut self, bounds: Vec<Bound>);

    /// Begins to replace the processes of tenants by processes of this program. Calls `tell` for
    /// each tenant, and at the end.
    fn renew(&mut self, tell: Box<dyn FnMut(Progress) + Send>);
}
