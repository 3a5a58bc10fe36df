//! The activities of disks besides serving: one phase for each name.

use super::changes::{Next, Over};
use super::freeze::Waiting;
use fathom_control::{ErrorKind, RequestError, changing_disk};
use fathom_metrics::{JobKind, StartingJob};
use fathom_requests::Responder;
use std::collections::BTreeMap;
use std::sync::mpsc::SyncSender;
use std::time::Instant;

/// Activities by disk. A disk without an entry is idle.
#[derive(Default)]
pub struct Activities(BTreeMap<String, Activity>);

#[derive(Default)]
struct Activity {
    phase: Phase,
    /// Whether another program may have resized the disk's file: the disk must adopt the new size.
    has_new_size: bool,
    /// Present if the disk's job has ended, and the disk must get its former options back.
    job_over: Option<Over>,
}

#[derive(Default)]
enum Phase {
    #[default]
    Idle,
    /// A thread opens the disk, which is not in the list of disks yet.
    Opening(Responder),
    /// A thread changes the disk.
    Changing(Responder, Change),
    /// The disk's users wait.
    Frozen {
        users: Box<Waiting>,
        until: Option<Instant>,
    },
    /// A thread closes the disk, which is no longer in the list of disks.
    Closing(Responder),
}

/// A change of a disk that is in the list of disks.
pub enum Change {
    /// A change at whose end only the reply is sent.
    Plain,
    /// The disk is being frozen, until this time at the latest.
    Freezing { until: Option<Instant> },
    /// A backup with this identity begins. `end`: the responder of a request to end the backup that
    /// arrived meanwhile.
    StartingBackup { id: String, end: Option<Responder> },
    /// The disk gets the options that a job needs; then the job begins.
    PreparingJob(Next, Box<StartingJob>),
    /// A mirror, commit or stream begins.
    StartingJob(Box<StartingJob>),
    /// The disk's users wait for the decision whether the disk continues on its new image.
    Deciding(SyncSender<bool>),
}

impl Activities {
    /// Notes that the disk is being changed.
    pub fn begin(&mut self, name: &str, responder: Responder, change: Change) {
        self.entry(name).phase = Phase::Changing(responder, change);
    }

    /// Notes the end of a change. Returns the responder, and the change.
    pub fn end(&mut self, name: &str) -> Option<(Responder, Change)> {
        let activity = self.0.get_mut(name)?;
        match std::mem::take(&mut activity.phase) {
            Phase::Changing(responder, change) => {
                self.tidy(name);
                Some((responder, change))
            }
            other => {
                activity.phase = other;
                None
            }
        }
    }

    /// Returns the disk's change that is in progress.
    pub fn change_mut(&mut self, name: &str) -> Option<&mut Change> {
        match &mut self.0.get_mut(name)?.phase {
            Phase::Changing(_, change) => Some(change),
            Phase::Idle | Phase::Opening(_) | Phase::Frozen { .. } | Phase::Closing(_) => None,
        }
    }

    /// Returns the job of the disk that begins and does not run yet.
    pub fn starting_job(&self, name: &str) -> Option<StartingJob> {
        match self.phase(name)? {
            Phase::Changing(_, Change::PreparingJob(_, job) | Change::StartingJob(job)) => {
                Some(StartingJob::clone(job))
            }
            Phase::Changing(_, Change::StartingBackup { id, .. }) => Some(StartingJob {
                kind: JobKind::Backup,
                id: id.clone(),
                target: None,
                speed: None,
            }),
            _ => None,
        }
    }

    pub fn is_changing(&self, name: &str) -> bool {
        matches!(self.phase(name), Some(Phase::Changing(..)))
    }

    /// Whether any disk is being changed.
    pub fn is_any_changing(&self) -> bool {
        let mut all = self.0.values();
        all.any(|activity| matches!(activity.phase, Phase::Changing(..)))
    }

    /// Returns the error for other requests while the disk is being changed or is frozen.
    pub fn busy(&self, name: &str) -> Option<RequestError> {
        let what = match self.phase(name)? {
            Phase::Changing(..) => {
                "being changed by another request; retry when that request has completed"
            }
            Phase::Frozen { .. } => "frozen; thaw it first",
            Phase::Idle | Phase::Opening(_) | Phase::Closing(_) => return None,
        };
        Some(ErrorKind::Conflict.because(format!("disk '{name}': {what}")))
    }

    pub fn begin_to_open(&mut self, name: &str, responder: Responder) {
        self.entry(name).phase = Phase::Opening(responder);
    }

    pub fn begin_to_close(&mut self, name: &str, responder: Responder) {
        self.entry(name).phase = Phase::Closing(responder);
    }

