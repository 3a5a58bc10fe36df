//! The thread that copies data of intermediate images into the image below them.

use super::terms::Terms;
use crate::above;
use crate::copy::{Copy, Failure, Pace};
use crate::following::{Gone, Next, STOPPED, Shared, Tell};
use crate::source::Source;
use fathom_core::{Changes, Disk, DiskError};
use fathom_formats::served::{ImageDisk, SideView};
use fathom_stack::{Client, Job};
use fathom_units::cause;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Interval between updates of the progress.
const SLICE: Duration = Duration::from_millis(100);

pub(super) struct Committer {
    pub(super) source: Source,
    pub(super) image: Arc<ImageDisk>,
    /// The disk as seen from the topmost intermediate image.
    pub(super) middle: Arc<SideView>,
    /// The disk as seen from the image below the intermediate images.
    pub(super) below: Arc<SideView>,
    pub(super) terms: Terms,
    pub(super) shared: Arc<Shared>,
    pub(super) tell: Tell,
}

impl Committer {
    /// Runs the job until it is over; it does not use the disk any more then.
    pub(super) fn run(self) {
        let (disk, tell) = (&self.source.disk, &self.tell);
        let outcome = self.shared.work_on(disk, tell, || self.commit());
        self.shared.conclude(outcome, tell);
    }

    /// Makes one pass while the disk is in use.
    ///
    /// Others may change the images between two passes, so each pass copies all data.
    fn commit(&self) -> Result<Gone, String> {
        let checked = self
            .image
            .check_images(self.middle.depth()..self.below.depth());
        checked.map_err(|error| error.to_string())?;
        let engine = self.source.engine;
        let mut job = self.shared.job();
        let mut client = |disk: &Arc<SideView>| {
            let client = job.client(disk.clone(), engine);
            client.map_err(|error: DiskError| error.to_string())
        };
        let (middle, below) = (client(&self.middle)?, client(&self.below)?);
        let stops = || self.shared.ends_pass();
        let copy = Copy {
            job: &job,
            source: &middle,
            target: &below,
            pace: Pace::new(self.shared.rate.clone()),
            stops: &stops,
            slice: SLICE,
        };
        match self.copy(&copy)? {
            Gone::Done => self.name_below(&job, &below).map(|()| Gone::Done),
            Gone::Away => Ok(Gone::Away),
        }
    }

    fn copy(&self, copy: &Copy<'_>) -> Result<Gone, String> {
        let todo = Changes::new(self.below.info().size);
        let mapper = self.image.mapper_from(self.middle.depth());
        let mut mapper = mapper.map_err(|error| error.to_string())?;
        let layers = self.below.depth() - self.middle.depth();
        if !above::mark(&mut mapper, layers, copy.stops, &todo)? {
            return match self.shared.state().next() {
                Next::Stop => Err(STOPPED.into()),
                _ => Ok(Gone::Away),
            };
        }
        let mut cursor = 0;
        loop {
            match self.shared.state().next() {
                Next::Stop => return Err(STOPPED.into()),
                Next::Leave => return Ok(Gone::Away),
                Next::Copy | Next::CopyLast => {}
            }
            let left = todo.changed_bytes();
            self.shared.state().status.left = left;
            if left == 0 {
                return Ok(Gone::Done);
            }
            match copy.slice(&todo, &mut cursor) {
                Ok(copied) => self.shared.state().status.copied += copied,
                // The next iteration finds out why.
                Err(Failure::Stopped) => {}
                Err(Failure::Problem(problem)) => return Err(problem),
            }
        }
    }

    /// Flushes the lower image, then names it as the backing image of the image above the middle.
    fn name_below(&self, job: &Job, below: &Client) -> Result<(), String> {
        let errno = job.flush(below);
        if errno != 0 {
            let error = io::Error::from_raw_os_error(errno);
            return Err(format!("cannot flush the backing image: {}", cause(error)));
        }
        let above = self.middle.depth() - 1;
        let named = (self.image).set_backing(above, Some(self.terms.below.backing()));
        named.map_err(|error| error.to_string())
    }
}
