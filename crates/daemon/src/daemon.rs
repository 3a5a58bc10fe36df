//! A running daemon: what it is made of, and the thread that watches it.

use crate::assemble::{Stack, assemble};
use crate::control::{self, FrontEnd, Info, Request, Server, WorkerInfo};
use crate::inject::{Injected, Injector};
use crate::limits;
use crate::options::{DiskSpec, ServeOptions};
use crate::serving::Serving;
use crate::signals::{LeftToThisThread, Termination};
use crate::size::Size;
use crate::socket;
use fathom_core::{DiskError, WorkerHandle};
use fathom_exports::vhost_user::{Options, VhostUser};
use fathom_exports::{ListenError, Listener};
use fathom_formats::img::Format;
use fathom_trace::{Clock, Op, Stage, Summary, TraceError, ring::RingFile};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::Serialize;
use serde_json::{Value, json};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Records in each worker's trace ring: 3 MiB.
const TRACE_RECORDS: usize = 1 << 15;
/// How often a trace gets the better value of the clock's frequency.
const CALIBRATE_EVERY: Duration = Duration::from_secs(10);

/// Why the daemon did not start, or why it ended before it was asked to; one
/// line for the user.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Options that do not go together.
    #[error("{0}")]
    Options(String),
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("--vhost-user: {0}")]
    Socket(String),
    #[error("{}: cannot be used for the control socket: {source}", path.display())]
    Control { path: PathBuf, source: io::Error },
    #[error("--trace: {0}")]
    Trace(#[from] TraceError),
    #[error("{what}: {source}")]
    Io {
        what: &'static str,
        source: io::Error,
    },
}

impl Error {
    fn io(what: &'static str) -> impl Fn(io::Error) -> Error {
        move |source| Error::Io { what, source }
    }
}

/// What a daemon has to say at its end.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    #[serde(flatten)]
    pub summary: Summary,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub injected: Option<Injected>,
}

/// One disk being served.
pub struct Daemon {
    options: ServeOptions,
    stack: Stack,
    serving: Serving,
    control: Option<Server>,
    trace: Option<Trace>,
    termination: Termination,
    started: Instant,
    quitting: bool,
}

/// A trace being written.
struct Trace {
    path: PathBuf,
    file: RingFile,
    calibrated: Instant,
}

impl Daemon {
    /// Open the disk, start its workers and listen for front-ends. Front-ends
    /// are served from then on. Call it before there are other threads:
    /// sockets of a service manager come by environment variables, and SIGTERM
    /// and SIGINT are caught from here on, for [`Daemon::run`].
    pub fn start(options: ServeOptions) -> Result<Daemon, Error> {
        let termination = Termination::new().map_err(Error::io("cannot catch signals"))?;
        limits::raise();
        let listener = socket::listen(&options.socket)?;
        let signals = LeftToThisThread::new();
        let stack = assemble(&options)?;
        let control = listen_for_control(options.control.as_deref())?;
        let mut trace = None;
        if let Some(path) = &options.trace {
            trace = Some(Trace::start(path, &options.disk, &stack.workers)?);
        }
        let serving = serve(&options, &stack, listener)?;
        drop(signals);
        let daemon = Daemon {
            options,
            stack,
            serving,
            control,
            trace,
            termination,
            started: Instant::now(),
            quitting: false,
        };
        daemon.announce();
        Ok(daemon)
    }

    fn announce(&self) {
        let size = Size(self.stack.disk.info().size);
        let (disk, socket) = (&self.options.disk, &self.options.socket);
        let cache = self
            .cache()
            .map_or(String::new(), |c| format!(", cache={c}"));
        tracing::info!(
            "serving {disk} ({size}, {}, {}{cache}) on vhost-user {socket}",
            self.stack.format,
            self.stack.engine
        );
        notify_manager(sd_notify::NotifyState::Ready);
    }

    /// Watch over it until SIGTERM, SIGINT or a client of the control socket
    /// ends it. Then what is in flight is finished and the sockets are
    /// removed. Returns where the requests spent their time.
    pub fn run(mut self) -> Result<Outcome, Error> {
        while !self.quitting {
            self.wait()?;
        }
        notify_manager(sd_notify::NotifyState::Stopping);
        tracing::info!("stopping");
        let served = self.serving.stop();
        served.map_err(Error::io("serving front-ends failed"))?;
        Ok(Outcome {
            summary: summary(&self.stack.workers),
            injected: self.stack.injector.and_then(|injector| injector.outcome()),
        })
    }

