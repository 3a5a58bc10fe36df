//! A running daemon: what it is made of, and the thread that watches it.

use crate::control::{self, Ask, Info, Request, Server};
use crate::error::Error;
use crate::limits;
use crate::objects::{CALIBRATE_EVERY, Nbd, Outcome, Served, Tracer};
use crate::options::{ServeOptions, StopTimeout};
use crate::signals::{LeftToThisThread, Termination};
use crate::socket;
use fathom_filters::Filters;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde_json::{Value, json};
use std::io;
use std::path::Path;
use std::time::Instant;

/// How a daemon has ended.
#[derive(Debug)]
pub struct Ended {
    /// Where the requests spent their time, by disk.
    pub outcomes: Vec<(String, Outcome)>,
    /// Whether all that was in flight is finished. If it was abandoned, there
    /// are threads that still have to do with it: the process is to end.
    pub stopped: Result<(), Error>,
}

/// Some disks being served.
pub struct Daemon {
    disks: Vec<Served>,
    nbd: Option<Nbd>,
    control: Option<Server>,
    termination: Termination,
    stop_timeout: StopTimeout,
    started: Instant,
    quitting: bool,
}

impl Daemon {
    /// Open the disks, start their workers and listen for clients, who are
    /// served from then on. Call it before there are other threads that look at
    /// the environment, by whose variables sockets of a service manager come, or
    /// that leave SIGTERM and SIGINT on: these are caught from here on, for
    /// [`Daemon::run`].
    pub fn start(options: ServeOptions) -> Result<Daemon, Error> {
        options.validate().map_err(Error::Options)?;
        let termination = Termination::new().map_err(Error::io("cannot catch signals"))?;
        limits::raise();
        let front_ends = options.disks.iter().map(|disk| {
            let socket = disk.vhost_user.as_ref();
            let listen = |spec| socket::listen_for_front_ends(spec, disk.access);
            socket.map(listen).transpose()
        });
        let front_ends = front_ends.collect::<Result<Vec<_>, _>>()?;
        let addresses = options.nbd.iter().flat_map(|nbd| &nbd.listen);
        let access = options
            .nbd
            .as_ref()
            .map(|nbd| nbd.access)
            .unwrap_or_default();
        let clients = socket::listen_for_nbd(addresses, access)?;
        let signals = LeftToThisThread::new();
        let disks = options.disks.into_iter().zip(front_ends);
        let filters = Filters::default();
        let disks = disks.map(|(disk, listener)| Served::open(disk, listener, &filters));
        let mut disks = disks.collect::<Result<Vec<_>, _>>()?;
        let control = listen_for_control(options.control.as_deref())?;
        let nbd = options.nbd.map(|nbd| Nbd::start(&nbd, clients, &disks));
        let nbd = nbd.transpose()?;
        disks.iter_mut().try_for_each(Served::serve)?;
        drop(signals);
        let daemon = Daemon {
            disks,
            nbd,
            control,
            termination,
            stop_timeout: options.stop_timeout,
            started: Instant::now(),
            quitting: false,
        };
        daemon.announce();
        Ok(daemon)
    }

    fn announce(&self) {
        for disk in &self.disks {
            tracing::info!("{}", disk.describe());
        }
        if let Some(nbd) = &self.nbd {
            tracing::info!("NBD clients connect to {}", nbd.addresses().join(", "));
        }
        notify_manager(sd_notify::NotifyState::Ready);
    }

    /// Watch over it until SIGTERM, SIGINT or a client of the control socket
    /// ends it. Then what is in flight is finished, unless that takes too
    /// long, and the sockets are removed.
    pub fn run(mut self) -> Result<Ended, Error> {
        while !self.quitting {
            self.wait()?;
        }
        notify_manager(sd_notify::NotifyState::Stopping);
        tracing::info!("stopping");
        let stopped = self.stop(Instant::now() + self.stop_timeout.0);
        let outcome = |disk: &Served| (disk.name().to_owned(), disk.outcome());
        let outcomes = self.disks.iter().map(outcome).collect();
        if matches!(stopped, Err(Error::Abandoned { .. })) {
            // Dropped, it would be waited for.
            drop(self.control.take());
            std::mem::forget(self);
        }
        Ok(Ended { outcomes, stopped })
    }

    fn stop(&mut self, deadline: Instant) -> Result<(), Error> {
        self.nbd.iter().for_each(Nbd::begin_stop);
        self.disks.iter().for_each(Served::begin_stop);
        let (mut ended, mut late) = (Ok(()), Vec::new());
        for disk in &mut self.disks {
            match disk.end(deadline) {
                Some(end) => ended = ended.and(end),
                None => late.push(format!("disk '{}'", disk.name())),
            }
        }
        if let Some(nbd) = &mut self.nbd {
            match nbd.end(deadline) {
                Some(end) => ended = end.and(ended),
                None => late.push(nbd.clients()),
            }
        }
        if late.is_empty() {
            let busy = |disk: &&Served| !disk.end_workers(deadline);
            let busy = self.disks.iter().filter(busy);
            late.extend(busy.map(|disk| format!("disk '{}'", disk.name())));
        }
        match late.is_empty() {
            true => ended,
            false => Err(Error::Abandoned {
                timeout: self.stop_timeout,
                whose: late.join(" and "),
            }),
        }
    }

