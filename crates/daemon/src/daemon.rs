//! A running server: its parts, and the main loop of its control thread.

use crate::cage;
use crate::control_thread::ControlThread;
use crate::controller::{Controller, Upgrade, one_definition_each};
use crate::files::KeptDisks;
use crate::handover::{self, HandedOver, Starter};
use crate::limits;
use fathom_api::{Api, ApiSockets};
use fathom_disks::Objects;
use fathom_exports::fuse::install_launcher;
use fathom_files::superseded;
use fathom_host::handover::Renewal;
use fathom_host::options::{DiskOptions, ServeOptions};
use fathom_host::signals::{LeftToThisThread, Reload, Termination};
use fathom_host::{Error, Host, Outcome, socket};
use fathom_metrics::Scale;
use fathom_requests::{Successor, TenantSuccessor};
use fathom_sandbox::Mode;
use fathom_storage::cached::finder;
use fathom_supervisor::Tenants;
use fathom_trace::Clock;
use fathom_units::cause;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use sd_notify::NotifyState;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// How a server has ended.
#[derive(Debug)]
pub struct Ended {
    /// Process id of the successor, which serves everything from now on and continues the counters.
    /// None: the server has stopped.
    pub successor: Option<u32>,
    /// Statistics of each disk: where its requests spent their time.
    pub outcomes: Vec<(String, Outcome)>,
    /// Whether all requests in flight are complete. After [`Error::Abandoned`], threads still use
    /// the disks, so the process must exit.
    pub stopped: Result<(), Error>,
}

/// A server with its disks.
pub struct Daemon {
    controller: Controller,
    api: Option<Api>,
    termination: Termination,
    reload: Option<Reload>,
    starter: Starter,
    /// Process id of the process that has taken over.
    successor: Option<u32>,
}

impl Daemon {
    /// Opens the disks, starts their workers, and listens for clients, which are served from then
    /// on.
    ///
    /// Must be called while no other thread reads the environment, because the sockets that a
    /// service manager passes are found by environment variables. No other thread may leave SIGTERM
    /// and SIGINT unblocked: from here on, these signals are for [`Daemon::run`].
    pub fn start(options: ServeOptions) -> Result<Daemon, Error> {
        options.validate().map_err(Error::Options)?;
        let Surroundings {
            termination,
            reload,
            starter,
            signals,
        } = surround(&options)?;
        let kept = options.kept.as_deref().map(KeptDisks::open).transpose();
        let kept = kept.map_err(Error::Options)?;
        let found = kept.as_ref().map(KeptDisks::read).unwrap_or_default();
        let disks = one_definition_each(&options.disks, &found, options.kept.as_deref());
        let (mut controller, sockets) = match options.tenants {
            true => (
                controller(Box::new(Tenants::new(&options)?), &options)?,
                ApiSockets::open(&options.api)?,
            ),
            false => open_here(&options, &disks)?,
        };
        controller.begin(&options, kept, found)?;
        controller.wait_for_coming();
        let scale = Scale::new(Clock::get().hz());
        let groups = options.api.groups;
        let thread = Arc::new(ControlThread(controller.post()));
        let start = |sockets| Api::start(sockets, scale, groups, thread, options.events);
        let api = sockets.map(start).transpose();
        let api = api.map_err(Error::io("cannot serve the API"))?;
        drop(signals);
        let daemon = Daemon {
            controller,
            api,
            termination,
            reload,
            starter,
            successor: None,
        };
        daemon.announce();
        Ok(daemon)
    }

    /// Takes over from the process at the other end of `socket`, by these options, whose disks are
    /// ignored. The rules of [`Daemon::start`] apply. After an error, that process keeps serving
    /// everything.
    pub fn take_over(options: ServeOptions, socket: OwnedFd) -> Result<Daemon, Error> {
        let Surroundings {
            termination,
            reload,
            starter,
            signals,
        } = surround(&options)?;
        let (groups, events) = (options.api.groups, options.events.clone());
        let mut heir = handover::receive(options, socket)?;
        let thread = Arc::new(ControlThread(heir.controller.post()));
        let api = heir
            .sockets
            .take()
            .map(|(sockets, scale)| Api::start(sockets, scale, groups, thread, events));
        // The guests run already, so that an API which cannot start is no reason to give up.
        let api = api.transpose().unwrap_or_else(|error| {
            tracing::error!("API: cannot serve clients: {error}");
            None
        });
        drop(signals);
        heir.settle();
        let daemon = Daemon {
            controller: heir.renew_tenants(),
            api,
            termination,
            reload,
            starter,
            successor: None,
        };
        daemon.announce();
        Ok(daemon)
    }

