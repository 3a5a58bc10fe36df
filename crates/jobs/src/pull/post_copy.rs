//! Post-copy: the guest runs here at once; the data that it accesses is copied first.
//!
//! The guest may change a block once the block is durable here and its bit in the record is
//! durable. Therefore a crash never causes a block to be copied over data that the guest has
//! written.

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

/// Time for copying the remaining data before waiting requests are checked.
const SLICE: Duration = Duration::from_millis(10);

/// Interval between updates of the record, unless a writer waits for one.
const NOTE: Duration = Duration::from_secs(1);

/// Maximum wait for requests of the guest when there is nothing else to do.
const LOOK: Duration = Duration::from_millis(50);

/// Maximum pause between two slices, even at a very low rate.
const LONGEST: Duration = Duration::from_secs(60);

/// Length in bytes of a query for changes that only checks the connection.
const LOOKED_AT: u64 = 1 << 20;

/// Maximum number of runs taken from a change map per call.
const RUNS: usize = 256;

/// The data that is still to be copied.
struct Rest {
    todo: Changes,
    /// The part of it for which a request waits; empty except while it is copied.
    urgent: Changes,
    /// Offset in bytes where copying continues.
    cursor: u64,
    noted: Instant,
    /// When the rate allows the next slice.
    next: Instant,
}

impl Rest {
    /// Creates the map of all missing data.
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

    /// Marks again the blocks that the record does not have yet; the guest cannot have changed
    /// them.
    fn take_back(&self, missing: &Missing) {
        for part in missing.forget_unnoted() {
            self.todo.mark(part.start, part.end - part.start);
        }
    }
}

impl Puller {
    /// Takes the disk over as soon as the guest wants it, lets the guest run, then copies the disk.
    ///
    /// Returns the record of the complete move, or `None` if the job must stop.
    pub(super) fn run_at_once(mut self, target: &Target) -> Option<Record> {
        let size = target.disk.info().size;
        self.forget_todo();
        let words = self.come(size)?;
        target.missing.begin(size, &words);
        self.now_left(target.missing.left());
        target.latch.open(&target.workers);
        self.enter(Phase::Arriving);
        if self.follow(target).is_none() {
            // No thread copies data for waiting requests any more, so these fail.
            target.missing.set_hopeless(true);
            return None;
        }
        self.enter(Phase::Done);
        Some(self.record)
    }

    /// Copies until all data is here. Returns `None` if the job must stop.
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

    /// Takes the disk over and returns the map of present blocks. `None`: the job must stop.
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
                // Checks that the server still responds.
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

    /// Connects again. Returns `true` as well if the server does not know of this move.
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

    /// Returns whether the job must stop and no guest can wait for data.
    fn is_over(&self) -> bool {
        let state = self.shared.state();
        state.stop && !state.wanted
    }

    /// Copies until all data is here and recorded.
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
                // Checks that the server still has the disk, unchanged, before the data is
                // recorded.
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

    /// Connects to the server with the remaining data, and makes sure that no guest uses it there.
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

    /// Copies the data for which requests wait, or else some of the remaining data.
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

    /// Flushes the disk, then records durably which blocks are here.
    fn note(&self, copy: &Copy, target: &Target, rest: &Rest) -> Result<(), Failure> {
        let words = target.missing.unnoted();
        if words.is_empty() {
            return Ok(());
        }
        let errno = copy.job.flush(copy.target);
        if errno != 0 {
            // Data written before the failed flush may be lost.
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

/// Copies the data for which requests wait, and returns the number of bytes.
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
        // These blocks must not be copied again: the guest may change them after the next record.
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

/// Copies some of the remaining data and returns the number of bytes.
fn bring_some(copy: &Copy, target: &Target, rest: &mut Rest) -> Result<u64, Failure> {
    let (before, size) = (rest.cursor, rest.todo.size());
    let copied = copy.slice(&rest.todo, &mut rest.cursor)?;
    if before < rest.cursor {
        have_come(target, &rest.todo, before..rest.cursor);
    } else {
        // The cursor has wrapped around.
        have_come(target, &rest.todo, before..size);
        have_come(target, &rest.todo, 0..rest.cursor);
    }
    Ok(copied)
}

/// Reports all blocks of the region that are not marked in `todo` as present.
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