    /// Notes that a disk is open, or could not be opened. Returns the responder.
    pub fn opened(&mut self, name: &str) -> Option<Responder> {
        let activity = self.0.get_mut(name)?;
        match std::mem::take(&mut activity.phase) {
            Phase::Opening(responder) => {
                self.tidy(name);
                Some(responder)
            }
            other => {
                activity.phase = other;
                None
            }
        }
    }

    /// Notes that a disk is closed. Returns the responder.
    pub fn closed(&mut self, name: &str) -> Option<Responder> {
        match self.0.remove(name)?.phase {
            Phase::Closing(responder) => Some(responder),
            _ => None,
        }
    }

    /// Returns the error for requests about a disk that is being opened or closed, and so is not in
    /// the list of disks.
    pub fn coming_or_going(&self, name: &str) -> Option<RequestError> {
        match self.phase(name)? {
            Phase::Opening(_) => Some(changing_disk(name, true)),
            Phase::Closing(_) => Some(changing_disk(name, false)),
            Phase::Idle | Phase::Changing(..) | Phase::Frozen { .. } => None,
        }
    }

    /// Returns the names of the disks that are being closed.
    pub fn closing(&self) -> impl Iterator<Item = &String> {
        let closing = |(_, activity): &(_, &Activity)| matches!(activity.phase, Phase::Closing(_));
        self.0.iter().filter(closing).map(|(name, _)| name)
    }

    /// Whether no disk is being opened, closed or changed.
    pub fn is_settled(&self) -> bool {
        let is_settled =
            |activity: &Activity| matches!(activity.phase, Phase::Idle | Phase::Frozen { .. });
        self.0.values().all(is_settled)
    }

    /// Notes that the disk's users wait.
    pub fn set_frozen(&mut self, name: &str, users: Waiting, until: Option<Instant>) {
        let users = Box::new(users);
        self.entry(name).phase = Phase::Frozen { users, until };
    }

    pub fn is_frozen(&self, name: &str) -> bool {
        matches!(self.phase(name), Some(Phase::Frozen { .. }))
    }

    /// Returns the names of the frozen disks, each with the time at which the disk must be thawed.
    pub fn frozen(&self) -> impl Iterator<Item = (&String, Option<Instant>)> {
        self.0
            .iter()
            .filter_map(|(name, activity)| match &activity.phase {
                Phase::Frozen { until, .. } => Some((name, *until)),
                _ => None,
            })
    }

    /// Notes that a frozen disk is being thawed. Returns the disk's waiting users.
    pub fn take_frozen(&mut self, name: &str) -> Option<Waiting> {
        let activity = self.0.get_mut(name)?;
        match std::mem::take(&mut activity.phase) {
            Phase::Frozen { users, .. } => {
                self.tidy(name);
                Some(*users)
            }
            other => {
                activity.phase = other;
                None
            }
        }
    }

    /// Notes that another program may have resized the disk's file.
    pub fn note_size(&mut self, name: &str) {
        self.entry(name).has_new_size = true;
    }

    /// Returns the names of the disks whose files another program may have resized.
    pub fn new_sizes(&self) -> impl Iterator<Item = &String> {
        let noted = self.0.iter().filter(|(_, activity)| activity.has_new_size);
        noted.map(|(name, _)| name)
    }

    pub fn forget_size(&mut self, name: &str) {
        self.entry(name).has_new_size = false;
        self.tidy(name);
    }

    /// Returns the state of the disk's ended job. The first call creates the state.
    pub fn job_over(&mut self, name: &str) -> &mut Over {
        self.entry(name).job_over.get_or_insert_default()
    }

    /// Returns the names of the disks whose jobs have ended, each with the time of the next attempt
    /// to give the disk its former options back.
    pub fn jobs_over(&self) -> impl Iterator<Item = (&String, Instant)> {
        self.0.iter().filter_map(|(name, activity)| {
            let over = activity.job_over.as_ref()?;
            Some((name, over.look_at))
        })
    }

    pub fn forget_job(&mut self, name: &str) {
        self.entry(name).job_over = None;
        self.tidy(name);
    }

    fn phase(&self, name: &str) -> Option<&Phase> {
        self.0.get(name).map(|activity| &activity.phase)
    }

    fn entry(&mut self, name: &str) -> &mut Activity {
        self.0.entry(name.to_owned()).or_default()
    }

    fn tidy(&mut self, name: &str) {
        let is_idle = |activity: &Activity| {
            let is_idle = matches!(activity.phase, Phase::Idle);
            is_idle && !activity.has_new_size && activity.job_over.is_none()
        };
        if self.0.get(name).is_some_and(is_idle) {
            self.0.remove(name);
        }
    }
}
