//! The thread that brings up what is below.

use super::compare::{Compare, Side};
use super::terms::{Below, Terms};
use crate::copy::Pace;
use crate::following::{Gone, STOPPED, Shared, Tell};
use crate::name::Name;
use crate::source::{InUse, Source};
use fathom_core::{Disk, DiskError, Op};
use fathom_formats::served::{BesideDisk, ImageDisk, MapExtent};
use fathom_stack::{Ask, Client, Job, Pages};
use fathom_units::cause;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Bytes that are read at once, and how many such reads are under way.
const PIECE: u64 = 1 << 20;
const DEPTH: usize = 8;

/// So many bytes are looked up in tables at once.
const MAPPED: usize = 16 << 30;

pub(super) struct Streamer {
    pub(super) source: Source,
    pub(super) image: Arc<ImageDisk>,
    /// The disk that copies on read.
    pub(super) beside: Arc<BesideDisk>,
    pub(super) terms: Terms,
    pub(super) shared: Arc<Shared>,
    pub(super) tell: Tell,
}

/// Why it does not go on.
enum Halt {
    /// It is to end, or to let go of the disk.
    Asked,
    /// For the user.
    Problem(String),
}

impl From<String> for Halt {
    fn from(problem: String) -> Halt {
        Halt::Problem(problem)
    }
}

/// What one pass has under way.
struct Pass<'a> {
    job: &'a Job,
    beside: &'a Client,
    /// Tells what is the same in the other image.
    compare: Option<Compare<'a>>,
    pace: Pace,
    in_flight: usize,
    free: Vec<Pages>,
}

impl Streamer {
    /// Until it is over, when no disk is in use by it any more.
    pub(super) fn run(self, other: Option<InUse>) {
        let (disk, tell) = (&self.source.disk, &self.tell);
        let outcome = self.shared.work_on(disk, tell, || self.stream());
        drop(other);
        self.shared.conclude(outcome, tell);
    }

    /// While the disk is in use. (Whatever others do to the image between two passes: each looks at all of it.)
    fn stream(&self) -> Result<Gone, String> {
        let error = |error: DiskError| error.to_string();
        self.image.check_images(0..1).map_err(error)?;
        let engine = self.source.engine;
        let mut job = self.shared.job();
        let mut client = |disk: Arc<dyn Disk>| job.client(disk, engine).map_err(error);
        let beside = client(self.beside.clone())?;
        let (ours, theirs) = match &self.terms.below {
            Below::Other { disk, .. } => (
                Some(client(self.source.disk.clone())?),
                Some(client(disk.clone())?),
            ),
            Below::Nothing | Below::Own { .. } => (None, None),
        };
        let compare = ours.as_ref().zip(theirs.as_ref());
        let compare = compare.map(|(ours, theirs)| Compare {
            job: &job,
            ours: Side {
                disk: ours,
                name: "the disk",
            },
            theirs: Side {
                disk: theirs,
                name: "the other image",
            },
        });
        let mut pass = Pass {
            job: &job,
            beside: &beside,
            compare,
            pace: Pace::new(self.shared.rate.clone()),
            in_flight: 0,
            free: Vec::new(),
        };
        let passed = self.pass(&mut pass);
        // (Whatever has come of it, what has begun ends.)
        let ended = self.await_all(&mut pass);
        match passed.and(ended) {
            Ok(()) => self.name_below(&job, &beside).map(|()| Gone::Done),
            Err(Halt::Problem(problem)) => Err(problem),
            Err(Halt::Asked) if self.shared.state().stop => {
                // What is in flight on the disk's own images ends here. Then only reads of the other image may be left,
                // which nobody waits for: that image is not the disk's.
                drop(pass);
                drop((beside, ours));
                let release = Box::new(|| ());
                self.shared.can_be_abandoned(None, release, STOPPED);
                Err(STOPPED.into())
            }
            Err(Halt::Asked) => {
                // (The other image may not answer any more; who has it is waited for below.)
                self.shared.let_go();
                Ok(Gone::Away)
            }
        }
    }

    fn check(&self) -> Result<(), Halt> {
        let state = self.shared.state();
        match state.stop || state.leaves() {
            true => Err(Halt::Asked),
            false => Ok(()),
        }
    }

