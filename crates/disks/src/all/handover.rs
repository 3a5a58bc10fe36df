//! Hands all disks over to another process.

use super::{MAX_LEFT, Objects};
use crate::disk::Served;
use crate::nbd::Nbd;
use fathom_core::HandoverState;
use fathom_exports::nbd::ClientState;
use fathom_exports::vhost_user::{Arrival, Arriving, ExportState};
use fathom_files::UsedFile;
use fathom_host::Error;
use fathom_host::handover::{
    Given, GivenDisk, HandoverHost, Progress, State, VERSION, WITH_PACKED_QUEUES, WITH_PARTS,
    WITH_UNFINISHED_MESSAGES,
};
use fathom_metrics::DiskCounts;
use fathom_sockets::{Bound, Descriptors};
use fathom_units::cause;
use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

impl Objects {
    /// Fails if a disk has opened other files than those that its predecessor has open, disk by
    /// disk. The error is for the user.
    pub fn check_files(&self, used: &[Vec<UsedFile>]) -> Result<(), String> {
        let mut disks = self.disks.iter().zip(used);
        disks.try_for_each(|(disk, used)| disk.check_files(used))
    }

    /// Takes over the exports and the start time of a predecessor.
    pub fn take(
        &mut self,
        disks: Vec<Option<(Arriving, Arrival)>>,
        uptime: Duration,
    ) -> Result<Vec<Option<Arriving>>, Error> {
        let mut exports = Vec::new();
        for (disk, export) in self.disks.iter_mut().zip(disks) {
            let (arriving, arrival) = export.unzip();
            disk.take(arrival)?;
            exports.push(arriving);
        }
        let now = Instant::now();
        self.started = now.checked_sub(uptime).unwrap_or(now);
        Ok(exports)
    }
}

/// Returns the oldest version of the handover protocol that can express the states of these disks.
fn version_of(disks: &[GivenDisk]) -> u32 {
    let exports = disks.iter().filter_map(|disk| disk.export.as_ref());
    let states: Vec<_> = exports.filter_map(|export| export.state.as_ref()).collect();
    let any = |has: fn(&ExportState) -> bool| states.iter().any(|state| has(state));
    if any(ExportState::has_packed_queues) {
        return WITH_PACKED_QUEUES;
    }
    if any(ExportState::has_unfinished_message) {
        return WITH_UNFINISHED_MESSAGES;
    }
    match disks.iter().all(|disk| disk.lent.is_empty()) {
        true => VERSION,
        false => WITH_PARTS,
    }
}

impl HandoverHost for Objects {
    fn may_be_handed_over(&self) -> Result<(), String> {
        let is_settled = self.activities.is_settled() && self.leaving.is_empty();
        if let Some((name, _)) = self.activities.frozen().next() {
            return Err(format!("disk '{name}': frozen; thaw it first"));
        }
        if !is_settled {
            return Err(
                "a disk is being added, removed or changed; retry when that has completed".into(),
            );
        }
        let encrypted = self.nbd.as_ref().and_then(Nbd::encrypted_client);
        if let Some(client) = encrypted.filter(|_| !self.encrypted_end) {
            return Err(format!(
                "NBD client {client}: connected by TLS, which cannot be handed over to another \
                 process; disconnect the client first, or repeat with --disconnect"
            ));
        }
        self.disks.iter().try_for_each(Served::may_be_handed_over)
    }

    fn let_encrypted_end(&mut self, end: bool) {
        self.encrypted_end = end;
    }

    fn give(&self) -> Result<Given, String> {
        if let Some(nbd) = &self.nbd {
            nbd.keep_out();
        }
        // (Checked again: a client may have connected meanwhile.)
        self.may_be_handed_over()?;
        let mut files = Descriptors::default();
        let failed =
            |error: io::Error| format!("cannot duplicate a file descriptor: {}", cause(error));
        let nbd = self.nbd.as_ref().map(|nbd| nbd.hand_over(&mut files));
        let disks = self.disks.iter().map(Served::give);
        let disks = disks.collect::<Result<Vec<_>, _>>()?;
        let state = State {
            version: version_of(&disks),
            pid: std::process::id(),
            nbd: nbd.transpose().map_err(failed)?.unwrap_or_default(),
            kept: None,
            files: files.len(),
            disks: Vec::new(),
            origins: BTreeMap::new(),
            definitions: None,
            api: None,
            uptime_ms: self.started.elapsed().as_millis() as u64,
            tenants: None,
            groups: Vec::new(),
        };
        Ok(Given {
            state,
            files,
            disks,
        })
    }

    fn flush_early(&self) {
        self.disks.iter().for_each(Served::flush_early);
    }

    fn hold_clients(&self, deadline: Instant) -> Result<(Vec<ClientState>, Descriptors), String> {
        let mut files = Descriptors::default();
        let nbd = self.nbd.as_ref();
        let held = nbd.map(|nbd| nbd.hold(deadline, self.encrypted_end, &mut files));
        let held = held.transpose()?;
        Ok((held.unwrap_or_default(), files))
    }

    fn final_states(&self) -> Result<Vec<HandoverState>, String> {
        self.disks.iter().map(Served::final_state).collect()
    }

    fn restore(&mut self, left: Vec<HandoverState>) -> Result<(), String> {
        let mut disks = self.disks.iter_mut().zip(&left);
        disks.try_for_each(|(disk, left)| disk.restore(left))
    }

    fn end(&self, deadline: Instant) {
        self.disks
            .iter()
            .for_each(|disk| disk.leave_for_good(deadline));
    }

    fn adopt_clients(
        &self,
        clients: Vec<ClientState>,
        files: &mut Descriptors,
    ) -> Result<(), String> {
        match &self.nbd {
            Some(nbd) => nbd.adopt(clients, files),
            None => Ok(()),
        }
    }

    fn take_back(&self) {
        self.nbd.iter().for_each(Nbd::go_on);
    }

    fn counts(&self) -> Vec<DiskCounts> {
        let disks = self.disks.iter();
        disks.map(|disk| disk.counts(MAX_LEFT)).collect()
    }

    fn continue_counts(&mut self, counts: &[DiskCounts]) {
        let disks = self.disks.iter_mut().zip(counts);
        disks.for_each(|(disk, counts)| disk.continue_counts(counts));
    }

    fn own(&mut self, bounds: Vec<Bound>) {
        if let Some(nbd) = &self.nbd {
            nbd.own(bounds);
            nbd.go_on();
        }
    }

    /// Reports the end at once: this host has no tenants.
    fn renew(&mut self, mut tell: Box<dyn FnMut(Progress) + Send>) {
        tell(Progress::Done);
    }
}
