//! A disk that follows its guest: what that touches comes first, the rest after it.
//!
//! The guest may change a block once it is here, durably, and noted in the record, durably, too. So at no
//! crash is anything brought again over what the guest has written, and nothing else needs to be known.

use super::puller::{FIRST_PAUSE, IDLE, IMPATIENT, LAST_PAUSE, Puller, Target, problem};
use super::record::Record;
use super::source;
use super::terms::Phase;
use crate::copy::{Copy, Failure, Pace};
use fathom_core::Changes;
use fathom_stack::{Job, Missing, words_of};
use fathom_storage::ChangesClient;
use fathom_units::cause;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The rest is copied for so long before it is looked who waits.
const SLICE: Duration = Duration::from_millis(10);

/// What is here is noted so often, or when somebody waits for that.
const NOTE: Duration = Duration::from_secs(1);

/// So long it is waited for who wants something, when there is nothing else to do.
const LOOK: Duration = Duration::from_millis(50);

/// It goes on after this at the latest, whatever its speed.
const LONGEST: Duration = Duration::from_secs(60);

/// Of this much (bytes) it is asked what has changed, to hear something of that server.
const LOOKED_AT: u64 = 1 << 20;

/// Runs that are looked at in one go.
const RUNS: usize = 256;

/// What is to be brought.
struct Rest {
    todo: Changes,
    /// Of that what somebody waits for; empty but while it is brought.
    urgent: Changes,
    /// Where it goes on.
    cursor: u64,
    noted: Instant,
    /// When the rate allows more of it.
    next: Instant,
}

impl Rest {
    /// Of all that is missing.
    fn new(size: u64, missing: &Missing) -> Rest {
        let (todo, now) = (Changes::new(size), Instant::now());
        for part in missing.absent(0..size) {
            todo.mark(part.start, part.end - part.start);
        }
        Rest {
            todo,
            urgent: Changes::new(size),
            cursor: 0,
            noted: now,
            next: now,
        }
    }

    /// What is not noted is to be brought again: its guest cannot have changed it.
    fn take_back(&self, missing: &Missing) {
        for part in missing.forget_unnoted() {
            self.todo.mark(part.start, part.end - part.start);
        }
    }
}

impl Puller {
    /// Has the guest go on here as soon as it comes, and brings the disk after it. The record of that, or None: it is
    /// to stop.
    pub(super) fn run_at_once(mut self, target: &Target) -> Option<Record> {
        let size = target.disk.info().size;
        self.forget_todo();
        let words = self.come(size)?;
        target.missing.begin(size, &words);
        self.now_left(target.missing.left());
        target.latch.open(&target.workers);
        self.enter(Phase::Arriving);
        if self.follow(target).is_none() {
            // Whoever waits has nobody any more who brings it.
            target.missing.set_hopeless(true);
            return None;
        }
        self.enter(Phase::Done);
        Some(self.record)
    }

    /// Until all is here. None: it is to stop.
    fn follow(&mut self, target: &Target) -> Option<()> {
        self.insist(|_| target.disk.activate())?;
        let mut rest = Rest::new(target.disk.info().size, &target.missing);
        let is_here = self.try_again_and_again(Puller::is_over, |puller| {
            let brought = puller.bring(target, &mut rest);
            if let Err(Failure::Problem(_)) = &brought {
                target.missing.set_hopeless(true);
            }
            brought
        });
        if let Err(error) = target.disk.deactivate() {
            tracing::error!("{error}");
        }
        is_here.then_some(())
    }

    /// The map of what is here, once the disk has been taken over. None: it is to stop.
    fn come(&mut self, size: u64) -> Option<Vec<u64>> {
        let mut pause = FIRST_PAUSE;
        loop {
            match self.try_to_come(size) {
                Ok(Some(words)) => return Some(words),
                Ok(None) => {
                    let wanted = self.is_wanted();
                    let pause = if wanted { IMPATIENT } else { IDLE };
                    self.shared.pause(pause, |state| state.wanted && !wanted);
                }
                Err(Failure::Stopped) => return None,
                Err(Failure::Problem(problem)) => {
                    self.fails(&problem, pause);
                    pause = (pause * 2).min(LAST_PAUSE);
                }
            }
            if self.shared.stops() {
                return None;
            }
        }
    }

