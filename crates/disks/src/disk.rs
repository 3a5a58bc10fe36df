//! A disk that is served.

mod backup;
mod chain;
mod file;
mod handover;
mod mirror;
mod snapshots;
mod superseded;
mod trace;

use super::backup::Running;
use super::definitions;
use super::inherited::Inherited;
use super::mirror::Running as Mirror;
use super::moves::{self, Moves};
use super::serving::Serving;
use super::shared_disk::SharedDisk;
use super::stream::Running as Stream;
use super::tracer::Tracer;
use fathom_core::{DiskInfo, Looking, SizeWatch, ThreadKind, WorkerHandle};
use fathom_exports::nbd::Export;
use fathom_exports::vhost_user::{Options, Status};
use fathom_exports::{FuseExport, VhostUser, Visit, Watch};
use fathom_filters::Filters;
use fathom_host::options::DiskOptions;
use fathom_host::{Error, Outcome};
use fathom_jobs::Following;
use fathom_jobs::pull::Pull;
use fathom_metrics::{By, Events, Happened};
use fathom_metrics::{FrontEnd, ImageInfo, Info, WorkerInfo};
use fathom_metrics::{QueueInfo, Visits};
use fathom_metrics::{Seen, Watches};
use fathom_sockets::Listener;
use fathom_spec::DiskSpec;
use fathom_stack::{FilterInfo, Injector, Pools, Stack};
use fathom_trace::{Clock, Now, SlowRequest, Summary};
use fathom_units::{Size, redacted};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Name of the trace among a disk's parts.
const TRACE: &str = "trace";

/// Objects that all disks of a server share.
#[derive(Clone, Default)]
pub struct Common {
    pub filters: Arc<Filters>,
    /// Threads that several disks may share.
    pub pools: Arc<Pools>,
    /// Receives the events of all disks.
    pub events: Events,
    /// The directory of the definitions of disks.
    pub definitions: Option<PathBuf>,
}

/// A disk with its front-end's export, its jobs and its trace.
pub struct Served {
    events: Events,
    options: DiskOptions,
    stack: Stack,
    moves: Moves,
    backup: Option<Running>,
    mirror: Option<Mirror>,
    stream: Option<Stream>,
    /// Why the disk has not got its former options back after a job.
    unsettled: Option<String>,
    /// Why the disk's former image is not marked as superseded.
    unmarked: Option<String>,
    shared: Arc<SharedDisk>,
    /// The listener for front-ends, until front-ends are served.
    listener: Option<Listener>,
    vhost_user: Option<Serving<VhostUser>>,
    /// The mounted file, until its programs are served.
    mounted: Option<Arc<FuseExport>>,
    file: Option<Serving<FuseExport>>,
    trace: Option<Tracer>,
    visits: Arc<Visits>,
    alarms: Watches,
    /// Size that was reported last, in bytes.
    size: u64,
    inherited: Inherited,
    since: Instant,
}

impl Served {
    /// Opens the disk and starts its workers. Front-ends from `listener`, if there is one, are
    /// served from [`Served::serve`] on.
    pub fn open(
        options: DiskOptions,
        listener: Option<Listener>,
        shared: Common,
    ) -> Result<Served, Error> {
        let Common {
            filters,
            pools,
            events,
            definitions,
        } = shared;
        definitions::forget_unfinished(&options, definitions.as_deref());
        let coming = moves::prepare(options.pull.as_ref()).map_err(Error::Options)?;
        let held = coming.as_ref().is_some_and(|coming| !coming.is_here());
        let any_bytes = options.nbd.is_some() || options.fuse.is_some();
        let mut stack = Stack::open(&options.disk, any_bytes, held, &filters, &pools)?;
        let mut moves = Moves::new(&options, &stack);
        moves.add_to(&mut stack.parts);
        let name = options.disk.location.to_string();
        let goes = options.vhost_user.is_some() && options.disk.location.kind().locks;
        // A server that takes the disk over needs its connection after the front-end has detached.
        let stay = moves.going.is_some();
        let shared = SharedDisk::new(stack.disk.clone(), name, goes, stay, moves.guards());
        if let Some(coming) = coming {
            let begun = match held {
                true => moves.begin(coming, &stack, &shared, &options, &events),
                false => moves.has_come(coming),
            };
            begun.map_err(Error::Options)?;
        }
        let alarms = Watches::new(&options.alarms);
        let mut served = Served {
            size: stack.disk.info().size,
            events,
            options,
            stack,
            moves,
            backup: None,
            mirror: None,
            stream: None,
            unsettled: None,
            unmarked: None,
            shared,
            listener,
            vhost_user: None,
            mounted: None,
            file: None,
            trace: None,
            visits: Arc::default(),
            alarms,
            inherited: Inherited::default(),
            since: Instant::now(),
        };
        if let Some(lent) = served.options.disk.handover_state.take(TRACE) {
            let trace = Tracer::resume(lent, served.stack.workers.len());
            served.trace = Some(trace.map_err(Error::Options)?);
        } else if let Some(path) = served.options.trace.clone() {
            served.trace = Some(served.start_trace(&path)?);
        }
        served.mount()?;
        Ok(served)
    }

