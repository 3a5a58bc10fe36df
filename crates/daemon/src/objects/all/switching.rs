//! Disks that go on with the targets of their mirrors.
//!
//! A switch has two steps, for whoever keeps what disks there are. After the first the target has taken the disk's
//! place, and all users still wait: now it is to be kept. The second one has them go on with it, or as before.

use super::freezing::no_thread;
use super::{Objects, to_json};
use crate::answer::{Asker, Kind, Refusal};
use crate::objects::disk::Served;
use crate::objects::nbd::Nbd;
use crate::objects::remake::{Remake, Switch};
use fathom_storage::PART;
use std::sync::mpsc::SyncSender;

impl Objects {
    /// The first step: answered by the disk's options with the target.
    pub(super) fn begin_switch(&mut self, index: usize, asker: Asker) {
        match self.begin_to_switch(index) {
            Ok(()) => {
                let name = self.disks[index].name().to_owned();
                self.busy.insert(name, asker);
            }
            Err(refusal) => asker(Err(refusal)),
        }
    }

    fn begin_to_switch(&self, index: usize) -> Result<(), Refusal> {
        let running = self.mirror_of(index)?;
        let disk = &self.disks[index];
        let conflict = |problem| {
            let name = disk.name();
            Kind::Conflict.because(format!("disk '{name}' cannot be switched over: {problem}"))
        };
        if !running.is_ready() {
            let info = running.info();
            let problem = match info.problem {
                Some(problem) => format!("its mirror has failed: {problem}"),
                None => format!("its mirror is {}, not ready yet", info.phase),
            };
            return Err(conflict(problem));
        }
        disk.may_be_switched().map_err(conflict)?;
        let mut options = running.target().clone();
        // It is traced when somebody asks for it again.
        options.trace = None;
        options.disk.succeeds = true;
        options.disk.legacy = disk.lend().map_err(conflict)?;
        // (That is the image's own.)
        options.disk.legacy.take(PART);
        let switch = Switch {
            mirror: running.mirror.clone(),
        };
        let remake = Remake {
            export: disk.export_shared(),
            clients: self.nbd.as_ref().map(Nbd::server),
            parts: disk.parts(),
            options,
            common: self.common.clone(),
            switch: Some(switch),
        };
        let begun = remake.begin(self.mail.post());
        begun.map_err(|error| no_thread(&error))
    }

    pub(super) fn take_in_switched(&mut self, name: &str, decision: SyncSender<bool>) {
        let disk = self.disks.iter().find(|disk| disk.name() == name);
        let mirror = disk.and_then(Served::mirror);
        // (Until that is said it is busy.)
        let asker = self.busy.insert(name.to_owned(), Box::new(drop));
        if let Some((asker, mirror)) = asker.zip(mirror) {
            self.deciding.insert(name.to_owned(), decision);
            asker(to_json(&mirror.target().table));
        }
    }

    /// The second step.
    pub(super) fn end_switch(&mut self, index: usize, go: bool, asker: Asker) {
        let name = self.disks[index].name().to_owned();
        let sent = self
            .deciding
            .remove(&name)
            .map(|decision| decision.send(go));
        match sent {
            Some(Ok(())) => drop(self.busy.insert(name, asker)),
            Some(Err(_)) | None => {
                let text =
                    format!("disk '{name}' has gone on with its image: nothing was said in time");
                asker(Err(Kind::Failed.because(text)));
            }
        }
    }
}
