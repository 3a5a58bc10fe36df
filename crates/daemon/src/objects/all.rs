//! All objects of a daemon, and what is asked of them.
//!
//! - `coming` and `going` are how disks come, change and go;
//! - `handover` takes all of them to another process;
//! - `backups` keeps them as they were at an instant, `freezing` has them stand still;
//! - `mirrors` copies them to others, and `switching` has them go on there;
//! - `remaking` gives them other options, `resizing` other sizes;
//! - `jobs` changes and ends jobs by their identities;
//! - `host` is how they are asked.

mod backups;
mod bitmaps;
mod chains;
mod coming;
mod freezing;
mod going;
mod handover;
mod host;
mod jobs;
mod mirrors;
mod remaking;
mod resizing;
mod snapshots;
mod switching;

use super::activity::Activities;
use super::backup::EndedBackups;
use super::changes::{self, Event, Leaving, Over};
use super::disk::{Common, Served};
use super::nbd::Nbd;
use super::tracer::Tracer;
use crate::command::{Ask, Command};
use crate::error::Error;
use crate::handover::Estate;
use crate::host::Host;
use crate::mailbox::Mailbox;
use crate::options::ServeOptions;
use crate::reply::{Answer, Asker, Shown, SlowRequests, TraceState};
use crate::stop_timeout::StopTimeout;
use fathom_control::{ErrorKind, RequestError, version_of};
use fathom_exports::Listener;
use fathom_metrics::Info;
use fathom_metrics::{Measured, ProcessInfo};
use fathom_spec::check_path;
use fathom_stack::Pools;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// So many slow requests are told of a disk at most.
const MAX_SLOW: usize = 256;
/// With what it has counted.
const MAX_TOLD: usize = 8;
/// To another process, or another disk in its place, so many are left.
const MAX_LEFT: usize = 32;

/// The disks, in the order in which they came, and the server of their NBD clients.
pub struct Objects {
    disks: Vec<Served>,
    /// Activities of the disks beside serving.
    activities: Activities,
    /// Disks that are to go when nobody uses them.
    leaving: Vec<Leaving>,
    ended_backups: EndedBackups,
    nbd: Option<Nbd>,
    /// Of an upgrade: NBD clients by TLS end with this process.
    encrypted_end: bool,
    common: Common,
    mail: Mailbox<Event>,
    stop_timeout: StopTimeout,
    started: Instant,
}

impl Objects {
    /// Opens the disks that there are from the start, without those that cannot be opened and may be opened later. `clients`: where those of NBD connect.
    pub fn open(
        options: ServeOptions,
        front_ends: Vec<Option<Listener>>,
        clients: Vec<Listener>,
    ) -> Result<Objects, Error> {
        let objects = Objects::open_held(options, front_ends, clients)?;
        objects.take_back();
        Ok(objects)
    }

    /// Likewise; nobody comes in by NBD yet.
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

    /// Let front-ends in.
    pub fn serve(&mut self) -> Result<(), Error> {
        self.disks.iter_mut().try_for_each(Served::serve)
    }

    /// Traces being written, each with its disk's index.
    fn traces(&self) -> impl Iterator<Item = (usize, &Tracer)> {
        let disks = self.disks.iter().enumerate();
        disks.filter_map(|(i, disk)| Some((i, disk.trace()?)))
    }

    fn take_in(&mut self, event: Event) {
        match event {
            Event::Opened(name, opened) => self.take_in_opened(&name, opened),
            Event::Closed(name, summary) => self.take_in_closed(&name, *summary),
            Event::Resized(name, resized) => self.take_in_resized(&name, resized),
            Event::SizeSeen(name) => self.activities.note_size(&name),
            Event::Frozen(name, frozen) => self.take_in_frozen(&name, *frozen),
            Event::Thawed(name) => self.take_in_thawed(&name),
            Event::Remade(name, remade) => self.take_in_remade(&name, remade),
            Event::BackupBegun(name, begun) => self.take_in_backup(&name, *begun),
            Event::BackupEnded(name, info) => self.take_in_ended_backup(&name, *info),
            Event::MirrorBegun(name, begun) => self.take_in_mirror(&name, *begun),
            Event::MirrorEnded(name, ended) => self.take_in_ended_mirror(&name, *ended),
            Event::StreamBegun(name, begun) => self.take_in_stream(&name, *begun),
            Event::JobOver(name) => *self.activities.job_over(&name) = Over::default(),
            Event::StreamEnded(name, ended) => self.take_in_ended_stream(&name, *ended),
            Event::Switched(name, spec, decision) => self.take_in_switched(&name, *spec, decision),
            Event::BitmapsDone(name, done) => self.take_in_bitmaps(&name, done),
            Event::SnapshotsListed(name, listed) => self.take_in_snapshots(&name, listed),
        }
    }