    fn try_to_come(&mut self, size: u64) -> Result<Option<Vec<u64>>, Failure> {
        let uncertain = self.record.make_certain();
        uncertain.map_err(|error| self.unwritten(&error))?;
        let words = words_of(size);
        if !self.record.is_arriving() {
            let (mut client, _) = self.connect_again(size)?;
            if !self.is_wanted() {
                // It is still there.
                client.next(0, size.min(LOOKED_AT)).map_err(problem)?;
                self.client = Some(client);
                self.enter(Phase::Ready);
                self.shared.state().status.problem = None;
                return Ok(None);
            }
            let taken = client.take_over().map_err(problem)?;
            self.client = Some(client);
            if let Err(refused) = taken {
                self.shared.state().status.problem = Some(refused.to_string());
                return Ok(None);
            }
            let begun = self.record.begin_arriving(words);
            begun.map_err(|error| self.unwritten(&error))?;
        }
        let noted = self.record.noted(words);
        noted.map(Some).map_err(|error| self.unwritten(&error))
    }

    /// `true`: that server does not know of this move.
    fn connect_again(&mut self, size: u64) -> Result<(ChangesClient, bool), Failure> {
        let (client, is_new) = match self.client.take() {
            Some(client) => (client, false),
            None => {
                let (uri, id) = (&self.terms.source, self.record.id());
                source::reach(uri, id, size, true).map_err(problem)?
            }
        };
        self.shared.asks_for_changes(&client);
        Ok((client, is_new))
    }

    /// Nobody is here any more who may wait for something.
    fn is_over(&self) -> bool {
        let state = self.shared.state();
        state.stop && !state.wanted
    }

    /// Until all is here, and noted.
    fn bring(&mut self, target: &Target, rest: &mut Rest) -> Result<(), Failure> {
        if target.missing.is_whole() {
            return self.has_come();
        }
        let mut client = self.take_again(target, rest)?;
        let disk = Arc::new(source::open(&self.terms.source).map_err(problem)?);
        self.shared.asks_for_data(&disk);
        let mut job = Job::default();
        let source = job.client(disk, target.engine).map_err(problem)?;
        let own = job
            .client(target.disk.clone(), target.engine)
            .map_err(problem)?;
        let shared = self.shared.clone();
        let stops = || {
            let state = shared.state();
            state.stop && !state.wanted
        };
        let copy = Copy {
            job: &job,
            source: &source,
            target: &own,
            pace: Pace::new(Arc::default()),
            stops: &stops,
            slice: SLICE,
        };
        target.missing.set_hopeless(false);
        self.shared.state().status.problem = None;
        while !target.missing.is_whole() {
            if stops() {
                return Err(Failure::Stopped);
            }
            let left = target.missing.left();
            self.now_left(left);
            let is_due = rest.noted.elapsed() > NOTE || left == 0;
            if is_due || target.missing.has_writers() {
                // It is that server's disk still, of which nothing has changed.
                let taken = client.take_over().map_err(problem)?;
                taken.map_err(problem)?;
                self.note(&copy, target, rest)?;
                rest.noted = Instant::now();
                continue;
            }
            self.bring_more(&copy, target, rest)?;
        }
        self.has_come()
    }

    fn has_come(&mut self) -> Result<(), Failure> {
        self.now_left(0);
        let noted = self.record.set_taken();
        noted.map_err(|error| self.unwritten(&error))
    }

    /// Connected to the server that has the rest, where no guest has the disk.
    fn take_again(&mut self, target: &Target, rest: &Rest) -> Result<ChangesClient, Failure> {
        let (mut client, is_new) = self.connect_again(target.disk.info().size)?;
        let taken = client.take_over().map_err(problem)?;
        taken.map_err(problem)?;
        if is_new {
            let source = &self.terms.source;
            tracing::warn!(
                "{source}: restarted since its disk was taken over; make sure that no guest ran \
                 on the disk there in the meantime"
            );
            rest.take_back(&target.missing);
        }
        Ok(client)
    }