    /// Sleep until there is something to do, and do it.
    fn wait(&mut self) -> Result<(), Error> {
        let ready = self.poll().map_err(Error::io("cannot wait for events"))?;
        if ready.end {
            self.quitting = true;
            return Ok(());
        }
        for disk in ready.cut {
            self.disks[disk].drop_cut_trace();
        }
        self.disks.iter_mut().for_each(Served::calibrate_trace);
        let Some(mut control) = self.control.take() else {
            return Ok(());
        };
        control.turn(&ready.clients, &mut |ask| self.handle(ask));
        self.control = Some(control);
        Ok(())
    }

    /// What poll(2) says of the signals, of the serving threads, of the
    /// traces, and of the control socket and its clients.
    fn poll(&self) -> io::Result<Ready> {
        let mut fds = vec![PollFd::new(&self.termination, PollFlags::IN)];
        let input = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        fds.extend(self.disks.iter().filter_map(Served::ended).map(input));
        fds.extend(self.nbd.iter().map(Nbd::ended).map(input));
        let ends = fds.len();
        fds.extend(self.traces().map(|(_, trace)| input(trace.cut_event())));
        let traces = fds.len();
        fds.extend(self.control.iter().flat_map(Server::poll_fds));
        let patience = [
            self.control.as_ref().and_then(Server::patience),
            (traces > ends).then_some(CALIBRATE_EVERY),
        ];
        let timeout = patience.into_iter().flatten().min();
        let timeout = timeout.map(|t| Timespec::try_from(t).expect("some seconds"));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let cut = self.traces().zip(&fds[ends..traces]);
        Ok(Ready {
            end: fds[..ends].iter().any(is_ready),
            cut: cut
                .filter(|(_, fd)| is_ready(fd))
                .map(|((disk, _), _)| disk)
                .collect(),
            clients: fds[traces..].iter().map(PollFd::revents).collect(),
        })
    }

    /// Traces being written, each with its disk's index.
    fn traces(&self) -> impl Iterator<Item = (usize, &Tracer)> {
        let disks = self.disks.iter().enumerate();
        disks.filter_map(|(i, disk)| Some((i, disk.trace()?)))
    }

    fn handle(&mut self, ask: Ask) -> Result<Value, String> {
        let Ask { disk, request } = ask;
        match (request, disk) {
            (Request::Disks, None) => {
                let names: Vec<_> = self.disks.iter().map(Served::name).collect();
                Ok(json!({ "disks": names }))
            }
            (Request::Quit, None) => {
                self.quitting = true;
                Ok(json!({ "quitting": true }))
            }
            (Request::Disks | Request::Quit, Some(_)) => {
                Err("that concerns the daemon, not one disk".into())
            }
            (request, disk) => {
                let index = self.find(disk.as_deref())?;
                self.handle_for(index, request)
            }
        }
    }

    /// The disk that a client means.
    fn find(&self, name: Option<&str>) -> Result<usize, String> {
        let names = || {
            let names: Vec<_> = self.disks.iter().map(Served::name).collect();
            names.join(", ")
        };
        match name {
            None if self.disks.len() == 1 => Ok(0),
            None => Err(format!("there are several disks, so name one: {}", names())),
            Some(name) => {
                let found = self.disks.iter().position(|disk| disk.name() == name);
                found.ok_or_else(|| format!("there is no disk '{name}', only {}", names()))
            }
        }
    }

    fn handle_for(&mut self, index: usize, request: Request) -> Result<Value, String> {
        let disk = &mut self.disks[index];
        match request {
            Request::Stats => json(&disk.summary()),
            Request::Info => json(&self.info(index)),
            Request::Trace { file } => disk.switch_trace(file),
            Request::Resize => disk.resize(),
            Request::Set { filter, options } => {
                let info = disk.set_filter(&filter, options)?;
                self.look(index)?;
                json(&info)
            }
            Request::Disks | Request::Quit => unreachable!("they are for the daemon"),
        }
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

    fn info(&self, index: usize) -> Info {
        let disk = &self.disks[index];
        let nbd = self.nbd.as_ref().zip(disk.export_name());
        Info {
            nbd: nbd.map(|(nbd, export)| nbd.info(export)),
            uptime_seconds: self.started.elapsed().as_secs(),
            ..disk.info()
        }
    }
}

/// See [`Daemon::poll`].
struct Ready {
    end: bool,
    /// Disks whose trace was truncated.
    cut: Vec<usize>,
    clients: Vec<PollFlags>,
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

fn json(value: &impl serde::Serialize) -> Result<Value, String> {
    serde_json::to_value(value).map_err(|error| error.to_string())
}

/// Where systemd (or another manager) wants to know.
fn notify_manager(state: sd_notify::NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!("cannot notify the service manager: {error}");
    }
}