    /// Sets the function that is called when another program may have resized the disk.
    pub fn watch_size(&self, watch: SizeWatch) {
        self.stack.disk.watch_size(watch);
    }

    /// Serves front-ends and the programs that use the disk's file, on threads of their own.
    pub fn serve(&mut self) -> Result<(), Error> {
        self.serve_file()?;
        let Some(listener) = self.listener.take() else {
            return Ok(());
        };
        self.serve_by(move |export| export.serve(&listener))
    }

    fn serve_by(
        &mut self,
        serve: impl FnOnce(&VhostUser) -> std::io::Result<()> + Send + 'static,
    ) -> Result<(), Error> {
        let failed = Error::io("cannot serve front-ends");
        let export = Arc::new(self.export().map_err(&failed)?);
        let kind = ThreadKind::Session;
        let serving = Serving::start(kind, "vhost-user", export, serve, VhostUser::stop);
        self.vhost_user = Some(serving.map_err(failed)?);
        Ok(())
    }

    /// Creates the export for front-ends, which is not served yet.
    fn export(&self) -> std::io::Result<VhostUser> {
        let (options, stack) = (&self.options, &self.stack);
        let mut export_options = Options {
            max_queues: options.queues,
            packed: options.packed,
            wrap: stack.injector.as_ref().and_then(Injector::wrap_source),
            watch: Some(self.watch(By::VhostUser)),
            ..Options::default()
        };
        if let Some(serial) = &options.serial {
            export_options.serial.clone_from(serial);
        }
        let (disk, workers) = (self.shared.for_front_end(), stack.workers.clone());
        VhostUser::new(disk, workers, export_options)
    }

    /// Returns the export for front-ends, if front-ends are served.
    pub fn export_shared(&self) -> Option<Arc<VhostUser>> {
        self.vhost_user.as_ref().map(Serving::shared)
    }

    /// Returns why the disk must stay with its users: the disk is moving, or a job is in progress.
    pub fn may_not_be_disturbed(&self) -> Option<String> {
        let job = self.job_of_others().map(str::to_owned);
        self.moves.check_handover().err().or(job)
    }

    /// Returns the move of the disk to this server, if such a move has begun.
    pub fn coming(&self) -> Option<&Pull> {
        self.moves.coming()
    }

    /// The options that the disk is served with, without options at their defaults.
    pub fn spec(&self) -> &DiskSpec {
        &self.options.spec
    }

    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// Returns the disk's NBD export, or `None` if the disk is not exported.
    pub fn nbd_export(&self) -> Option<Export> {
        let options = self.options.nbd.as_ref()?;
        let export = Export::new(
            options.name.clone(),
            options.description.clone(),
            self.shared.for_clients(),
            self.stack.workers.clone(),
        );
        let export = export.watched(self.watch(By::Nbd));
        Some(match &self.moves.going {
            Some(moving) => export.movable(moving.clone()),
            None => export,
        })
    }