    /// Sleep until there is something to do, and do it.
    fn wait(&mut self) -> Result<(), Error> {
        let ready = self.poll().map_err(Error::io("cannot wait for events"))?;
        let (end, rest) = ready.split_at(2);
        let (cut, clients) = rest.split_at(usize::from(self.trace.is_some()));
        if end.iter().any(|flags| !flags.is_empty()) {
            self.quitting = true;
            return Ok(());
        }
        if cut.iter().any(|flags| !flags.is_empty()) {
            self.drop_cut_trace();
        }
        if let Some(trace) = &mut self.trace {
            trace.calibrate();
        }
        let Some(mut control) = self.control.take() else {
            return Ok(());
        };
        control.turn(clients, &mut |request| self.handle(request));
        self.control = Some(control);
        Ok(())
    }

    /// What poll(2) says of the signals, of the serving thread, of the trace,
    /// and of the control socket and its clients.
    fn poll(&self) -> io::Result<Vec<PollFlags>> {
        let mut fds = vec![
            PollFd::new(&self.termination, PollFlags::IN),
            PollFd::from_borrowed_fd(self.serving.ended(), PollFlags::IN),
        ];
        let trace = self.trace.iter().map(|trace| trace.file.cut_event());
        fds.extend(trace.map(|event| PollFd::from_borrowed_fd(event, PollFlags::IN)));
        fds.extend(self.control.iter().flat_map(Server::poll_fds));
        let patience = [
            self.control.as_ref().and_then(Server::patience),
            self.trace.as_ref().map(|_| CALIBRATE_EVERY),
        ];
        let timeout = patience.into_iter().flatten().min();
        let timeout = timeout.map(|t| Timespec::try_from(t).expect("some seconds"));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(fds.iter().map(PollFd::revents).collect()),
            Err(error) => Err(error.into()),
        }
    }

    fn handle(&mut self, request: Request) -> Result<Value, String> {
        match request {
            Request::Stats => json(&summary(&self.stack.workers)),
            Request::Info => json(&self.info()),
            Request::Trace { file } => self.switch_trace(file),
            Request::Resize => self.resize(),
            Request::Quit => {
                self.quitting = true;
                Ok(json!({ "quitting": true }))
            }
        }
    }

    fn cache(&self) -> Option<&'static str> {
        let is_file = self.stack.file.is_some();
        is_file.then(|| self.options.cache.name())
    }

    fn info(&self) -> Info {
        let disk = self.stack.disk.info();
        let status = self.serving.export().status();
        Info {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            disk: self.options.disk.to_string(),
            format: self.stack.format.name().into(),
            size: disk.size,
            block_size: disk.block_size,
            read_only: disk.read_only,
            engine: self.stack.engine.into(),
            cache: self.cache().map(str::to_owned),
            bounced: self.stack.file.as_ref().map(|file| file.bounced()),
            vhost_user: self.options.socket.to_string(),
            front_end: status.peer_pid.map(|pid| FrontEnd { pid }),
            max_queues: self.options.queues,
            queues_running: status.queues_running,
            workers: self.stack.workers.iter().map(worker_info).collect(),
            trace: self.trace.as_ref().map(|trace| trace.path.clone()),
            uptime_seconds: self.started.elapsed().as_secs(),
        }
    }

    fn switch_trace(&mut self, file: Option<PathBuf>) -> Result<Value, String> {
        match &file {
            Some(path) => {
                let trace = Trace::start(path, &self.options.disk, &self.stack.workers);
                self.trace = Some(trace.map_err(|error| error.to_string())?);
                tracing::info!("tracing to {}", path.display());
            }
            None => {
                self.stop_trace();
                tracing::info!("tracing is off");
            }
        }
        Ok(json!({ "trace": file }))
    }

    fn stop_trace(&mut self) -> Option<Trace> {
        self.stack.workers.iter().for_each(|w| w.trace(None));
        self.trace.take()
    }

    /// Another process has truncated the trace file.
    fn drop_cut_trace(&mut self) {
        if let Some(trace) = self.stop_trace() {
            let path = trace.path.display();
            tracing::error!(
                "{path}: truncated by another process, so tracing is off; \
                 a new trace: fathom trace --pid {} --on {path}",
                std::process::id()
            );
        }
    }

    /// The image has another size now: tell the guest.
    fn resize(&mut self) -> Result<Value, String> {
        let Some(file) = self
            .stack
            .file
            .as_ref()
            .filter(|_| self.stack.is_whole_file)
        else {
            return Err(self.not_resizable());
        };
        let size = file.refresh_size().map_err(|error| error.to_string())?;
        let export = self.serving.export();
        if export.device().size() != size {
            export.device().set_size(size);
            export.config_changed();
            tracing::info!("the disk has {} now", Size(size));
        }
        Ok(json!({ "size": size }))
    }
}

