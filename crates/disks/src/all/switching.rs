//! Switches disks to other images: the targets of their mirrors, or new overlays.
//!
//! A switch has two steps. After the first step, the other image is open, and guests and clients
//! still wait: the controller writes the new definition durably. The second step resumes guests and
//! clients on the new image, or on the old one.

use super::Objects;
use crate::activity::Change;
use crate::remake::{Also, Other, Switch};
use fathom_control::SwitchTo;
use fathom_control::{ErrorKind, RequestError};
use fathom_files::gate;
use fathom_host::options::DiskOptions;
use fathom_requests::Responder;
use fathom_spec::DiskSpec;
use std::path::PathBuf;
use std::sync::mpsc::SyncSender;

impl Objects {
    /// Does the first step of a switch. The reply has the disk's options with the other image.
    pub(super) fn begin_switch(
        &mut self,
        index: usize,
        to: SwitchTo,
        leave_bitmaps: bool,
        responder: Responder,
    ) {
        match self.begin_to_switch(index, to, leave_bitmaps) {
            Ok(()) => {
                let name = self.disks[index].name();
                self.activities.begin(name, responder, Change::Plain);
            }
            Err(error) => responder(Err(error)),
        }
    }

    fn begin_to_switch(
        &self,
        index: usize,
        to: SwitchTo,
        leave_bitmaps: bool,
    ) -> Result<(), RequestError> {
        let disk = &self.disks[index];
        let conflict = |problem| {
            let name = disk.name();
            ErrorKind::Conflict.because(format!(
                "disk '{name}': not switched to another image: {problem}"
            ))
        };
        let (options, to) = match to {
            SwitchTo::Mirror => self.to_mirror(index, &conflict)?,
            SwitchTo::Layer(path) => self.to_layer(index, path, &conflict)?,
        };
        disk.may_be_switched().map_err(conflict)?;
        let bitmaps = (!leave_bitmaps).then(|| disk.bitmaps());
        let switch = Switch { to, bitmaps };
        self.begin_remake(index, options, Also::Switch(switch), &conflict)
    }

    fn to_mirror(
        &self,
        index: usize,
        conflict: &dyn Fn(String) -> RequestError,
    ) -> Result<(DiskOptions, Other), RequestError> {
        let running = self.mirror_of(index)?;
        if !running.is_ready() {
            let info = running.info();
            return Err(conflict(match info.problem {
                Some(problem) => format!("its mirror failed: {problem}"),
                None if running.is_over() => "its mirror has ended; start another one".into(),
                None => format!("its mirror is {}, not yet ready", info.phase),
            }));
        }
        let to = Other::Mirror(running.clone());
        Ok((running.target().clone(), to))
    }

    fn to_layer(
        &self,
        index: usize,
        path: PathBuf,
        conflict: &dyn Fn(String) -> RequestError,
    ) -> Result<(DiskOptions, Other), RequestError> {
        let disk = &self.disks[index];
        if let Some(error) = self.activities.busy(disk.name()) {
            return Err(error);
        }
        let problem = match gate::other() {
            Some(_) => Some("snapshots of a tenant's disk in use are not supported".to_owned()),
            None => disk.may_not_have_layer(),
        };
        problem.map_or(Ok(()), |problem| Err(conflict(problem)))?;
        let options = disk.layered(path, self.nbd.is_some());
        options.map_err(|problem| ErrorKind::Invalid.because(problem))
    }

    pub(super) fn on_switched(&mut self, name: &str, spec: DiskSpec, decision: SyncSender<bool>) {
        if let Some((responder, _)) = self.activities.end(name) {
            let change = Change::Deciding(decision);
            self.activities.begin(name, Box::new(drop), change);
            responder(Ok(spec.into()));
        }
    }

    /// Does the second step of a switch. `go`: whether the disk continues on the new image.
    pub(super) fn end_switch(&mut self, index: usize, go: bool, responder: Responder) {
        let name = self.disks[index].name().to_owned();
        let sent = match self.activities.change_mut(&name) {
            Some(Change::Deciding(decision)) => decision.send(go).is_ok(),
            _ => false,
        };
        match sent {
            true => self.activities.begin(&name, responder, Change::Plain),
            false => {
                let text = format!("disk '{name}': no switch to another image is in progress");
                responder(Err(ErrorKind::Failed.because(text)));
            }
        }
    }
}