    /// Returns a function that counts and reports the users that attach and detach through this
    /// export.
    fn watch(&self, by: By) -> Watch {
        let (events, disk) = (self.events.clone(), self.name().to_owned());
        let visits = self.visits.clone();
        Arc::new(move |visit, client| {
            match (visit, by) {
                (Visit::Attached, By::VhostUser) => visits.of_front_end(),
                (Visit::Attached, By::Nbd) => visits.of_client(),
                (Visit::Attached, By::Fuse) | (Visit::Detached, _) => {}
            }
            let (disk, client) = (disk.clone(), client.to_owned());
            events.tell(match visit {
                Visit::Attached => Happened::Attached { disk, by, client },
                Visit::Detached => Happened::Detached { disk, by, client },
            });
        })
    }

    /// Returns the name of the disk's NBD export.
    pub fn export_name(&self) -> Option<&str> {
        self.options.nbd.as_ref().map(|export| export.name.as_str())
    }

    pub fn shared(&self) -> &Arc<SharedDisk> {
        &self.shared
    }

    /// Returns one line about the disk and its exports.
    pub fn describe(&self) -> String {
        let (stack, disk) = (&self.stack, &self.options.disk.location);
        let size = Size(stack.disk.info().size);
        let mut line = format!("serving {disk} ({size}, {}, {}", stack.format, stack.engine);
        if let Some(cache) = self.cache() {
            write!(line, ", cache={cache}").expect("a String takes it");
        }
        if let Some(pool) = &self.options.disk.pool {
            write!(line, ", pool {pool}").expect("a String takes it");
        }
        line.push(')');
        if let Some(socket) = &self.options.vhost_user {
            write!(line, " on vhost-user {socket}").expect("a String takes it");
        }
        if let Some(export) = self.export_name() {
            write!(line, " by NBD as {export:?}").expect("a String takes it");
        }
        if let Some(fuse) = &self.options.fuse {
            write!(line, " as file {}", fuse.file.display()).expect("a String takes it");
        }
        line
    }

