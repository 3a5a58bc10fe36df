//! Changes and ends jobs by their identities.

use super::Objects;
use fathom_control::{ErrorKind, RequestError};
use fathom_metrics::{JobId, JobInfo, JobKind};
use fathom_requests::{Answer, JobOrder, Reply, Responder};

impl Objects {
    /// Changes or ends the job with this identity, and no other job of the disk.
    pub(super) fn order_job(
        &mut self,
        index: usize,
        id: &JobId,
        order: JobOrder,
        responder: Responder,
    ) {
        if let Err(error) = self.info(index).job(id) {
            return responder(Err(error));
        }
        match order {
            JobOrder::SetSpeed { limit } => {
                let set = self.set_job_speed(index, id, limit);
                responder(set.and_then(|()| self.info(index).job(id)).map(Reply::from));
            }
            JobOrder::End { force } => {
                let disk = id.disk.clone();
                let responder: Responder = Box::new(move |answer| {
                    responder(answer.and_then(|ended| last_state(&disk, ended)))
                });
                match id.kind {
                    JobKind::Backup => self.end_backup(index, &id.number, responder),
                    JobKind::Mirror => self.end_mirror(index, force, responder),
                    JobKind::Stream | JobKind::Commit => self.end_stream(index, responder),
                    JobKind::Pull => responder(Err(ErrorKind::Conflict.because(format!(
                        "{id}: a move cannot be ended while the disk is served; remove the disk"
                    )))),
                }
            }
        }
    }

    fn set_job_speed(
        &self,
        index: usize,
        id: &JobId,
        limit: Option<u64>,
    ) -> Result<(), RequestError> {
        let disk = &self.disks[index];
        if self.activities.starting_job(disk.name()).is_some()
            && let Some(error) = self.activities.busy(disk.name())
        {
            return Err(error);
        }
        let following = match id.kind {
            JobKind::Mirror => disk.mirror().map(|running| &running.mirror.following),
            JobKind::Stream | JobKind::Commit => disk.stream().map(|running| &running.following),
            JobKind::Pull => {
                disk.coming().inspect(|pull| pull.set_rate(limit));
                return Ok(());
            }
            JobKind::Backup => {
                return Err(ErrorKind::Conflict.because(format!(
                    "{id}: a backup has no speed of its own: its client reads it as fast as it can"
                )));
            }
        };
        following.inspect(|following| following.set_rate(limit));
        Ok(())
    }
}

/// Returns the last state of a job that has ended.
fn last_state(disk: &str, ended: Reply) -> Answer {
    match ended {
        Reply::Backup(info) => Ok(JobInfo::backup(disk, &info).into()),
        Reply::Mirror(info) => Ok(JobInfo::mirror(disk, &info).into()),
        Reply::Stream(info) => Ok(JobInfo::stream(disk, &info).into()),
        _ => Err(ErrorKind::Failed.because("the reply is of another kind")),
    }
}
