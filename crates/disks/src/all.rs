//! The disks of this process, and the commands about them.
//!
//! - `put` adds and changes disks, `remove` removes them;
//! - `remaking` replaces a disk by one with other options, `resizing` changes sizes, `switching`
//!   changes images;
//! - `backups`, `mirrors` and `chains` begin and end jobs, `jobs` finds a job by its identity;
//! - `bitmaps` and `snapshots` manage dirty bitmaps and internal snapshots, `freezing` stops disks
//!   for a while;
//! - `handover` hands all disks over to another process;
//! - `host` implements `Host` for all of it.

mod backups;
mod bitmaps;
mod chains;
mod freezing;
mod handover;
mod host;
mod jobs;
mod mirrors;
mod put;
mod remaking;
mod remove;
mod resizing;
mod snapshots;
mod switching;

use super::activity::Activities;
use super::backup::EndedBackups;
use super::changes::{self, Event, Leaving, Over};
use super::disk::{Common, Served};
use super::nbd::Nbd;
use super::tracer::Tracer;
use fathom_control::{ErrorKind, RequestError, version_of};
use fathom_host::handover::HandoverHost;
use fathom_host::mailbox::Mailbox;
use fathom_host::options::ServeOptions;
use fathom_host::{Error, Host, StopTimeout};
use fathom_metrics::Info;
use fathom_metrics::{Measured, ProcessInfo};
use fathom_requests::{Answer, Ask, Command, Responder, Shown, SlowRequests, TraceState};
use fathom_sockets::Listener;
use fathom_spec::check_path;
use fathom_stack::Pools;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum number of slow requests in a reply.
const MAX_SLOW: usize = 256;
/// Maximum number of slow requests in a reply with measurements.
const MAX_TOLD: usize = 8;
/// Maximum number of slow requests that a disk hands over to its successor.
const MAX_LEFT: usize = 32;

/// The disks, in the order in which they were added, and the server of their NBD clients.
pub struct Objects {
    disks: Vec<Served>,
    /// Activities of the disks besides serving.
    activities: Activities,
    /// Disks that are removed as soon as they are not in use.
    leaving: Vec<Leaving>,
    ended_backups: EndedBackups,
    nbd: Option<Nbd>,
    /// Whether an upgrade ends the connections of NBD clients with TLS.
    encrypted_end: bool,
    common: Common,
    mail: Mailbox<Event>,
    stop_timeout: StopTimeout,
    started: Instant,
}

impl Objects {
    /// Opens the disks of the configuration, except those that cannot be opened and may be opened
    /// later. `clients`: the listeners of NBD clients.
    pub fn open(
        options: ServeOptions,
        front_ends: Vec<Option<Listener>>,
        clients: Vec<Listener>,
    ) -> Result<Objects, Error> {
        let objects = Objects::open_held(options, front_ends, clients)?;
        objects.take_back();
        Ok(objects)
    }

    /// Opens the disks like [`Objects::open`], without admitting NBD clients yet.
    pub fn open_held(
        options: ServeOptions,
        front_ends: Vec<Option<Listener>>,
        clients: Vec<Listener>,
    ) -> Result<Objects, Error> {
        let common = Common {
            filters: Arc::default(),
            pools: Arc::new(Pools::start(options.pools).map_err(Error::Options)?),
            events: options.events,
            definitions: options.kept,
        };
        let disks = options.disks.into_iter().zip(front_ends);
        let opened = disks.filter_map(|(disk, listener)| {
            let defined = disk.clone();
            match Served::open(disk, listener, common.clone()) {
                // (The controller tries again.)
                Err(_) if defined.can_be_opened_later() => None,
                opened => Some(opened.map_err(|error| defined.blame(error))),
            }
        });
        let disks = opened.collect::<Result<Vec<_>, _>>()?;
        let nbd = options.nbd.as_ref();
        let nbd = nbd.map(|nbd| Nbd::start(nbd, clients, &disks));
        let mail = Mailbox::new().map_err(Error::io("cannot create a command queue"))?;
        disks
            .iter()
            .for_each(|disk| changes::watch_size(disk, mail.post()));
        Ok(Objects {
            disks,
            activities: Activities::default(),
            leaving: Vec::new(),
            ended_backups: EndedBackups::default(),
            nbd: nbd.transpose()?,
            encrypted_end: false,
            common,
            mail,
            stop_timeout: options.stop_timeout,
            started: Instant::now(),
        })
    }