impl Daemon {
    fn not_resizable(&self) -> String {
        match (&self.stack.file, self.stack.format) {
            (None, _) => "only disks in files can be resized".into(),
            (Some(_), Format::Raw) => {
                "a disk that is a part of its file (--offset, --size) cannot be resized while it \
                 is served"
                    .into()
            }
            (Some(_), format) => format!(
                "a {format} image cannot be resized while it is served: end the server, then \
                 use qemu-img resize"
            ),
        }
    }
}

impl Trace {
    /// Trace what `workers` do from now on.
    fn start(path: &Path, disk: &DiskSpec, workers: &[WorkerHandle]) -> Result<Trace, TraceError> {
        let mut file = RingFile::create(path, &disk.to_string(), workers.len(), TRACE_RECORDS)?;
        for (ring, worker) in workers.iter().enumerate() {
            worker.trace(Some(file.writer(ring)));
        }
        Ok(Trace {
            path: path.to_owned(),
            file,
            calibrated: Instant::now(),
        })
    }

    fn calibrate(&mut self) {
        if self.calibrated.elapsed() >= CALIBRATE_EVERY {
            self.file.calibrate();
            self.calibrated = Instant::now();
        }
    }
}

fn serve(options: &ServeOptions, stack: &Stack, listener: Listener) -> Result<Serving, Error> {
    let mut export_options = Options {
        max_queues: options.queues,
        wrap: stack.injector.as_ref().and_then(Injector::wrap_source),
        ..Options::default()
    };
    if let Some(serial) = &options.serial {
        export_options.serial.clone_from(serial);
    }
    let (disk, workers) = (stack.disk.clone(), stack.workers.clone());
    let failed = Error::io("cannot serve front-ends");
    let export = VhostUser::new(disk, workers, export_options).map_err(&failed)?;
    Serving::start(export, listener).map_err(failed)
}

/// Where the user wants it, or else where clients look for it; there, a
/// daemon that has no such place goes on without.
fn listen_for_control(path: Option<&Path>) -> Result<Option<Server>, Error> {
    if let Some(path) = path {
        return Server::bind(path).map(Some);
    }
    let Some(path) = control::default_path(std::process::id()) else {
        tracing::warn!("no control socket: XDG_RUNTIME_DIR is not set; give one by --control");
        return Ok(None);
    };
    match Server::bind_default(&path) {
        Ok(server) => Ok(Some(server)),
        Err(error) => {
            tracing::warn!("no control socket: {error}");
            Ok(None)
        }
    }
}

fn summary(workers: &[WorkerHandle]) -> Summary {
    Summary::of(workers.iter().map(WorkerHandle::histograms), Clock::get())
}

fn worker_info(worker: &WorkerHandle) -> WorkerInfo {
    let answered = |op| worker.histograms().snapshot(op)[Stage::COUNT].count();
    let counters = worker.counters();
    WorkerInfo {
        requests: Op::ALL.into_iter().map(answered).sum(),
        notifications: counters.notifications.get(),
        sleeps: counters.sleeps.get(),
    }
}

fn json(value: &impl serde::Serialize) -> Result<Value, String> {
    serde_json::to_value(value).map_err(|error| error.to_string())
}

/// Where systemd (or another manager) wants to know.
fn notify_manager(state: sd_notify::NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!("cannot notify the service manager: {error}");
    }
}