    fn pass(&self, pass: &mut Pass<'_>) -> Result<(), Halt> {
        let failed = |error: DiskError| format!("cannot read the images: {error}");
        let size = self.source.disk.info().size;
        let mut mapper = self.image.mapper().map_err(failed)?;
        for from in (0..size).step_by(MAPPED) {
            let to = size.min(from + MAPPED as u64);
            for extent in mapper.extents(from..to, self.terms.below.layers()) {
                self.check()?;
                let extent = extent.map_err(failed)?;
                let range = extent.start..extent.start + extent.len;
                if self.is_to_come(&extent) {
                    self.bring(pass, range)?;
                } else {
                    self.shared.state().status.left = size - range.end;
                }
            }
        }
        Ok(())
    }

    /// Whether it would read as something else, or may, with the other image below.
    fn is_to_come(&self, extent: &MapExtent) -> bool {
        let is_own = extent.present && extent.depth == 0;
        !is_own
            && match &self.terms.below {
                Below::Nothing => !extent.zero,
                // (Behind the end of a short image there are zeroes, whatever is below it.)
                Below::Own { .. } => !extent.is_below(),
                Below::Other { .. } => true,
            }
    }

    fn bring(&self, pass: &mut Pass<'_>, range: Range<u64>) -> Result<(), Halt> {
        let size = self.source.disk.info().size;
        let mut at = range.start;
        while at < range.end {
            self.check()?;
            let mut end = range.end.min((at / PIECE + 1) * PIECE);
            let mut differs = true;
            if let Some(compare) = &pass.compare {
                let looked = compare.look(at..range.end, &|| self.check().is_err());
                (differs, end) = looked?.ok_or(Halt::Asked)?;
            }
            if differs {
                self.begin(pass, at..end)?;
            }
            at = end;
            self.shared.state().status.left = size - at;
        }
        Ok(())
    }

    /// Has a piece read, when there is room for it.
    fn begin(&self, pass: &mut Pass<'_>, range: Range<u64>) -> Result<(), Halt> {
        while pass.in_flight == DEPTH || !pass.pace.may_begin() {
            self.check()?;
            self.await_one(pass)?;
        }
        let pages = pass
            .free
            .pop()
            .map_or_else(|| Pages::new(PIECE as usize), Ok);
        let pages = pages.map_err(|error| format!("no memory to copy data: {}", cause(error)))?;
        let len = range.end - range.start;
        let ask = Ask::new(Op::Read, range.start, len, Some(pages));
        pass.beside.ask(ask);
        pass.in_flight += 1;
        pass.pace.has_begun(len);
        Ok(())
    }

    /// Waits for one of them, for a moment.
    fn await_one(&self, pass: &mut Pass<'_>) -> Result<(), Halt> {
        let Some(answer) = pass.job.wait_for(pass.pace.patience()) else {
            return Ok(());
        };
        if answer.client != pass.beside.number() {
            // (Nobody waits for it any more.)
            return Ok(());
        }
        pass.in_flight -= 1;
        if answer.errno != 0 {
            let error = io::Error::from_raw_os_error(answer.errno);
            return Err(Halt::Problem(format!("cannot copy: {}", cause(error))));
        }
        self.shared.state().status.copied += answer.ask.len;
        pass.free.extend(answer.ask.pages);
        Ok(())
    }

    fn await_all(&self, pass: &mut Pass<'_>) -> Result<(), Halt> {
        let mut outcome = Ok(());
        while pass.in_flight > 0 {
            outcome = outcome.and(self.await_one(pass));
        }
        outcome
    }

    /// All that it takes is the image's own: once that is durable, the image names the other one.
    fn name_below(&self, job: &Job, beside: &Client) -> Result<(), String> {
        let errno = job.flush(beside);
        if errno != 0 {
            let error = io::Error::from_raw_os_error(errno);
            return Err(format!("cannot flush the image: {}", cause(error)));
        }
        let backing = self.terms.below.name().map(Name::backing);
        self.image
            .set_backing(0, backing)
            .map_err(|error| error.to_string())
    }
}