    fn announce(&self) {
        for line in self.controller.host().describe() {
            tracing::info!("{line}");
        }
        if self.controller.host().names().is_empty() {
            tracing::info!("no disk is served yet; add one with 'fathom disk add'");
        }
        if let Some(api) = &self.api {
            tracing::info!("the API is at {}", api.path().display());
            if let Some(address) = api.remote_address() {
                tracing::info!("clients of other hosts can connect by TLS at {address}");
            }
            if let Some(address) = api.web_address() {
                tracing::info!(
                    "metrics are at http://{address}/metrics, a live page is at http://{address}/"
                );
            }
        }
        notify_manager(NotifyState::Ready);
    }

    /// Runs the main loop until SIGTERM, SIGINT or a client of the API stops the server, or a
    /// successor takes over. A server that stops completes requests in flight, unless that exceeds
    /// the timeout, and removes its sockets.
    pub fn run(mut self) -> Result<Ended, Error> {
        while self.wait()? {}
        if self.successor.is_some() {
            let successor = self.successor;
            // All of the server's files and sockets are the successor's now, so no destructor may
            // run.
            std::mem::forget(self);
            return Ok(Ended {
                successor,
                outcomes: Vec::new(),
                stopped: Ok(()),
            });
        }
        notify_manager(NotifyState::Stopping);
        tracing::info!("stopping");
        let stopped = self.controller.host_mut().stop();
        let outcomes = self.controller.host().outcomes();
        if matches!(stopped, Err(Error::Abandoned { .. })) {
            // A destructor would wait for the threads of the abandoned requests.
            drop(self.api.take());
            std::mem::forget(self);
        }
        Ok(Ended {
            successor: None,
            outcomes,
            stopped,
        })
    }

    /// Waits for an event and handles it. False: the server must end.
    fn wait(&mut self) -> Result<bool, Error> {
        let is_told = self.poll().map_err(Error::io("cannot wait for events"))?;
        if is_told || !self.controller.turn() {
            return Ok(false);
        }
        if self.controller.take_reloaded() {
            notify_manager(NotifyState::Ready);
        }
        if self.reload.as_ref().is_some_and(Reload::take) {
            notify_manager(NotifyState::Reloading);
            self.controller.reload();
        }
        if let Some(upgrade) = self.controller.take_upgrade() {
            self.upgrade(upgrade);
        }
        Ok(!self.controller.is_ending() && self.successor.is_none())
    }

    /// Hands over to a new process. After an error, this process continues.
    fn upgrade(
        &mut self,
        Upgrade {
            binary, responder, ..
        }: Upgrade,
    ) {
        tracing::info!("upgrade: handing over to a new process");
        let api = self.api.as_ref();
        match handover::hand_over(&mut self.controller, api, &self.starter, binary) {
            Err(error) => {
                tracing::error!("upgrade failed: {error}");
                responder(Err(error));
            }
            Ok(done) => {
                self.successor = Some(done.pid);
                notify_manager(NotifyState::MainPid(done.pid));
                responder(Ok(successor(done).into()));
                self.api.take().into_iter().for_each(Api::leave);
            }
        }
    }

