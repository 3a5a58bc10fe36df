//! What goes from one process to another.

use super::state::{DiskCounts, DiskState, State};
use fathom_exports::vhost_user::Frozen;
use fathom_exports::{Bound, Descriptors};

/// What a successor gets. Exports stand still until theirs are dropped.
pub struct Given {
    /// Without the disks.
    pub state: State,
    /// Those of `state`.
    pub files: Descriptors,
    pub disks: Vec<(DiskState, Option<Frozen>)>,
}

/// Disks that can go to another process.
pub trait Estate {
    /// Refuses what cannot be handed over, before anything is changed; one line for the user.
    fn may_be_handed_over(&self) -> Result<(), String>;

    /// What there is, from now on as it is; [`Estate::take_back`] ends that.
    fn give(&self) -> Result<Given, String>;

    /// So that less has to be written while guests wait.
    fn flush_early(&self);

    /// Nobody goes on with it: let NBD clients in again.
    fn take_back(&self);

    fn counts(&self) -> Vec<DiskCounts>;

    /// Count on from there.
    fn inherit(&mut self, counts: &[DiskCounts]);

    /// NBD clients are this process's from now on.
    fn let_nbd_in(&self, bounds: Vec<Bound>);
}
