//! The thread that mirrors a disk.

use super::noting::{Noting, end_of};
use super::terms::{Target, Terms};
use super::todo;
use crate::above;
use crate::copy::{Copy, Failure, Pace, Speed};
use crate::following::{Gone, Next, Phase, STOPPED, Shared, Tell};
use crate::source::{InUse, Source};
use fathom_core::{Changes, Disk, DiskError};
use fathom_stack::{Brake, Client, Job};
use fathom_units::cause;
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time that users can wait: remaining data that takes less does not prevent a switch.
const SHORT: Duration = Duration::from_millis(200);
/// Interval between updates of the change map while data is copied.
const SLICE: Duration = Duration::from_millis(100);
/// Interval between updates of the change map while both disks are identical.
const IDLE: Duration = Duration::from_millis(20);

/// Limits while the mirror throttles writes.
///
/// Once the initial copy is complete, the remaining data may grow to what is copied in half of
/// [`SHORT`], within these two limits in bytes. While more remains, users may change 1/`SHARE`
/// of the amount that is copied.
const MOST_LEFT: u64 = 16 << 20;
const LEAST_LEFT: u64 = 1 << 20;
const SHARE: u64 = 2;

/// Maximum number of runs taken from the change map per call.
const RUNS: usize = 1024;

pub(super) struct Follower {
    pub(super) source: Source,
    pub(super) to: Target,
    /// The disk of `to`.
    pub(super) target: Arc<dyn Disk>,
    pub(super) terms: Terms,
    /// The ranges that users have changed.
    ///
    /// These ranges are moved to `todo` only while no copy is in flight. If the same range were
    /// copied twice at once, the older data might be written last.
    pub(super) noted: Arc<Changes>,
    pub(super) todo: Changes,
    /// Recording of changes, until the mirror ends or its thread is abandoned.
    pub(super) noting: Arc<Mutex<Option<Noting>>>,
    pub(super) brake: Arc<Brake>,
    pub(super) shared: Arc<Shared>,
    pub(super) tell: Tell,
    /// The tap's count of changes by others when the mirror began.
    pub(super) changes_by_others: u64,
    /// Offset in bytes where copying continues.
    pub(super) cursor: u64,
    /// Whether the initial data is marked in `todo`.
    pub(super) has_begun: bool,
    /// Whether the initial data has been copied once: only changes by users remain.
    pub(super) has_come_round: bool,
}

impl Follower {
    /// Runs the mirror until it is over; it does not use either disk any more then.
    pub(super) fn run(mut self, target: InUse) {
        let outcome = self.follow_on();
        // From here on, no change is recorded and no write is throttled.
        drop(end_of(&self.noting));
        let closed = target.end();
        let closed = closed.map_err(|error| format!("cannot close the target: {}", cause(error)));
        self.shared.conclude(outcome.and(closed), &self.tell);
    }

    /// Copies until both disks are identical, across disconnections of the virtual machine.
    ///
    /// The error is a message for the user.
    fn follow_on(&mut self) -> Result<(), String> {
        let (shared, disk) = (self.shared.clone(), self.source.disk.clone());
        let mut is_first = true;
        shared.work_on(&disk, &self.tell.clone(), || {
            if !std::mem::take(&mut is_first)
                && self.source.tap.changes_by_others() != self.changes_by_others
            {
                return Err(
                    "the virtual machine had disconnected, and other programs may have changed \
                     the disk since"
                        .into(),
                );
            }
            self.follow()
        })
    }

    /// Makes one pass while the disk is in use.
    fn follow(&mut self) -> Result<Gone, String> {
        let error = |error: DiskError| error.to_string();
        let engine = self.source.engine;
        let mut job = self.shared.job();
        let source = job.client(self.source.disk.clone(), engine);
        let target = job.client(self.target.clone(), engine);
        let (source, target) = (source.map_err(error)?, target.map_err(error)?);
        let shared = self.shared.clone();
        let stops = || shared.ends_pass();
        let copy = Copy {
            job: &job,
            source: &source,
            target: &target,
            pace: Pace::new(self.shared.rate.clone()),
            stops: &stops,
            slice: SLICE,
        };
        self.begin(&copy)?;
        self.copy_on(copy, &job, &target)
    }