    /// Admits front-ends.
    pub fn serve(&mut self) -> Result<(), Error> {
        self.disks.iter_mut().try_for_each(Served::serve)
    }

    /// Returns the traces in progress, each with the index of its disk.
    fn traces(&self) -> impl Iterator<Item = (usize, &Tracer)> {
        let disks = self.disks.iter().enumerate();
        disks.filter_map(|(i, disk)| Some((i, disk.trace()?)))
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Opened(name, opened) => self.on_opened(&name, opened),
            Event::Closed(name, summary) => self.on_closed(&name, *summary),
            Event::Resized(name, resized) => self.on_resized(&name, resized),
            Event::SizeSeen(name) => self.activities.note_size(&name),
            Event::Frozen(name, frozen) => self.on_frozen(&name, *frozen),
            Event::Thawed(name) => self.on_thawed(&name),
            Event::Remade(name, remade) => self.on_remade(&name, remade),
            Event::BackupBegun(name, begun) => self.on_backup_begun(&name, *begun),
            Event::BackupEnded(name, info) => self.on_backup_ended(&name, *info),
            Event::MirrorBegun(name, begun) => self.on_mirror_begun(&name, *begun),
            Event::MirrorEnded(name, ended) => self.on_mirror_ended(&name, *ended),
            Event::StreamBegun(name, begun) => self.on_stream_begun(&name, *begun),
            Event::JobOver(name) => *self.activities.job_over(&name) = Over::default(),
            Event::StreamEnded(name, ended) => self.on_stream_ended(&name, *ended),
            Event::Switched(name, spec, decision) => self.on_switched(&name, *spec, decision),
            Event::BitmapsDone(name, done) => self.on_bitmaps_done(&name, done),
            Event::SnapshotsListed(name, listed) => self.on_snapshots_listed(&name, listed),
        }
    }

    /// Carries out a command. The reply is sent at once or later.
    fn handle(&mut self, ask: Ask, responder: Responder) {
        let command = match ask.command {
            Command::Put {
                options,
                named,
                only_if,
                ..
            } => return self.put(*options, named.as_ref(), &only_if, responder),
            command => command,
        };
        match self.find(ask.disk.as_deref().unwrap_or_default()) {
            Ok(index) => self.handle_for(index, command, responder),
            Err(error) => responder(Err(error)),
        }
    }

    /// Carries out a command about a disk that is served.
    fn handle_for(&mut self, index: usize, command: Command, responder: Responder) {
        match command {
            Command::Show => responder(Ok(self.show(index).into())),
            Command::Stats => responder(Ok(self.disks[index].summary().into())),
            Command::Slow => {
                let requests = self.disks[index].slow(MAX_SLOW);
                responder(Ok(SlowRequests { requests }.into()));
            }
            Command::Measure => {
                let mut measured = self.measure(index, ProcessInfo::own());
                // (The reply must not grow with the number of workers.)
                measured.counts.merge_histograms();
                responder(Ok(measured.into()));
            }
            Command::Trace { file } => responder(self.switch_trace(index, file)),
            Command::Set {
                filter, options, ..
            } => responder(self.set_filter(index, &filter, &options)),
            Command::Remove { force, only_if, .. } => self.remove(index, force, only_if, responder),
            Command::Resize { size, shrink } => self.resize(index, size, shrink, responder),
            Command::Freeze { timeout_ms } => {
                self.freeze(index, timeout_ms.map(Duration::from_millis), responder);
            }
            Command::Thaw => self.thaw(index, responder),
            Command::BeginBackup { id, order } => self.begin_backup(index, id, order, responder),
            Command::GoOnWithBackup { id } => responder(self.go_on_with_backup(index, &id)),
            Command::EndBackup { id } => self.end_backup(index, &id, responder),
            Command::BeginMirror(order) => self.begin_mirror(index, *order, responder),
            Command::BeginCommit(order) => self.begin_commit(index, &order, responder),
            Command::EndMirror { force } => self.end_mirror(index, force, responder),
            Command::BeginStream(order) => self.begin_stream(index, &order, responder),
            Command::EndStream => self.end_stream(index, responder),
            Command::Job { id, order } => self.order_job(index, &id, order, responder),
            Command::BeginSwitch { to, leave_bitmaps } => {
                self.begin_switch(index, to, leave_bitmaps, responder);
            }
            Command::EndSwitch { go } => self.end_switch(index, go, responder),
            Command::Bitmaps(order) => self.order_bitmaps(index, order, responder),
            Command::Snapshots(order) => self.order_snapshots(index, order, responder),
            Command::Put { .. } => {
                responder(Err(ErrorKind::Invalid.because("the disk's name is missing")));
            }
        }
    }

    /// Starts a trace, or without a file ends it.
    fn switch_trace(&mut self, index: usize, file: Option<PathBuf>) -> Answer {
        let disk = &mut self.disks[index];
        if let Some(error) = self.activities.busy(disk.name()) {
            return Err(error);
        }
        let checked = file.as_deref().map_or(Ok(()), check_path);
        checked.map_err(|text| ErrorKind::Invalid.because(text))?;
        let switched = disk.switch_trace(file.as_deref());
        switched.map_err(|text| ErrorKind::Failed.because(text))?;
        Ok(TraceState { trace: file }.into())
    }

    /// Returns the index of the disk with this name.
    fn find(&self, name: &str) -> Result<usize, RequestError> {
        if let Some(found) = self.disks.iter().position(|disk| disk.name() == name) {
            return Ok(found);
        }
        if let Some(error) = self.activities.coming_or_going(name) {
            return Err(error);
        }
        Err(fathom_control::unknown_disk(name, &self.names()))
    }

    /// Has all workers apply a change of one disk's filters: some filters share their state with
    /// those of other disks. The wait for each worker has a timeout. Only a worker of the disk
    /// itself that does not respond is an error.
    fn look(&self, index: usize) -> Result<(), String> {
        let looking: Vec<_> = self.disks.iter().map(Served::begin_look).collect();
        let mut outcome = Ok(());
        for (i, (disk, looking)) in self.disks.iter().zip(looking).enumerate() {
            let seen = disk.wait_for_looks(looking);
            if i == index {
                outcome = seen;
            }
        }
        outcome
    }

    /// Returns the version of a disk's options, which conditions of requests name.
    fn version(&self, index: usize) -> Result<String, RequestError> {
        version_of(self.disks[index].spec())
    }

    fn show(&self, index: usize) -> Shown {
        Shown {
            options: self.disks[index].spec().clone(),
            state: self.info(index),
            created: false,
        }
    }

    fn measure(&self, index: usize, process: ProcessInfo) -> Measured {
        let disk = &self.disks[index];
        let info = self.info(index);
        let pool = info.pool.as_deref();
        let pool_threads = pool.map_or_else(Vec::new, |pool| self.common.pools.cpu_times(pool));
        let (front_ends, clients) = disk.visits().counts();
        Measured {
            counts: disk.counts(MAX_TOLD),
            queues: disk.queues(),
            in_flight: disk.in_flight(),
            front_ends,
            clients,
            process,
            pool_threads: { pool_threads.iter() }
                .map(|time| time.as_nanos() as u64)
                .collect(),
            info,
        }
    }

    fn info(&self, index: usize) -> Info {
        let disk = &self.disks[index];
        let nbd = self.nbd.as_ref().zip(disk.export_name());
        Info {
            nbd: nbd.map(|(nbd, export)| nbd.info(export)),
            frozen: self.activities.is_frozen(disk.name()),
            starting: self.activities.starting_job(disk.name()),
            uptime_seconds: self.started.elapsed().as_secs(),
            ..disk.info()
        }
    }
}
