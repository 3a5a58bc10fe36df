//! A disk that follows its guest: what that touches comes first, the rest after it.
//!
//! The guest may change a block once it is here, durably, and noted in the record, durably, too. So at no
//! crash is anything brought again over what the guest has written, and nothing else needs to be known.

use super::copy::{Copy, Failure};
use super::puller::{FIRST_PAUSE, IDLE, IMPATIENT, LAST_PAUSE, Puller, Target, problem};
use super::record::Record;
use super::source::{self, Todo};
use super::terms::Phase;
use fathom_core::Changes;
use fathom_stack::{Job, words_of};
use fathom_storage::ChangesClient;
use std::cell::Cell;
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

impl Puller {
    /// Has the guest go on here as soon as it comes, and brings the disk after it. The record of that, or None: it is
    /// to stop.
    pub(super) fn run_at_once(mut self, target: &Target) -> Option<Record> {
        let size = target.disk.info().size;
        let words = self.come(size)?;
        let todo = Changes::new(size);
        target.missing.begin(size, &words);
        for range in target.missing.absent(0..size) {
            todo.mark(range.start, range.end - range.start);
        }
        self.now_left(target.missing.left());
        target.latch.open(&target.workers);
        self.enter(Phase::Arriving);
        self.insist(|_| target.disk.activate())?;
        let now = Instant::now();
        let mut rest = Rest {
            todo,
            urgent: Changes::new(size),
            cursor: 0,
            noted: now,
            next: now,
        };
        let is_here = self.bring_again_and_again(target, &mut rest);
        if let Err(error) = target.disk.deactivate() {
            tracing::error!("{error}");
        }
        if !is_here {
            return None;
        }
        self.enter(Phase::Done);
        Some(self.record)
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
        let is_arriving = self.record.is_arriving();
        if !is_arriving && !self.is_wanted() {
            self.enter(Phase::Ready);
            return Ok(None);
        }
        let mut client = self.connect_again(size)?;
        let taken = client.take_over().map_err(problem)?;
        self.client = Some(client);
        if let Err(refused) = taken {
            self.shared.state().status.problem = Some(refused.to_string());
            return Ok(None);
        }
        let words = words_of(size);
        if !is_arriving {
            let begun = self.record.begin_arriving(words);
            begun.map_err(|error| self.unwritten(&error))?;
        }
        let noted = self.record.noted(words);
        noted.map(Some).map_err(|error| self.unwritten(&error))
    }

    /// What has changed there does not matter: it is asked for when nothing changes any more.
    fn connect_again(&mut self, size: u64) -> Result<ChangesClient, Failure> {
        if let Some(client) = self.client.take() {
            return Ok(client);
        }
        let (uri, id) = (&self.terms.source, self.record.id());
        let connected = source::connect(uri, id, &mut Todo::new(size));
        connected.map(|(client, _)| client).map_err(problem)
    }

    /// False: it is to stop.
    fn bring_again_and_again(&mut self, target: &Target, rest: &mut Rest) -> bool {
        let mut pause = FIRST_PAUSE;
        loop {
            let begin = Instant::now();
            match self.bring(target, rest) {
                Ok(()) => return true,
                Err(Failure::Stopped) => return false,
                Err(Failure::Problem(problem)) => {
                    if begin.elapsed() > LAST_PAUSE {
                        pause = FIRST_PAUSE;
                    }
                    target.missing.set_hopeless(true);
                    self.fails(&problem, pause);
                    pause = (pause * 2).min(LAST_PAUSE);
                }
            }
            if self.is_over() {
                return false;
            }
        }
    }

    /// Nobody is here any more who may wait for something.
    fn is_over(&self) -> bool {
        let state = self.shared.state();
        state.stop && !state.wanted
    }

    /// Until all is here, and noted.
    fn bring(&mut self, target: &Target, rest: &mut Rest) -> Result<(), Failure> {
        let size = target.disk.info().size;
        let mut client = self.connect_again(size)?;
        // Nobody has had it there meanwhile.
        let taken = client.take_over().map_err(problem)?;
        taken.map_err(problem)?;
        self.client = Some(client);
        let disk = Arc::new(source::open(&self.terms.source).map_err(problem)?);
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
            rate: None,
            next: Cell::new(Instant::now()),
            stops: &stops,
            slice: SLICE,
        };
        target.missing.set_hopeless(false);
        self.shared.state().status.problem = None;
        loop {
            if stops() {
                return Err(Failure::Stopped);
            }
            let left = target.missing.left();
            self.now_left(left);
            let is_due = rest.noted.elapsed() > NOTE || left == 0;
            if is_due || target.missing.has_writers() {
                self.note(&copy, target)?;
                rest.noted = Instant::now();
                if left == 0 {
                    let noted = self.record.set_taken();
                    return noted.map_err(|error| self.unwritten(&error));
                }
            }
            let goes_on = !self.shared.stops() && left > 0;
            let wait = match goes_on {
                true => rest
                    .next
                    .saturating_duration_since(Instant::now())
                    .min(LOOK),
                false => LOOK,
            };
            let copied = match target.missing.wanted(wait) {
                Some(range) => bring_first(&copy, target, rest, range)?,
                None if goes_on && rest.next <= Instant::now() => {
                    let copied = bring_some(&copy, target, rest)?;
                    if let Some(rate) = self.terms.rate {
                        let time = Duration::from_secs_f64(copied as f64 / rate as f64);
                        rest.next = Instant::now() + time.min(Duration::from_secs(60));
                    }
                    copied
                }
                None => 0,
            };
            self.has_copied(copied);
        }
    }

    /// What is here is known after a crash, too, from now on.
    fn note(&self, copy: &Copy, target: &Target) -> Result<(), Failure> {
        let words = target.missing.unnoted();
        if words.is_empty() {
            return Ok(());
        }
        let errno = copy.job.flush(copy.target);
        if errno != 0 {
            let error = io::Error::from_raw_os_error(errno);
            return Err(problem(format!("the disk cannot be flushed: {error}")));
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
    range: Range<u64>,
) -> Result<u64, Failure> {
    let absent = target.missing.absent(range);
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
    let regions = match before < rest.cursor {
        true => vec![before..rest.cursor],
        // Once around.
        false => vec![before..size, 0..rest.cursor],
    };
    for region in regions {
        have_come(target, &rest.todo, region);
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