    /// What somebody waits for, or else some of the rest.
    fn bring_more(&mut self, copy: &Copy, target: &Target, rest: &mut Rest) -> Result<(), Failure> {
        let goes_on = !self.shared.stops() && target.missing.left() > 0;
        let wait = match goes_on {
            true => rest
                .next
                .saturating_duration_since(Instant::now())
                .min(LOOK),
            false => LOOK,
        };
        let wanted = target.missing.wanted(wait);
        if !wanted.is_empty() {
            let copied = bring_first(copy, target, rest, wanted)?;
            self.has_copied(copied);
        } else if goes_on && rest.next <= Instant::now() {
            let copied = bring_some(copy, target, rest)?;
            self.has_copied(copied);
            if let Some(rate) = self.shared.rate.limit() {
                let time = Duration::from_secs_f64(copied as f64 / rate as f64);
                rest.next = Instant::now() + time.min(LONGEST);
            }
        }
        Ok(())
    }

    /// What is here is known after a crash, too, from now on.
    fn note(&self, copy: &Copy, target: &Target, rest: &Rest) -> Result<(), Failure> {
        let words = target.missing.unnoted();
        if words.is_empty() {
            return Ok(());
        }
        let errno = copy.job.flush(copy.target);
        if errno != 0 {
            // What was written may be lost.
            rest.take_back(&target.missing);
            let error = io::Error::from_raw_os_error(errno);
            return Err(problem(format!("cannot flush the disk: {}", cause(error))));
        }
        let noted = self.record.note(&words);
        noted.map_err(|error| self.unwritten(&error))?;
        target.missing.are_noted(&words);
        Ok(())
    }
}

/// Brings what somebody waits for; returns how many bytes that was.
fn bring_first(
    copy: &Copy,
    target: &Target,
    rest: &Rest,
    wanted: Vec<Range<u64>>,
) -> Result<u64, Failure> {
    let absent = wanted.into_iter();
    let absent: Vec<_> = absent
        .flat_map(|part| target.missing.absent(part))
        .collect();
    for part in &absent {
        rest.urgent.mark(part.start, part.end - part.start);
    }
    let (mut cursor, mut copied) = (absent.first().map_or(0, |part| part.start), 0);
    while rest.urgent.changed_bytes() > 0 {
        let slice = copy.slice(&rest.urgent, &mut cursor);
        copied += slice.inspect_err(|_| {
            let parts = absent.iter().cloned();
            parts.for_each(|part| forget(&rest.urgent, part));
        })?;
    }
    for part in absent {
        // Nothing brings it again: its guest may change it from the next note on.
        forget(&rest.todo, part.clone());
        target.missing.have_come(part);
    }
    Ok(copied)
}

fn forget(todo: &Changes, part: Range<u64>) {
    let mut at = part.start;
    while at < part.end {
        let runs = todo.take(at..part.end, RUNS);
        at += runs.iter().map(|run| run.len).sum::<u64>();
    }
}

/// Brings some of the rest; returns how many bytes that was.
fn bring_some(copy: &Copy, target: &Target, rest: &mut Rest) -> Result<u64, Failure> {
    let (before, size) = (rest.cursor, rest.todo.size());
    let copied = copy.slice(&rest.todo, &mut rest.cursor)?;
    if before < rest.cursor {
        have_come(target, &rest.todo, before..rest.cursor);
    } else {
        // Once around.
        have_come(target, &rest.todo, before..size);
        have_come(target, &rest.todo, 0..rest.cursor);
    }
    Ok(copied)
}

/// What of the region is not to be brought any more is here.
fn have_come(target: &Target, todo: &Changes, region: Range<u64>) {
    let block = fathom_stack::block_of(todo.size());
    let mut at = region.start / block * block;
    let end = region.end.next_multiple_of(block).min(todo.size());
    let mut quiet = at..at;
    while at < end {
        for run in todo.take(at..end, RUNS) {
            if run.changed {
                todo.mark(at, run.len);
                target.missing.have_come(quiet.clone());
                quiet = at + run.len..at + run.len;
            } else {
                quiet.end = at + run.len;
            }
            at += run.len;
        }
    }
    target.missing.have_come(quiet);
}
