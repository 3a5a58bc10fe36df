//! A running daemon: what it is made of, and the thread that watches it.

use crate::cage;
use crate::control_thread::ControlThread;
use crate::controller::{Controller, Upgrade, one_definition_each};
use crate::files::KeptDisks;
use crate::handover::{self, HandedOver, Starter};
use crate::limits;
use fathom_api::{Api, ApiSockets};
use fathom_disks::Objects;
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

/// How a daemon has ended.
#[derive(Debug)]
pub struct Ended {
    /// The process that goes on with everything, what was counted included: nothing ends.
    pub successor: Option<u32>,
    /// Where the requests spent their time, by disk.
    pub outcomes: Vec<(String, Outcome)>,
    /// Whether all that was in flight is finished. If it was abandoned, there
    /// are threads that still have to do with it: the process is to end.
    pub stopped: Result<(), Error>,
}

/// Some disks being served.
pub struct Daemon {
    controller: Controller,
    api: Option<Api>,
    termination: Termination,
    reload: Option<Reload>,
    starter: Starter,
    /// Which there is.
    successor: Option<u32>,
}

impl Daemon {
    /// Open the disks, start their workers and listen for clients, who are
    /// served from then on. Call it before there are other threads that look at
    /// the environment, by whose variables sockets of a service manager come, or
    /// that leave SIGTERM and SIGINT on: these are caught from here on, for
    /// [`Daemon::run`].
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

    /// Go on with what the process at the other end of `socket` serves, by these options, of which
    /// the disks do not matter. The same holds. On an error, all is that process's.
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
        // Guests run: it is too late to give up.
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

    /// Watch over it until SIGTERM, SIGINT or a client of the API
    /// ends it. Then what is in flight is finished, unless that takes too
    /// long, and the sockets are removed.
    pub fn run(mut self) -> Result<Ended, Error> {
        while self.wait()? {}
        if self.successor.is_some() {
            let successor = self.successor;
            // Nothing of it is this process's any more.
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
            // Dropped, it would be waited for.
            drop(self.api.take());
            std::mem::forget(self);
        }
        Ok(Ended {
            successor: None,
            outcomes,
            stopped,
        })
    }

    /// Sleep until there is something to do, and do it. False: it is to end.
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

    /// Have another process go on, if it can.
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

    /// Until a signal says that it is to end (true), or there is something else to do.
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

/// The reply to an upgrade.
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

/// What a daemon has around it, before it has threads.
struct Surroundings {
    termination: Termination,
    reload: Option<Reload>,
    starter: Starter,
    /// Until all threads are there.
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
        // Its tenants have theirs.
        true => Mode::Off,
        false => options.sandbox,
    };
    let starter = Starter::new(options.arguments.clone(), sandbox)?;
    finder::install(starter.finder(options.sandbox));
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

/// Programs that print them cannot be started from within the cage.
fn read_keys(options: &ServeOptions) -> Result<(), Error> {
    let keys = options.disks.iter().map(|disk| &disk.disk.keys);
    let mut printed = keys.filter(|keys| keys.run_programs());
    let told = |problem| fathom_stack::Error::Description(problem).into();
    printed.try_for_each(|keys| keys.keys().map(drop).map_err(told))
}

/// Where systemd (or another manager) wants to know.
fn notify_manager(state: NotifyState<'static>) {
    let mut states = vec![state];
    if matches!(states[0], NotifyState::Reloading) {
        // That is how it tells this reload from others.
        states.extend(NotifyState::monotonic_usec_now().ok());
    }
    if let Err(error) = sd_notify::notify(&states) {
        tracing::warn!("cannot notify the service manager: {}", cause(error));
    }
}