    /// Waits for an event or a timeout. True: a signal asks the server to stop.
    fn poll(&self) -> io::Result<bool> {
        let input = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut fds = vec![input(self.termination.as_fd())];
        fds.extend(self.controller.events().into_iter().map(input));
        fds.extend(self.reload.iter().map(|reload| input(reload.as_fd())));
        let timeout = self.controller.patience();
        let timeout = timeout.map(|t| Timespec::try_from(t).expect("some seconds"));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(!fds[0].revents().is_empty()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Converts the result of a handover to the reply to an upgrade request.
fn successor(mut done: HandedOver) -> Successor {
    let pid = done.pid;
    let pause_ms = done.pause.as_secs_f64() * 1e3;
    let Some(mut tenants) = done.tenants() else {
        tracing::info!(
            "upgrade: process {pid} has taken over; queues stood still for {pause_ms:.1} ms"
        );
        return Successor {
            pid,
            pause_ms,
            tenants: None,
        };
    };
    tenants.sort_by(|a, b| a.tenant.cmp(&b.tenant));
    let pauses = tenants.iter().filter_map(|one| one.outcome.as_ref().ok());
    let longest = pauses.copied().fold(0.0, f64::max);
    let tenant = |one: Renewal| TenantSuccessor {
        tenant: one.tenant,
        pid: one.pid,
        pause_ms: one.outcome.as_ref().ok().copied(),
        problem: one.outcome.err(),
    };
    Successor {
        pid,
        pause_ms: longest,
        tenants: Some(tenants.into_iter().map(tenant).collect()),
    }
}

/// Opens these disks in this process.
fn open_here(
    options: &ServeOptions,
    disks: &[DiskOptions],
) -> Result<(Controller, Option<ApiSockets>), Error> {
    let (mut front_ends, mut listening) = (Vec::new(), Vec::new());
    for disk in disks {
        let socket = disk.vhost_user.as_ref();
        let listen = |spec| socket::listen_for_front_ends(spec, disk.access);
        match socket.map(listen).transpose() {
            Ok(listener) => {
                front_ends.push(listener);
                listening.push(disk.clone());
            }
            // (The controller tries again.)
            Err(_) if disk.can_be_opened_later() => {}
            Err(error) => return Err(disk.blame(error)),
        }
    }
    let addresses = options.nbd.iter().flat_map(|nbd| &nbd.listen);
    let access = options.nbd.as_ref().map(|nbd| nbd.access);
    let clients = socket::listen_for_nbd(addresses, access.unwrap_or_default())?;
    let opened = ServeOptions {
        disks: listening,
        ..options.clone()
    };
    let mut objects = Objects::open(opened, front_ends, clients)?;
    let sockets = ApiSockets::open(&options.api)?;
    objects.serve()?;
    Ok((controller(Box::new(objects), options)?, sockets))
}

fn controller(host: Box<dyn Host>, options: &ServeOptions) -> Result<Controller, Error> {
    Controller::new(host, options).map_err(Error::io("cannot create a command queue"))
}

/// Signals, helper process and the like, which a server sets up before it starts threads.
struct Surroundings {
    termination: Termination,
    reload: Option<Reload>,
    starter: Starter,
    /// Blocks signals for new threads, until all threads have been started.
    signals: LeftToThisThread,
}

fn surround(options: &ServeOptions) -> Result<Surroundings, Error> {
    let caught = Error::io("cannot catch signals");
    let termination = Termination::new().map_err(&caught)?;
    limits::raise();
    if let Some(definitions) = &options.kept {
        superseded::set_directory(definitions);
    }
    let sandbox = match options.tenants {
        // Each tenant's process enters a sandbox of its own.
        true => Mode::Off,
        false => options.sandbox,
    };
    let starter = Starter::new(options.arguments.clone(), sandbox)?;
    finder::install(starter.finder(options.sandbox));
    install_launcher(starter.launcher());
    if !options.tenants {
        read_keys(options)?;
        cage::enter(sandbox);
    }
    let signals = LeftToThisThread::begin();
    let reload = options.config.as_ref().map(|_| Reload::new());
    Ok(Surroundings {
        termination,
        reload: reload.transpose().map_err(&caught)?,
        starter,
        signals,
    })
}

/// Reads the keys that programs print, because the sandbox does not let the server start programs.
fn read_keys(options: &ServeOptions) -> Result<(), Error> {
    let keys = options.disks.iter().map(|disk| &disk.disk.keys);
    let mut printed = keys.filter(|keys| keys.run_programs());
    let told = |problem| fathom_stack::Error::Description(problem).into();
    printed.try_for_each(|keys| keys.keys().map(drop).map_err(told))
}

/// Notifies the service manager, if there is one.
fn notify_manager(state: NotifyState<'static>) {
    let mut states = vec![state];
    if matches!(states[0], NotifyState::Reloading) {
        // systemd identifies a reload by this time.
        states.extend(NotifyState::monotonic_usec_now().ok());
    }
    if let Err(error) = sd_notify::notify(&states) {
        tracing::warn!("cannot notify the service manager: {}", cause(error));
    }
}
