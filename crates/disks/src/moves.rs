//! Disks that move from one server to another: those that go, and those that come.

use super::shared_disk::{Guard, SharedDisk};
use fathom_core::{Disk, Part, Parts};
use fathom_exports::nbd::Moving;
use fathom_host::options::DiskOptions;
use fathom_jobs::pull::{Going, Gone, Phase, Prepared, Pull, Status, Target, Terms};
use fathom_metrics::{Events, Happened};
use fathom_stack::Stack;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// What they are called among a disk's parts.
const GOES: &str = "move";
const COMES: &str = "pull";

/// How a disk goes and comes.
pub struct Moves {
    /// Another server may take it over.
    pub going: Option<Arc<Moving>>,
    coming: Option<Arc<Coming>>,
    /// Of one that has come, and may go.
    watch: Option<Pull>,
}

/// A disk that comes here, once it has begun to.
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

    /// Who hears of the front-end.
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

    /// It has been taken over by another server.
    pub fn has_gone(&self) -> bool {
        self.going
            .as_ref()
            .is_some_and(|going| going.taken().is_some())
    }

    /// How far one is that comes.
    pub fn status(&self) -> Option<Status> {
        self.coming.as_ref()?.0.get().map(Pull::status)
    }

    /// Refuses while it is on its way.
    pub fn may_go(&self) -> Result<(), String> {
        let going = self.going.as_ref().map_or(Ok(()), |going| going.may_go());
        going.and_then(|()| {
            self.coming
                .as_ref()
                .map_or(Ok(()), |coming| coming.may_go())
        })
    }

    /// Let it be, if it comes; does not wait for it.
    pub fn begin_stop(&self) {
        self.pull().map(Pull::begin_stop);
    }

    /// False: it has not let go of the disk at `deadline`.
    pub fn end(&self, deadline: Instant) -> bool {
        self.pull().is_none_or(|pull| pull.end(deadline))
    }

    fn pull(&self) -> Option<&Pull> {
        let coming = self.coming.as_ref().and_then(|coming| coming.0.get());
        coming.or(self.watch.as_ref())
    }

    /// Who asks for the disk, for whoever notes that it goes.
    fn gone(&self) -> Option<Gone> {
        let going = self.going.clone()?;
        // Until somebody notes that, the disk stays.
        going.note_by(Arc::new(|| ()));
        Some(Box::new(Leaving(going)))
    }

    /// It has come before: note when it goes. The error is for the user.
    pub fn has_come(&mut self, prepared: Prepared) -> Result<(), String> {
        if let Some(gone) = self.gone() {
            self.watch = Some(prepared.note_going(gone)?);
        }
        Ok(())
    }

    /// Have it come. The error is for the user.
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

/// The disk that is to come, or has come before. The error is for the user.
pub fn prepare(terms: Option<&Terms>) -> Result<Option<Prepared>, String> {
    terms.cloned().map(Prepared::new).transpose()
}

/// A disk that another server takes over.
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
    fn may_go(&self) -> Result<(), String> {
        match self.0.get().is_none_or(Pull::is_done) {
            true => Ok(()),
            false => Err(
                "the disk is being copied from another server; wait until that has ended".into(),
            ),
        }
    }
}