    /// Returns a file descriptor that is readable after the thread that serves front-ends has
    /// ended.
    pub fn ended(&self) -> Option<BorrowedFd<'_>> {
        self.vhost_user.as_ref().map(Serving::ended)
    }

    /// Begins to end the jobs, and to disconnect the front-end when its requests in flight are
    /// complete. Does not wait.
    pub fn begin_stop(&self) {
        self.moves.begin_stop();
        self.backup.iter().for_each(Running::begin_stop);
        self.following().for_each(Following::begin_stop);
        self.vhost_user.iter().for_each(Serving::begin_stop);
        self.file.iter().for_each(Serving::begin_stop);
    }

    /// Waits for the end of the jobs and of the front-end's export. None: not all of them have
    /// ended at `deadline`.
    pub fn end(&mut self, deadline: Instant) -> Option<Result<(), Error>> {
        let ended = match &mut self.vhost_user {
            Some(serving) => serving.end(deadline)?,
            None => Ok(()),
        };
        let file = match &mut self.file {
            Some(serving) => serving.end(deadline)?,
            None => Ok(()),
        };
        let is_over = |backup: &Running| backup.wait(deadline);
        if !self.moves.end(deadline)
            || !self.backup.as_ref().is_none_or(is_over)
            || !self.following().all(|following| following.end(deadline))
        {
            return None;
        }
        let ended = ended.map_err(Error::io("front-ends are no longer served"));
        Some(ended.and(file.map_err(Error::io("the mounted file is no longer served"))))
    }

    /// Stops the workers, which have no clients any more. False: not all workers have stopped at
    /// `deadline`.
    pub fn end_workers(&self, deadline: Instant) -> bool {
        let workers = &self.stack.workers;
        workers.iter().for_each(WorkerHandle::stop);
        workers.iter().all(|w| w.wait_until_stopped(deadline))
    }

    /// Returns the statistics of the disk's requests, and of injected delays (`--inject`).
    pub fn outcome(&self) -> Outcome {
        let injector = self.stack.injector.as_ref();
        Outcome {
            summary: self.summary(),
            injected: injector.and_then(|injector| injector.outcome()),
        }
    }

    pub fn summary(&self) -> Summary {
        let workers = self.stack.workers.iter();
        Summary {
            in_flight: self.in_flight(),
            refused: self.refused(),
            seconds: self.seconds(),
            ..Summary::of(
                workers
                    .map(WorkerHandle::histograms)
                    .chain(self.inherited.histograms()),
                Clock::get(),
            )
        }
    }

    /// Returns the running virtqueues.
    pub fn queues(&self) -> Vec<QueueInfo> {
        let workers = self.stack.workers.iter();
        let sources = workers.flat_map(|worker| worker.counters().sources());
        let mut queues: Vec<_> = sources.filter_map(|one| QueueInfo::of(&one)).collect();
        queues.sort_by_key(|queue| queue.queue);
        queues
    }

    /// Returns the numbers of front-ends and clients that have attached.
    pub fn visits(&self) -> &Visits {
        &self.visits
    }

    pub fn in_flight(&self) -> u64 {
        let counters = || self.stack.workers.iter().map(WorkerHandle::counters);
        // (Answered requests are read first: every answered request was counted as taken before.)
        let answered: u64 = counters().map(|one| one.answered.get()).sum();
        let taken: u64 = counters().map(|one| one.taken.get()).sum();
        taken.saturating_sub(answered)
    }

    /// Returns at most `most` of the slowest recent requests, the slowest first.
    pub fn slow(&self, most: usize) -> Vec<SlowRequest> {
        let now = Now::read();
        let workers = self.stack.workers.iter();
        let own = workers.flat_map(|worker| {
            let mut slow = worker.histograms().slow();
            slow.truncate(most);
            slow
        });
        let own = own.map(|record| SlowRequest::of(&record, &now));
        let mut all: Vec<_> = own.chain(self.inherited.slow().iter().cloned()).collect();
        all.sort_by_key(|one| std::cmp::Reverse(one.total_ns));
        all.truncate(most);
        all
    }

    /// Returns the time of the next check of the disk's alarms.
    pub fn next_look_at_alarms(&self) -> Option<Instant> {
        self.alarms.next()
    }

    /// Checks the alarms that are due.
    pub fn look_at_alarms(&mut self) {
        let mut alarms = std::mem::take(&mut self.alarms);
        let seen = Seen {
            workers: &self.stack.workers,
            in_flight: self.in_flight(),
            summary: &|| self.summary(),
            slow: &|most| self.slow(most),
        };
        alarms.look(self.name(), &seen, &self.events);
        self.alarms = alarms;
    }

    fn refused(&self) -> u64 {
        let counters = self.stack.workers.iter().map(WorkerHandle::counters);
        let refused: u64 = counters.map(|one| one.refused.get()).sum();
        refused + self.inherited.refused()
    }

    /// Time that the counters cover, in seconds. None: a predecessor did not report its time.
    fn seconds(&self) -> Option<f64> {
        let before = self.inherited.seconds();
        before.map(|before| before + self.since.elapsed().as_secs_f64())
    }

    /// Returns the counters of the disk's workers, including those of the predecessor's workers.
    fn workers_info(&self) -> Vec<WorkerInfo> {
        let is_alone = self.options.disk.pool.is_none();
        let workers = self.stack.workers.iter().enumerate();
        let info = workers.map(|(index, worker)| {
            let own = WorkerInfo::of(worker, is_alone);
            self.inherited.add_to(index, own)
        });
        info.collect()
    }

    fn cache(&self) -> Option<&'static str> {
        let is_file = self.stack.file.is_some();
        is_file.then(|| self.options.disk.cache.name())
    }

    /// Returns the state of the disk. The caller adds the state of the server.
    pub fn info(&self) -> Info {
        let DiskInfo {
            size,
            block_size,
            read_only,
            ..
        } = self.stack.disk.info();
        let export = self.vhost_user.as_ref().map(Serving::export);
        let status = export.map_or(Status::default(), VhostUser::status);
        let (options, stack) = (&self.options, &self.stack);
        Info {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            name: options.name.clone(),
            owner: None,
            changed: Vec::new(),
            disk: redacted(&options.disk.location.to_string()).into_owned(),
            format: stack.format.name().into(),
            size,
            block_size,
            read_only,
            engine: stack.engine.into(),
            pool: options.disk.pool.clone(),
            cache: self.cache().map(str::to_owned),
            bounced: stack.file.as_ref().map(|file| file.bounced()),
            image: stack.image.as_deref().and_then(ImageInfo::of),
            held_by: stack.file.as_ref().and_then(|file| file.holder()),
            vhost_user: options.vhost_user.as_ref().map(ToString::to_string),
            front_end: status.peer_pid.map(|pid| FrontEnd { pid }),
            max_queues: options.queues,
            queues_running: status.queues_running,
            nbd: None,
            fuse: self.file_info(),
            filters: stack.filters.info(),
            workers: self.workers_info(),
            trace: self.trace.as_ref().map(|trace| trace.path().to_owned()),
            alarms: self.alarms.info(),
            frozen: false,
            pull: self.moves.info(),
            moved: self.moves.has_gone(),
            backup: self.backup.as_ref().map(Running::info),
            mirror: self.mirror.as_ref().map(Mirror::info),
            starting: None,
            stream: self.stream_info(),
            unmarked: self.unmarked.clone(),
            uptime_seconds: 0,
            sandbox: fathom_sandbox::report(),
            limits: None,
        }
    }

    /// Returns the index of the filter called `name`.
    pub fn position_of_filter(&self, name: &str) -> Result<usize, String> {
        self.stack.filters.position(name)
    }

    /// Changes a filter's options. The workers of all disks must apply the change afterwards: some
    /// filters share their state with filters of other disks.
    pub fn set_filter(
        &mut self,
        at: usize,
        options: &BTreeMap<String, String>,
    ) -> Result<FilterInfo, String> {
        let info = self.stack.filters.set(at, options.clone())?;
        self.options.spec.set_filter(at, options);
        let disk = self.name().to_owned();
        self.events.tell(Happened::Changed { disk });
        Ok(info)
    }

    /// Begins to have the workers apply changes, such as new options of filters.
    pub fn begin_look(&self) -> Vec<Looking<'_>> {
        let workers = self.stack.workers.iter();
        workers.map(WorkerHandle::begin_look).collect()
    }

    /// Waits until these workers have applied the changes, with a timeout. The error is for the
    /// user.
    pub fn wait_for_looks(&self, looking: Vec<Looking<'_>>) -> Result<(), String> {
        let unheard = looking.into_iter().filter_map(|look| look.wait().err());
        match unheard.count() {
            0 => Ok(()),
            _ => Err(format!(
                "disk '{}': a worker did not respond; for that worker, the change takes effect \
                 when it responds",
                self.name()
            )),
        }
    }

    /// Has the workers apply changes. A worker that does not respond is only logged.
    fn look(&self) {
        if let Err(problem) = self.wait_for_looks(self.begin_look()) {
            tracing::warn!("{problem}");
        }
    }

    /// Returns the objects that a resize of the disk needs.
    pub fn resizing(&self) -> (Arc<SharedDisk>, Arc<[WorkerHandle]>) {
        (self.shared.clone(), self.stack.workers.clone())
    }

    /// Reports the disk's size, which may have changed, to the guest. NBD clients see the new size
    /// when they connect.
    pub fn resized(&mut self) {
        let size = self.stack.disk.info().size;
        if size != std::mem::replace(&mut self.size, size) {
            let disk = self.name().to_owned();
            self.events.tell(Happened::Resized { disk, size });
            let disk = &self.options.disk.location;
            tracing::info!("{disk}: resized to {}", Size(size));
            if let Some(location) = disk.with_size(size) {
                self.options.disk.location = location.clone();
                self.options.spec.image = location;
            }
        }
        if let Some(export) = self.vhost_user.as_ref().map(Serving::export)
            && export.device().size() != size
        {
            export.device().set_size(size);
            export.config_changed();
        }
    }
}