    /// Carries a command out; the reply comes at once or later.
    fn handle(&mut self, ask: Ask, asker: Asker) {
        let command = match ask.command {
            Command::Put {
                options,
                named,
                only_if,
                ..
            } => return self.put(*options, named.as_ref(), &only_if, asker),
            command => command,
        };
        match self.find(ask.disk.as_deref().unwrap_or_default()) {
            Ok(index) => self.handle_for(index, command, asker),
            Err(refusal) => asker(Err(refusal)),
        }
    }

    /// Carries out a command about a disk that is served.
    fn handle_for(&mut self, index: usize, command: Command, asker: Asker) {
        match command {
            Command::Show => asker(Ok(self.show(index).into())),
            Command::Stats => asker(Ok(self.disks[index].summary().into())),
            Command::Slow => {
                let requests = self.disks[index].slow(MAX_SLOW);
                asker(Ok(SlowRequests { requests }.into()));
            }
            Command::Measure => {
                let mut measured = self.measure(index, ProcessInfo::own());
                // So that the reply is no longer for many workers than for one.
                measured.counts.merge_histograms();
                asker(Ok(measured.into()));
            }
            Command::Trace { file } => asker(self.switch_trace(index, file)),
            Command::Set {
                filter, options, ..
            } => asker(self.set_filter(index, &filter, &options)),
            Command::Remove { force, only_if, .. } => self.remove(index, force, only_if, asker),
            Command::Resize { size, shrink } => self.resize(index, size, shrink, asker),
            Command::Freeze { timeout_ms } => {
                self.freeze(index, timeout_ms.map(Duration::from_millis), asker);
            }
            Command::Thaw => self.thaw(index, asker),
            Command::BeginBackup { id, order } => self.begin_backup(index, id, order, asker),
            Command::GoOnWithBackup { id } => asker(self.go_on_with_backup(index, &id)),
            Command::EndBackup { id } => self.end_backup(index, &id, asker),
            Command::BeginMirror(order) => self.begin_mirror(index, *order, asker),
            Command::BeginCommit(order) => self.begin_commit(index, &order, asker),
            Command::EndMirror { force } => self.end_mirror(index, force, asker),
            Command::BeginStream(order) => self.begin_stream(index, &order, asker),
            Command::EndStream => self.end_stream(index, asker),
            Command::Job { id, order } => self.order_job(index, &id, order, asker),
            Command::BeginSwitch { to, leave_bitmaps } => {
                self.begin_switch(index, to, leave_bitmaps, asker);
            }
            Command::EndSwitch { go } => self.end_switch(index, go, asker),
            Command::Bitmaps(order) => self.order_bitmaps(index, order, asker),
            Command::Snapshots(order) => self.order_snapshots(index, order, asker),
            Command::Put { .. } => {
                asker(Err(ErrorKind::Invalid.because("the disk's name is missing")));
            }
        }
    }

    /// Starts a trace, or without a file ends it.
    fn switch_trace(&mut self, index: usize, file: Option<PathBuf>) -> Answer {
        let disk = &mut self.disks[index];
        if let Some(refusal) = self.activities.busy(disk.name()) {
            return Err(refusal);
        }
        let checked = file.as_deref().map_or(Ok(()), check_path);
        checked.map_err(|text| ErrorKind::Invalid.because(text))?;
        let switched = disk.switch_trace(file.as_deref());
        switched.map_err(|text| ErrorKind::Failed.because(text))?;
        Ok(TraceState { trace: file }.into())
    }

    /// The disk that is meant.
    fn find(&self, name: &str) -> Result<usize, RequestError> {
        if let Some(found) = self.disks.iter().position(|disk| disk.name() == name) {
            return Ok(found);
        }
        if let Some(error) = self.activities.coming_or_going(name) {
            return Err(error);
        }
        Err(fathom_control::unknown_disk(name, &self.names()))
    }

    /// Let all workers see what was changed for one disk: some filters share
    /// with those of other disks. A worker that is stuck holds up nobody for
    /// long, and matters to its own disk's user only.
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

    /// The version that conditions of requests name.
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
            uptime_seconds: self.started.elapsed().as_secs(),
            ..disk.info()
        }
    }
}
