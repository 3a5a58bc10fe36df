//! A running daemon: what it is made of, and the thread that watches it.

use crate::api::{Api, Door};
use crate::error::Error;
use crate::limits;
use crate::objects::{CALIBRATE_EVERY, Objects, Outcome, Served};
use crate::options::ServeOptions;
use crate::signals::{LeftToThisThread, Reload, Termination};
use crate::socket;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use sd_notify::NotifyState;
use std::io;
use std::os::fd::AsFd;

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
    objects: Objects,
    api: Option<Api>,
    termination: Termination,
    reload: Option<Reload>,
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
        let access = options.nbd.as_ref().map(|nbd| nbd.access);
        let clients = socket::listen_for_nbd(addresses, access.unwrap_or_default())?;
        let signals = LeftToThisThread::new();
        let (api, events) = (options.api.clone(), options.events.clone());
        let kept = options.kept.clone();
        let reload = options.config.as_ref().map(|_| Reload::new()).transpose();
        let reload = reload.map_err(Error::io("cannot catch signals"))?;
        let mut objects = Objects::open(options, front_ends, clients)?;
        let door = Door::open(&api)?;
        objects.serve()?;
        if let Some(dir) = kept {
            objects.keep_disks_in(&dir)?;
        }
        let api = door.map(|door| Api::start(door, api.groups, objects.post(), events.clone()));
        let api = api.transpose().map_err(Error::io("cannot serve the API"))?;
        drop(signals);
        let daemon = Daemon {
            objects,
            api,
            termination,
            reload,
        };
        daemon.announce();
        Ok(daemon)
    }

    fn announce(&self) {
        for disk in self.objects.disks() {
            tracing::info!("{}", disk.describe());
        }
        if self.objects.disks().is_empty() {
            tracing::info!("no disk is served yet: `fathom disk add` adds some");
        }
        if let Some(nbd) = self.objects.nbd() {
            tracing::info!("NBD clients connect to {}", nbd.addresses().join(", "));
        }
        if let Some(api) = &self.api {
            tracing::info!("the API is at {}", api.path().display());
        }
        notify_manager(NotifyState::Ready);
    }

    /// Watch over it until SIGTERM, SIGINT or a client of the API
    /// ends it. Then what is in flight is finished, unless that takes too
    /// long, and the sockets are removed.
    pub fn run(mut self) -> Result<Ended, Error> {
        while self.wait()? {}
        notify_manager(NotifyState::Stopping);
        tracing::info!("stopping");
        let stopped = self.objects.stop();
        let outcome = |disk: &Served| (disk.name().to_owned(), disk.outcome());
        let outcomes = self.objects.disks().iter().map(outcome).collect();
        if matches!(stopped, Err(Error::Abandoned { .. })) {
            // Dropped, it would be waited for.
            drop(self.api.take());
            std::mem::forget(self);
        }
        Ok(Ended { outcomes, stopped })
    }

    /// Sleep until there is something to do, and do it. False: it is to end.
    fn wait(&mut self) -> Result<bool, Error> {
        let ready = self.poll().map_err(Error::io("cannot wait for events"))?;
        if ready.end {
            return Ok(false);
        }
        let objects = &mut self.objects;
        objects.see_to_traces(&ready.cut);
        objects.turn();
        if objects.take_reloaded() {
            notify_manager(NotifyState::Ready);
        }
        if self.reload.as_ref().is_some_and(Reload::take) {
            notify_manager(NotifyState::Reloading);
            objects.reload();
        }
        Ok(!objects.is_ending())
    }

    /// What poll(2) says of the signals, of the serving threads, of the
    /// objects' events, and of the traces.
    fn poll(&self) -> io::Result<Ready> {
        let mut fds = vec![PollFd::new(&self.termination, PollFlags::IN)];
        let input = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        fds.extend(self.objects.ended().map(input));
        let ends = fds.len();
        fds.push(input(self.objects.event()));
        fds.extend(self.reload.iter().map(|reload| input(reload.as_fd())));
        let events = fds.len();
        fds.extend(
            self.objects
                .traces()
                .map(|(_, trace)| input(trace.cut_event())),
        );
        let patience = [
            self.objects.patience(),
            (fds.len() > events).then_some(CALIBRATE_EVERY),
        ];
        let timeout = patience.into_iter().flatten().min();
        let timeout = timeout.map(|t| Timespec::try_from(t).expect("some seconds"));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let cut = self.objects.traces().zip(&fds[events..]);
        Ok(Ready {
            end: fds[..ends].iter().any(is_ready),
            cut: cut
                .filter(|(_, fd)| is_ready(fd))
                .map(|((disk, _), _)| disk)
                .collect(),
        })
    }
}

/// See [`Daemon::poll`].
struct Ready {
    end: bool,
    /// Disks whose trace was truncated.
    cut: Vec<usize>,
}

/// Where systemd (or another manager) wants to know.
fn notify_manager(state: NotifyState<'static>) {
    let mut states = vec![state];
    if matches!(states[0], NotifyState::Reloading) {
        // That is how it tells this reload from others.
        states.extend(NotifyState::monotonic_usec_now().ok());
    }
    if let Err(error) = sd_notify::notify(&states) {
        tracing::warn!("cannot notify the service manager: {error}");
    }
}
