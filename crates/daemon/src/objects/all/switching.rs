//! Disks that go on with other images: the targets of their mirrors, or new ones on top.
//!
//! A switch has two steps, for whoever keeps what disks there are. After the first the other image is in use, and all
//! users still wait: now it is to be kept. The second one has them go on with it, or as before.

use super::Objects;
use crate::objects::activity::Change;
use crate::objects::remake::{Also, Other, Switch};
use crate::options::DiskOptions;
use crate::reply::Asker;
use fathom_control::SwitchTo;
use fathom_control::{ErrorKind, RequestError};
use fathom_files::gate;
use fathom_spec::DiskSpec;
use std::path::PathBuf;
use std::sync::mpsc::SyncSender;

impl Objects {
    /// The first step: answered by the disk's options with the other image.
    pub(super) fn begin_switch(
        &mut self,
        index: usize,
        to: SwitchTo,
        leave_bitmaps: bool,
        asker: Asker,
    ) {
        match self.begin_to_switch(index, to, leave_bitmaps) {
            Ok(()) => {
                let name = self.disks[index].name();
                self.activities.begin(name, asker, Change::Plain);
            }
            Err(refusal) => asker(Err(refusal)),
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
        if let Some(refusal) = self.activities.busy(disk.name()) {
            return Err(refusal);
        }
        let problem = match gate::other() {
            Some(_) => Some("snapshots of a tenant's disk in use are not supported".to_owned()),
            None => disk.may_not_have_layer(),
        };
        problem.map_or(Ok(()), |problem| Err(conflict(problem)))?;
        let options = disk.layered(path, self.nbd.is_some());
        options.map_err(|problem| ErrorKind::Invalid.because(problem))
    }

    pub(super) fn take_in_switched(
        &mut self,
        name: &str,
        spec: DiskSpec,
        decision: SyncSender<bool>,
    ) {
        if let Some((asker, _)) = self.activities.end(name) {
            let change = Change::Deciding(decision);
            self.activities.begin(name, Box::new(drop), change);
            asker(Ok(spec.into()));
        }
    }

    /// The second step.
    pub(super) fn end_switch(&mut self, index: usize, go: bool, asker: Asker) {
        let name = self.disks[index].name().to_owned();
        let sent = match self.activities.change_mut(&name) {
            Some(Change::Deciding(decision)) => decision.send(go).is_ok(),
            _ => false,
        };
        match sent {
            true => self.activities.begin(&name, asker, Change::Plain),
            false => {
                let text = format!("disk '{name}': no switch to another image is in progress");
                asker(Err(ErrorKind::Failed.because(text)));
            }
        }
    }
}
