//! Begins and ends jobs that change a disk's backing chain.
//!
//! The disk is first replaced by one with options that the job needs, for which guests and clients
//! wait some milliseconds. Then the job begins. When the job has ended, the disk gets its former
//! options back.

use super::Objects;
use super::freezing::no_thread;
use super::mirrors::not_ended;
use crate::activity::Change;
use crate::changes::{self, Next};
use crate::remake::Also;
use crate::stream::Running;
use fathom_control::{ErrorKind, RequestError};
use fathom_files::gate;
use fathom_formats::served::SideViewKind;
use fathom_host::options::DiskOptions;
use fathom_metrics::{StartingJob, StreamInfo};
use fathom_requests::{Answer, CommitOrder, Done, Responder, StreamOrder};
use fathom_units::cause;
use std::time::{Duration, Instant};

/// Interval of attempts to give a disk its former options back.
const LOOK: Duration = Duration::from_millis(200);

impl Objects {
    pub(super) fn begin_commit(&mut self, index: usize, order: &CommitOrder, responder: Responder) {
        let commit = self.disks[index].commit(order, self.nbd.is_some());
        let next = commit.map(|commit| {
            let side_view = SideViewKind::Below(commit.depth);
            (side_view, Next::Commit(Box::new(commit)))
        });
        self.begin_job(index, next, responder);
    }

    pub(super) fn begin_stream(&mut self, index: usize, order: &StreamOrder, responder: Responder) {
        let plan = self.disks[index].plan_stream(order);
        let next = plan.map(|plan| (plan.side_view(), Next::Stream(plan)));
        self.begin_job(index, next, responder);
    }

    /// Begins a job. `next`: what the job needs, or why the job is impossible.
    fn begin_job(
        &mut self,
        index: usize,
        next: Result<(SideViewKind, Next), String>,
        responder: Responder,
    ) {
        match self.begin_to_begin(index, next) {
            Ok(next) => {
                let name = self.disks[index].name();
                let job = Box::new(match &next {
                    Next::Commit(commit) => commit.job(),
                    Next::Stream(plan) => plan.job(),
                });
                let change = Change::PreparingJob(next, job);
                self.activities.begin(name, responder, change);
            }
            Err(error) => responder(Err(error)),
        }
    }

    fn begin_to_begin(
        &self,
        index: usize,
        next: Result<(SideViewKind, Next), String>,
    ) -> Result<Next, RequestError> {
        let disk = &self.disks[index];
        let conflict = |problem: String| {
            let name = disk.name();
            ErrorKind::Conflict.because(format!(
                "disk '{name}': the images cannot be changed while the disk is served: {problem}"
            ))
        };
        let problem = match gate::other() {
            Some(_) => Some("the disk belongs to a tenant".to_owned()),
            None => (disk.may_not_be_mirrored()).or_else(|| disk.may_not_have_layer()),
        };
        problem.map_or(Ok(()), |problem| Err(conflict(problem)))?;
        let (side_view, next) = next.map_err(|problem| ErrorKind::Invalid.because(problem))?;
        self.begin_to_work(index, Some(side_view), &conflict)?;
        Ok(next)
    }

    /// Begins to replace the disk by a disk whose options differ only in `side_view`.
    fn begin_to_work(
        &self,
        index: usize,
        side_view: Option<SideViewKind>,
        conflict: &dyn Fn(String) -> RequestError,
    ) -> Result<(), RequestError> {
        let disk = &self.disks[index];
        if let Some(error) = self.activities.busy(disk.name()) {
            return Err(error);
        }
        disk.may_be_left().map_err(conflict)?;
        let mut options =
            DiskOptions::of(disk.spec().clone(), self.nbd.is_some()).map_err(conflict)?;
        options.disk.side_view = side_view;
        self.begin_remake(index, options, Also::Nothing, conflict)
    }

    /// Begins the job, after the disk has got the options for it.
    pub(super) fn go_on(
        &mut self,
        index: usize,
        next: Next,
        job: Box<StartingJob>,
        responder: Responder,
    ) {
        let disk = &self.disks[index];
        let post = self.mail.post();
        let begun = match next {
            Next::Commit(commit) => { disk.order_to_commit(*commit) }
                .map(|order| changes::begin_mirror(order, self.mail.post(), post)),
            Next::Stream(plan) => { disk.order_to_stream(plan) }
                .map(|order| changes::begin_stream(order, self.mail.post(), post)),
        };
        let no_thread = |error| format!("cannot start a thread: {}", cause(error));
        match begun.and_then(|begun| begun.map_err(no_thread)) {
            Ok(()) => {
                let change = Change::StartingJob(job);
                self.activities.begin(disk.name(), responder, change);
            }
            Err(problem) => {
                self.end_work(index, Err(ErrorKind::Failed.because(problem)), responder)
            }
        }
    }

