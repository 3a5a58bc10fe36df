//! Disks that are copied to others, which may take their places.

use super::Objects;
use super::freezing::no_thread;
use crate::objects::activity::Change;
use crate::objects::changes;
use crate::objects::mirror::Running;
use crate::orders::MirrorOrder;
use crate::reply::Asker;
use fathom_control::{ErrorKind, RequestError};
use fathom_files::gate;
use fathom_metrics::MirrorInfo;

impl Objects {
    pub(super) fn begin_mirror(&mut self, index: usize, order: MirrorOrder, asker: Asker) {
        let disk = &self.disks[index];
        let name = disk.name().to_owned();
        let refusal = self.activities.busy(&name).or_else(|| {
            let problem = match gate::other() {
                Some(_) => Some("tenants' disks cannot be mirrored".to_owned()),
                None => disk.may_not_be_mirrored(),
            };
            problem.map(|problem| ErrorKind::Conflict.because(format!("disk '{name}': {problem}")))
        });
        if let Some(refusal) = refusal {
            return asker(Err(refusal));
        }
        let order = match disk.mirror_order(order, self.nbd.is_some()) {
            Ok(order) => order,
            Err(problem) => return asker(Err(ErrorKind::Invalid.because(problem))),
        };
        match changes::begin_mirror(order, self.mail.post(), self.mail.post()) {
            Ok(()) => self.activities.begin(&name, asker, Change::Plain),
            Err(error) => asker(Err(no_thread(&error))),
        }
    }

    pub(super) fn take_in_mirror(&mut self, name: &str, begun: Result<Running, String>) {
        let Some((index, asker)) = self.answers(name) else {
            return;
        };
        match begun {
            Ok(running) => {
                let info = running.info();
                tracing::info!("disk '{name}': mirroring to {}", info.target);
                self.disks[index].set_mirror(running);
                asker(Ok(info.into()));
            }
            Err(problem) => {
                let text = format!("disk '{name}': mirror not started: {problem}");
                self.end_work(index, Err(ErrorKind::Failed.because(text)), asker);
            }
        }
    }

    /// Let it be.
    pub(super) fn end_mirror(&mut self, index: usize, force: bool, asker: Asker) {
        let running = match self.mirror_of(index) {
            Ok(running) => running.clone(),
            Err(refusal) => return asker(Err(refusal)),
        };
        let name = self.disks[index].name().to_owned();
        if !force && !running.is_ready() && !running.is_over() {
            let text = format!(
                "disk '{name}': its mirror is {}, not ready; --force ends it, and leaves an \
                 incomplete target",
                running.info().phase
            );
            return asker(Err(ErrorKind::Conflict.because(text)));
        }
        let users = (!force).then(|| self.users_of(index));
        match changes::end_mirror(name.clone(), running, users, self.mail.post()) {
            Ok(()) => self.activities.begin(&name, asker, Change::Plain),
            Err(error) => asker(Err(no_thread(&error))),
        }
    }

    /// One that there is, and nothing else is done with its disk.
    pub(super) fn mirror_of(&self, index: usize) -> Result<&Running, RequestError> {
        let disk = &self.disks[index];
        let name = disk.name();
        if let Some(refusal) = self.activities.busy(name) {
            return Err(refusal);
        }
        disk.mirror().ok_or_else(|| {
            ErrorKind::Unknown.because(format!("disk '{name}': no mirror is in progress"))
        })
    }

    pub(super) fn take_in_ended_mirror(
        &mut self,
        name: &str,
        ended: Result<MirrorInfo, RequestError>,
    ) {
        let Some((index, asker)) = self.answers(name) else {
            return;
        };
        match ended {
            Ok(info) => {
                self.disks[index].forget_mirror();
                self.end_work(index, Ok(info.into()), asker);
            }
            Err(refusal) => asker(Err(not_ended(&format!("disk '{name}': mirror"), refusal))),
        }
    }
}

/// The refusal for a client that has asked for the end of `job`.
pub(super) fn not_ended(job: &str, refusal: RequestError) -> RequestError {
    let refusal = refusal.kind.because(format!("{job}: {}", refusal.text));
    if refusal.kind == ErrorKind::Late {
        tracing::warn!("{refusal}");
    }
    refusal
}