    /// Marks the initial data, once.
    fn begin(&mut self, copy: &Copy<'_>) -> Result<(), String> {
        if !self.has_begun {
            // An interrupted marking starts again.
            self.has_begun = match &self.to {
                Target::Other(_) => todo::mark(copy, &self.todo)?,
                Target::Below(image) => {
                    let mapper = image.mapper();
                    let mut mapper = mapper.map_err(|error| error.to_string())?;
                    let layers = image.side_view().map_or(0, |below| below.depth());
                    above::mark(&mut mapper, layers, copy.stops, &self.todo)?
                }
            };
        }
        Ok(())
    }

    fn copy_on(&mut self, copy: Copy<'_>, job: &Job, target: &Client) -> Result<Gone, String> {
        let mut speed = Speed::default();
        loop {
            let next = self.shared.state().next();
            let is_last = match next {
                Next::Stop => return Err(STOPPED.into()),
                Next::Leave => return Ok(Gone::Away),
                Next::Copy => false,
                Next::CopyLast => true,
            };
            self.check_disk()?;
            // The rate is suspended at the end, because users wait.
            copy.pace.set_free(is_last);
            self.take_noted();
            let left = self.todo.changed_bytes();
            self.shared.state().status.left = left;
            if left == 0 {
                if is_last {
                    // `is_last` was read before the changes: no change can follow.
                    return self.finish(job, target);
                }
                self.has_come_round = true;
                self.brake_for(&speed, left, 0);
                self.shared.enter(Phase::Ready, &self.tell);
                self.shared.pause(IDLE);
                continue;
            }
            self.is_ready_in(speed.takes(left));
            let (begin, from) = (Instant::now(), self.cursor);
            match copy.slice(&self.todo, &mut self.cursor) {
                Ok(copied) => {
                    // Zeroes are not copied, but count as done.
                    let done = left.saturating_sub(self.todo.changed_bytes());
                    speed.copied(done, begin.elapsed());
                    self.shared.state().status.copied += copied;
                    self.has_come_round |= self.cursor < from;
                    self.brake_for(&speed, left, done);
                }
                // The next iteration finds out why.
                Err(Failure::Stopped) => {}
                Err(Failure::Problem(problem)) => return Err(problem),
            }
        }
    }

    fn take_noted(&self) {
        let (mut at, size) = (0, self.noted.size());
        while at < size {
            for run in self.noted.take(at..size, RUNS) {
                if run.changed {
                    self.todo.mark(at, run.len);
                }
                at += run.len;
            }
        }
    }

    /// Checks that the disk has its original size and that changes can be recorded.
    fn check_disk(&self) -> Result<(), String> {
        if self.noted.is_outgrown() || self.source.disk.info().size != self.todo.size() {
            return Err("the disk has been resized".into());
        }
        match self.brake.problem() {
            Some(problem) => Err(problem.into()),
            None => Ok(()),
        }
    }

    /// Sets how much users may change: `left` bytes were to be copied, `copied` of them have been.
    fn brake_for(&self, speed: &Speed, left: u64, copied: u64) {
        if self.terms.brakes && self.has_come_round {
            let most = speed.within(SHORT / 2).clamp(LEAST_LEFT, MOST_LEFT);
            match most.checked_sub(left.saturating_sub(copied)) {
                Some(allowed) => self.brake.allow(allowed),
                None => self.brake.allow_more(copied / SHARE),
            }
        }
    }

    fn finish(&self, job: &Job, target: &Client) -> Result<Gone, String> {
        match job.flush(target) {
            0 => Ok(Gone::Done),
            errno => {
                let error = io::Error::from_raw_os_error(errno);
                Err(format!("cannot flush the target: {}", cause(error)))
            }
        }
    }

    /// Updates the phase from the time that the remaining data takes.
    fn is_ready_in(&self, time: Duration) {
        if time < SHORT {
            self.shared.enter(Phase::Ready, &self.tell);
        } else if time > 5 * SHORT {
            self.shared.enter(Phase::Copying, &self.tell);
        }
    }
}
