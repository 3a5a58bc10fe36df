//! The thread that copies data of backing images into the top image.

use super::compare::{Compare, Side};
use super::terms::{Below, Terms};
use crate::copy::Pace;
use crate::following::{Gone, Next, STOPPED, Shared, Tell};
use crate::name::Name;
use crate::source::{InUse, Source};
use fathom_core::{AlignedBuffer, Disk, DiskError, Op};
use fathom_formats::served::{ImageDisk, MapExtent, SideView};
use fathom_stack::{Client, DiskRequest, Job};
use fathom_units::cause;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Maximum bytes per read, and maximum number of reads in flight.
const PIECE: u64 = 1 << 20;
const DEPTH: usize = 8;

/// Bytes of the disk looked up in the image tables per call.
const MAPPED: usize = 16 << 30;

pub(super) struct Streamer {
    pub(super) source: Source,
    pub(super) image: Arc<ImageDisk>,
    /// The side view that copies on read.
    pub(super) side_view: Arc<SideView>,
    pub(super) terms: Terms,
    pub(super) shared: Arc<Shared>,
    pub(super) tell: Tell,
}

/// Why a pass ends early.
enum Halt {
    /// The job must stop, or release the disk.
    Asked,
    /// A failure, with a message for the user.
    Problem(String),
}

impl From<String> for Halt {
    fn from(problem: String) -> Halt {
        Halt::Problem(problem)
    }
}

/// The state of one pass.
struct Pass<'a> {
    job: &'a Job,
    side_view: &'a Client,
    /// Finds data that is the same in the other image.
    compare: Option<Compare<'a>>,
    pace: Pace,
    in_flight: usize,
    free: Vec<AlignedBuffer>,
}

impl Streamer {
    /// Runs the job until it is over; it does not use any disk any more then.
    pub(super) fn run(self, other: Option<InUse>) {
        let (disk, tell) = (&self.source.disk, &self.tell);
        let outcome = self.shared.work_on(disk, tell, || self.stream());
        drop(other);
        self.shared.conclude(outcome, tell);
    }

    /// Makes one pass while the disk is in use.
    ///
    /// Others may change the image between two passes, so each pass examines the whole disk.
    fn stream(&self) -> Result<Gone, String> {
        let error = |error: DiskError| error.to_string();
        self.image.check_images(0..1).map_err(error)?;
        let engine = self.source.engine;
        let mut job = self.shared.job();
        let mut client = |disk: Arc<dyn Disk>| job.client(disk, engine).map_err(error);
        let side_view = client(self.side_view.clone())?;
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
            side_view: &side_view,
            compare,
            pace: Pace::new(self.shared.rate.clone()),
            in_flight: 0,
            free: Vec::new(),
        };
        let passed = self.pass(&mut pass);
        // Requests in flight must complete, even if the pass has failed.
        let ended = self.await_all(&mut pass);
        match passed.and(ended) {
            Ok(()) => self.name_below(&job, &side_view).map(|()| Gone::Done),
            Err(Halt::Problem(problem)) => Err(problem),
            Err(Halt::Asked) if self.shared.state().next() == Next::Stop => {
                // Dropping the clients ends all requests to the disk's own images. Only reads of
                // the other image may remain. No user waits for these reads, since that image is
                // not the disk's.
                drop(pass);
                drop((side_view, ours));
                let release = Box::new(|| ());
                self.shared.can_be_abandoned(None, release, STOPPED);
                Err(STOPPED.into())
            }
            Err(Halt::Asked) => {
                // The other image may not respond any more, and dropping its client waits for it.
                // Therefore the disk is released first, with no request to it in flight.
                drop(pass);
                drop((side_view, ours));
                self.shared.let_go();
                Ok(Gone::Away)
            }
        }
    }

    fn check(&self) -> Result<(), Halt> {
        match self.shared.ends_pass() {
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

    /// Returns whether the extent would or might read differently with the new backing image.
    fn is_to_come(&self, extent: &MapExtent) -> bool {
        let is_own = extent.present && extent.depth == 0;
        !is_own
            && match &self.terms.below {
                Below::Nothing => !extent.zero,
                // Beyond the end of a short image the disk reads as zeroes, even if the images
                // below hold data there.
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

    /// Starts to read a piece, as soon as the limits allow it.
    fn begin(&self, pass: &mut Pass<'_>, range: Range<u64>) -> Result<(), Halt> {
        while pass.in_flight == DEPTH || !pass.pace.may_begin() {
            self.check()?;
            self.await_one(pass)?;
        }
        let pages = pass
            .free
            .pop()
            .map_or_else(|| AlignedBuffer::try_new(PIECE as usize), Ok);
        let pages = pages.map_err(|error| format!("no memory to copy data: {}", cause(error)))?;
        let len = range.end - range.start;
        let ask = DiskRequest::new(Op::Read, range.start, len, Some(pages));
        pass.side_view.ask(ask);
        pass.in_flight += 1;
        pass.pace.has_begun(len);
        Ok(())
    }

    /// Waits a short time for one read to complete.
    fn await_one(&self, pass: &mut Pass<'_>) -> Result<(), Halt> {
        let Some(answer) = pass.job.wait_for(pass.pace.patience()) else {
            return Ok(());
        };
        if answer.client != pass.side_view.number() {
            // A reply to an abandoned comparison.
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

    /// Flushes the image, which has all it needs, then writes its new backing image to its header.
    fn name_below(&self, job: &Job, side_view: &Client) -> Result<(), String> {
        let errno = job.flush(side_view);
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
