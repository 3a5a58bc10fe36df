//! Moves of disks between servers, from this server and to this server.

use super::shared_disk::{Guard, SharedDisk};
use fathom_core::{Disk, Part, Parts};
use fathom_exports::nbd::Moving;
use fathom_host::options::DiskOptions;
use fathom_jobs::pull::{Going, Gone, Phase, Prepared, Pull, Target, Terms};
use fathom_metrics::{Events, Happened, PullInfo};
use fathom_stack::Stack;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Names of the moves among a disk's parts: from this server, and to this server.
const GOES: &str = "move";
const COMES: &str = "pull";

/// The moves of one disk.
pub struct Moves {
    /// The move to another server, if such a server may take the disk over.
    pub going: Option<Arc<Moving>>,
    /// The move to this server, if the disk is to be moved here and has not been moved completely.
    coming: Option<Arc<Coming>>,
    /// Records when another server takes the disk over. Only for a disk that was moved to this
    /// server before.
    watch: Option<Pull>,
}

/// A move to this server. The `Pull` is present once the move has begun.
#[derive(Default)]
struct Coming(OnceLock<Pull>);

impl Moves {
    pub fn new(options: &DiskOptions, stack: &Stack) -> Moves {
        let goes = options
            .nbd
            .as_ref()
            .is_some_and(|export| export.may_be_moved);
        let moving = || Moving::new(stack.disk.clone(), stack.workers.clone());
        Moves {
            going: goes.then(moving),
            coming: stack.hold.is_some().then(Arc::default),
            watch: None,
        }
    }

    /// Returns the guards that are notified of the front-end.
    pub fn guards(&self) -> Vec<Arc<dyn Guard>> {
        let going = self.going.clone().map(|moving| moving as Arc<dyn Guard>);
        let coming = self.coming.clone().map(|coming| coming as Arc<dyn Guard>);
        going.into_iter().chain(coming).collect()
    }

    pub fn add_to(&self, parts: &mut Parts) {
        if let Some(moving) = &self.going {
            parts.add(GOES, moving.clone());
        }
        if let Some(coming) = &self.coming {
            parts.add(COMES, coming.clone());
        }
    }

    /// Whether another server has taken the disk over.
    pub fn has_gone(&self) -> bool {
        self.going
            .as_ref()
            .is_some_and(|going| going.taken().is_some())
    }

    /// Returns the progress of the move to this server, if such a move has begun.
    pub fn info(&self) -> Option<PullInfo> {
        let pull = self.coming()?;
        Some(PullInfo::new(pull.status(), pull.rate()))
    }

    /// Returns the move to this server, if such a move has begun.
    pub fn coming(&self) -> Option<&Pull> {
        self.coming.as_ref()?.0.get()
    }

    /// Fails while the disk is moving, in either direction.
    pub fn check_handover(&self) -> Result<(), String> {
        let going = self
            .going
            .as_ref()
            .map_or(Ok(()), |going| going.check_handover());
        going.and_then(|()| {
            self.coming
                .as_ref()
                .map_or(Ok(()), |coming| coming.check_handover())
        })
    }

    /// Begins to end the move to this server, if one is in progress. Does not wait for the end.
    pub fn begin_stop(&self) {
        self.pull().map(Pull::begin_stop);
    }

    /// Ends the move to this server. Returns false if the move still uses the disk at `deadline`.
    pub fn end(&self, deadline: Instant) -> bool {
        self.pull().is_none_or(|pull| pull.end(deadline))
    }

    fn pull(&self) -> Option<&Pull> {
        self.coming().or(self.watch.as_ref())
    }

    /// Returns the requests of other servers to take the disk over, for the thread that records
    /// such a take-over.
    fn gone(&self) -> Option<Gone> {
        let going = self.going.clone()?;
        // From now on, a take-over must be recorded before it succeeds.
        going.note_by(Arc::new(|| ()));
        Some(Box::new(Leaving(going)))
    }

    /// Begins to record when another server takes over a disk that was moved here before. The error
    /// is for the user.
    pub fn has_come(&mut self, prepared: Prepared) -> Result<(), String> {
        if let Some(gone) = self.gone() {
            self.watch = Some(prepared.note_going(gone)?);
        }
        Ok(())
    }

    /// Begins the move to this server, if the disk is waiting for such a move. The error is for the
    /// user.
    pub fn begin(
        &self,
        prepared: Prepared,
        stack: &Stack,
        shared: &Arc<SharedDisk>,
        options: &DiskOptions,
        events: &Events,
    ) -> Result<(), String> {
        let (Some(coming), Some(hold)) = (&self.coming, &stack.hold) else {
            return Ok(());
        };
        let target = Target {
            disk: shared.for_job(hold.disk.clone()) as Arc<dyn Disk>,
            engine: options.disk.engine,
            latch: hold.latch.clone(),
            missing: hold.missing.clone(),
            workers: stack.workers.clone(),
        };
        let (events, name) = (events.clone(), options.name.clone());
        let tell = move |phase: Phase| {
            let (disk, phase) = (name.clone(), phase.name().to_owned());
            events.tell(Happened::Pulled { disk, phase });
        };
        let pull = prepared.start(target, Box::new(tell), self.gone())?;
        let _ = coming.0.set(pull);
        Ok(())
    }
}

/// Opens the record of the move to this server, if the options ask for one. The error is for the
/// user.
///
/// The move may have been completed before.
pub fn prepare(terms: Option<&Terms>) -> Result<Option<Prepared>, String> {
    terms.cloned().map(Prepared::new).transpose()
}

/// Adapts [`Moving`] to [`Going`].
struct Leaving(Arc<Moving>);

impl Going for Leaving {
    fn wake_by(&self, wake: Arc<dyn Fn() + Send + Sync>) {
        self.0.note_by(wake);
    }

    fn is_to_be_noted(&self) -> bool {
        self.0.is_to_be_noted()
    }

    fn noted(&self, is_durable: bool) {
        self.0.noted(is_durable);
    }
}

impl Guard for Moving {
    fn comes(&self) -> Result<(), String> {
        self.front_end_comes()
    }

    fn left(&self) {
        self.front_end_left();
    }
}

impl Guard for Coming {
    fn comes(&self) -> Result<(), String> {
        self.0.get().inspect(|pull| pull.want(true));
        Ok(())
    }

    fn left(&self) {
        self.0.get().inspect(|pull| pull.want(false));
    }
}

impl Part for Coming {
    fn check_handover(&self) -> Result<(), String> {
        match self.0.get().is_none_or(Pull::is_done) {
            true => Ok(()),
            false => Err(
                "the disk is being copied from another server; wait until that has ended".into(),
            ),
        }
    }
}
