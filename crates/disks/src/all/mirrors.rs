//! Begins and ends mirrors.

use super::Objects;
use super::freezing::no_thread;
use crate::activity::Change;
use crate::changes;
use crate::mirror::Running;
use fathom_control::{ErrorKind, RequestError};
use fathom_files::gate;
use fathom_metrics::MirrorInfo;
use fathom_requests::{MirrorOrder, Responder};

impl Objects {
    pub(super) fn begin_mirror(&mut self, index: usize, order: MirrorOrder, responder: Responder) {
        let disk = &self.disks[index];
        let name = disk.name().to_owned();
        let error = self.activities.busy(&name).or_else(|| {
            let problem = match gate::other() {
                Some(_) => Some("tenants' disks cannot be mirrored".to_owned()),
                None => disk.may_not_be_mirrored(),
            };
            problem.map(|problem| ErrorKind::Conflict.because(format!("disk '{name}': {problem}")))
        });
        if let Some(error) = error {
            return responder(Err(error));
        }
        let order = match disk.mirror_order(order, self.nbd.is_some()) {
            Ok(order) => order,
            Err(problem) => return responder(Err(ErrorKind::Invalid.because(problem))),
        };
        let job = order.job();
        match changes::begin_mirror(order, self.mail.post(), self.mail.post()) {
            Ok(()) => {
                let change = Change::StartingJob(Box::new(job));
                self.activities.begin(&name, responder, change);
            }
            Err(error) => responder(Err(no_thread(&error))),
        }
    }

    pub(super) fn on_mirror_begun(&mut self, name: &str, begun: Result<Running, String>) {
        let Some((index, responder)) = self.answers(name) else {
            return;
        };
        match begun {
            Ok(running) => {
                let info = running.info();
                tracing::info!("disk '{name}': mirroring to {}", info.target);
                self.disks[index].set_mirror(running);
                responder(Ok(info.into()));
            }
            Err(problem) => {
                let text = format!("disk '{name}': mirror not started: {problem}");
                self.end_work(index, Err(ErrorKind::Failed.because(text)), responder);
            }
        }
    }

    /// Ends a mirror. Without `force`, only a mirror that is ready ends, with a complete target.
    pub(super) fn end_mirror(&mut self, index: usize, force: bool, responder: Responder) {
        let running = match self.mirror_of(index) {
            Ok(running) => running.clone(),
            Err(error) => return responder(Err(error)),
        };
        let name = self.disks[index].name().to_owned();
        if !force && !running.is_ready() && !running.is_over() {
            let text = format!(
                "disk '{name}': its mirror is {}, not ready; --force ends it, and leaves an \
                 incomplete target",
                running.info().phase
            );
            return responder(Err(ErrorKind::Conflict.because(text)));
        }
        let users = (!force).then(|| self.users_of(index));
        match changes::end_mirror(name.clone(), running, users, self.mail.post()) {
            Ok(()) => self.activities.begin(&name, responder, Change::Plain),
            Err(error) => responder(Err(no_thread(&error))),
        }
    }

    /// Returns the disk's mirror. Fails if the disk has no mirror, or if another operation on the
    /// disk is in progress.
    pub(super) fn mirror_of(&self, index: usize) -> Result<&Running, RequestError> {
        let disk = &self.disks[index];
        let name = disk.name();
        if let Some(error) = self.activities.busy(name) {
            return Err(error);
        }
        disk.mirror().ok_or_else(|| {
            ErrorKind::Unknown.because(format!("disk '{name}': no mirror is in progress"))
        })
    }

    pub(super) fn on_mirror_ended(&mut self, name: &str, ended: Result<MirrorInfo, RequestError>) {
        let Some((index, responder)) = self.answers(name) else {
            return;
        };
        match ended {
            Ok(info) => {
                self.disks[index].forget_mirror();
                self.end_work(index, Ok(info.into()), responder);
            }
            Err(error) => responder(Err(not_ended(&format!("disk '{name}': mirror"), error))),
        }
    }
}

/// Returns the error for a client whose request to end `job` has failed.
pub(super) fn not_ended(job: &str, error: RequestError) -> RequestError {
    let error = error.kind.because(format!("{job}: {}", error.text));
    if error.kind == ErrorKind::Late {
        tracing::warn!("{error}");
    }
    error
}