    pub(super) fn on_stream_begun(&mut self, name: &str, begun: Result<Running, String>) {
        let Some((index, responder)) = self.answers(name) else {
            return;
        };
        match begun {
            Ok(running) => {
                let info = running.info();
                match &info.top {
                    None => {
                        tracing::info!(
                            "disk '{name}': copying data from the backing images into the top \
                             image"
                        )
                    }
                    Some(top) => {
                        tracing::info!("disk '{name}': merging {top} into its backing image")
                    }
                }
                self.disks[index].set_stream(running);
                responder(Ok(info.into()));
            }
            Err(problem) => {
                let text = format!("disk '{name}': the images are unchanged: {problem}");
                self.end_work(index, Err(ErrorKind::Failed.because(text)), responder);
            }
        }
    }

    pub(super) fn end_stream(&mut self, index: usize, responder: Responder) {
        let name = self.disks[index].name().to_owned();
        let Some(running) = self.disks[index].stream().cloned() else {
            let text = format!("disk '{name}': no stream or commit is in progress");
            return responder(Err(ErrorKind::Unknown.because(text)));
        };
        if running.following.is_over()
            && let Some((first, change)) = self.activities.end(&name)
        {
            // The disk is just getting its former options back. Both requests get a reply when that
            // has ended.
            self.disks[index].forget_stream();
            let info = running.info();
            let both = move |answer| {
                first(answer);
                responder(Ok(info.into()));
            };
            self.activities.begin(&name, Box::new(both), change);
        } else if let Some(error) = self.activities.busy(&name) {
            responder(Err(error));
        } else if let Err(error) = changes::end_stream(name.clone(), running, self.mail.post()) {
            responder(Err(no_thread(&error)));
        } else {
            self.activities.begin(&name, responder, Change::Plain);
        }
    }

    pub(super) fn on_stream_ended(&mut self, name: &str, ended: Result<StreamInfo, RequestError>) {
        let Some((index, responder)) = self.answers(name) else {
            return;
        };
        match ended {
            Ok(info) => {
                self.disks[index].forget_stream();
                self.end_work(index, Ok(info.into()), responder);
            }
            Err(error) => responder(Err(not_ended(&format!("disk '{name}': stream"), error))),
        }
    }

    /// Notes the end of a change of a disk. Returns the disk's index, and the responder.
    pub(super) fn answers(&mut self, name: &str) -> Option<(usize, Responder)> {
        let (index, responder, _) = self.changed(name)?;
        Some((index, responder))
    }

    /// Notes the end of a change of a disk. Returns the disk's index, the responder, and the
    /// change. (A disk stays in the list while it is changed.)
    pub(super) fn changed(&mut self, name: &str) -> Option<(usize, Responder, Change)> {
        let (responder, change) = self.activities.end(name)?;
        let index = self.disks.iter().position(|disk| disk.name() == name)?;
        Some((index, responder, change))
    }

    /// Gives disks whose jobs have ended their former options back, unless another operation on the
    /// disk is in progress.
    pub(super) fn restore_options(&mut self) {
        let now = Instant::now();
        let due = { self.activities.jobs_over() }.filter(|(_, look_at)| *look_at <= now);
        let due: Vec<_> = due.map(|(name, _)| name.clone()).collect();
        for name in due {
            let index = self.disks.iter().position(|disk| disk.name() == name);
            let Some(index) = index.filter(|index| self.disks[*index].is_worked_on()) else {
                self.activities.forget_job(&name);
                continue;
            };
            match self.is_on_its_way(&name) {
                None => self.end_work(index, Ok(Done {}.into()), Box::new(drop)),
                Some(_) => self.activities.job_over(&name).look_at = now + LOOK,
            }
        }
    }

    pub(super) fn until_next_job(&self) -> Option<Duration> {
        let next = { self.activities.jobs_over() }
            .map(|(_, look_at)| look_at)
            .min();
        next.map(|next| next.saturating_duration_since(Instant::now()))
    }

    /// Begins to give the disk its former options back: no job changes its chain any more. Replies
    /// when that has ended, with or without success.
    pub(super) fn end_work(&mut self, index: usize, answer: Answer, responder: Responder) {
        if !self.disks[index].is_worked_on() {
            return responder(answer);
        }
        // (Further attempts follow until the disk has its former options.)
        let name = self.disks[index].name().to_owned();
        self.activities.job_over(&name).try_again();
        let failed = |problem: String| ErrorKind::Failed.because(problem);
        match self.begin_to_work(index, None, &failed) {
            Ok(()) => {
                // (A failure is logged, and the disk continues as it is.)
                let responder: Responder = Box::new(move |_| responder(answer));
                self.activities.begin(&name, responder, Change::Plain);
            }
            Err(error) => {
                tracing::warn!("{error}");
                self.disks[index].set_unsettled(error.to_string());
                responder(answer);
            }
        }
    }
}
