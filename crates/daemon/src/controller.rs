//! Carries out requests, on the control thread.
//!
//! The registry (`fathom_control`) decides what is to be done about disks' definitions. Disks
//! themselves belong to the [`Host`]. The result of an operation arrives in a later
//! [`Controller::turn`], as a [`Step`].
//!
//! - `effects` starts the operations that the registry wants;
//! - `reload` reads definitions, `adopt` stores those of static disks;
//! - `groups` are disks that share limits;
//! - `timeouts` has the timeouts of requests;
//! - `handover` continues in another process.

mod adopt;
mod effects;
mod groups;
mod handover;
mod places;
mod reload;
mod timeouts;

use crate::files::Keeper;
use fathom_api::ApiOptions;
use fathom_control::{Owner, Registry, Request as Change, RequestId};
use fathom_host::mailbox::{Mailbox, Post};
use fathom_host::options::{NbdOptions, ServeOptions};
use fathom_host::{Host, StopTimeout, Tenancy};
use fathom_metrics::Events;
use fathom_requests::{
    Answer, Ask, Command, Disk, Disks, Done, FailedDisk, Request, Responder, Shown,
};
use fathom_sandbox::Mode;
use fathom_stack::PoolOptions;
pub use handover::Upgrade;
use places::{places, specs};
pub use reload::one_definition_each;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use timeouts::Timeouts;

/// Timeout for commands that do no I/O.
const BRIEF: Duration = Duration::from_secs(5);

/// Timeout for commands that wait for storage.
const LONG: Duration = Duration::from_secs(60);

/// Time in which a disk that is to be removed must become unused.
const LEAVE: Duration = Duration::from_secs(1);

/// A step that runs on the control thread.
pub type Step = Box<dyn FnOnce(&mut Controller) + Send>;

pub struct Controller {
    host: Box<dyn Host>,
    /// The disks' definitions, and the owners of their names.
    registry: Registry,
    /// Responders of the registry's requests.
    responders: BTreeMap<RequestId, Responder>,
    next_request: u64,
    /// How the host has last shown disks that are being changed.
    shown: BTreeMap<String, Shown>,
    /// Times of the next attempts to open disks, by name.
    retries: BTreeMap<String, Instant>,
    /// Held by every operation in progress; the strong count is one more than their number.
    under_way: Arc<()>,
    timeouts: Timeouts,
    mail: Mailbox<Step>,
    events: Events,
    stop_timeout: StopTimeout,
    is_ending: bool,
    /// Writes the files of persistent disks.
    keeper: Option<Keeper>,
    /// The directory of these files, and its lock.
    kept: Option<(PathBuf, OwnedFd)>,
    /// An upgrade that was requested.
    upgrade: Option<Upgrade>,
    /// The configuration file.
    config: Option<PathBuf>,
    reloaded: bool,
    settings: Settings,
}

/// Options that a reload cannot change.
#[derive(PartialEq, Eq)]
struct Settings {
    pools: Vec<PoolOptions>,
    nbd: Option<NbdOptions>,
    api: ApiOptions,
    kept: Option<PathBuf>,
    tenants: (bool, Tenancy),
    sandbox: Mode,
}

impl Settings {
    fn of(options: &ServeOptions) -> Settings {
        Settings {
            pools: options.pools.clone(),
            nbd: options.nbd.clone(),
            api: options.api.clone(),
            kept: options.kept.clone(),
            tenants: (options.tenants, options.tenancy.clone()),
            sandbox: options.sandbox,
        }
    }
}

fn registry_settings(host: &dyn Host, disks_dir: Option<PathBuf>) -> fathom_control::Settings {
    fathom_control::Settings {
        disks_dir,
        open_listener: host.open_listener(),
    }
}

impl Controller {
    /// Creates a controller. The configuration defines all disks of `host`.
    pub fn new(host: Box<dyn Host>, options: &ServeOptions) -> io::Result<Controller> {
        let names = host.names();
        let served = specs(&options.disks).filter(|spec| names.contains(&spec.name));
        let registry = Registry::new(
            registry_settings(&*host, options.kept.clone()),
            served.cloned(),
            places(&options.disks),
        );
        Ok(Controller {
            registry,
            responders: BTreeMap::new(),
            next_request: 0,
            shown: BTreeMap::new(),
            retries: BTreeMap::new(),
            host,
            under_way: Arc::default(),
            timeouts: Timeouts::default(),
            mail: Mailbox::new()?,
            events: options.events.clone(),
            stop_timeout: options.stop_timeout,
            is_ending: false,
            keeper: None,
            kept: None,
            upgrade: None,
            config: options.config.clone(),
            reloaded: false,
            settings: Settings::of(options),
        })
    }

    pub fn host(&self) -> &dyn Host {
        &*self.host
    }

    pub fn host_mut(&mut self) -> &mut dyn Host {
        &mut *self.host
    }

    /// Sends steps from other threads.
    pub fn post(&self) -> Post<Step> {
        self.mail.post()
    }

    /// Whether a client has asked the server to end.
    pub fn is_ending(&self) -> bool {
        self.is_ending
    }

    /// File descriptors, one of which is readable when [`Controller::turn`] has work to do.
    pub fn events(&self) -> Vec<BorrowedFd<'_>> {
        let mut events = self.host.events();
        events.push(self.mail.as_fd());
        events
    }

    /// Whether no operation is in progress.
    fn is_settled(&self) -> bool {
        Arc::strong_count(&self.under_way) == 1
    }

    /// Time after which [`Controller::turn`] must be called in any case.
    pub fn patience(&self) -> Option<Duration> {
        let retry = self.retries.values().min();
        let retry = retry.map(|at| at.saturating_duration_since(Instant::now()));
        let own = [self.timeouts.next(), self.until_upgrade_is_late(), retry];
        let own = own.into_iter().flatten();
        own.chain(self.host.patience()).min()
    }

    /// Handles events. False: a thread that serves clients has ended, which is an error.
    pub fn turn(&mut self) -> bool {
        let goes_on = self.host.turn();
        self.take_steps();
        self.timeouts.expire();
        self.retry_due();
        goes_on
    }

    /// Runs the steps that have arrived.
    fn take_steps(&mut self) {
        for step in self.mail.take() {
            step(self);
        }
    }

    /// Carries a request out; the reply comes at once or later.
    pub fn handle(&mut self, request: Request, responder: Responder) {
        match request {
            Request::List => self.list(responder),
            Request::Show { disk } => self.show(disk, responder),
            Request::Change { disk, change } => self.change(disk, change, responder),
            Request::Host { disk, command } => self.ask_host(disk, command, responder),
            Request::ListGroups => self.list_groups(responder),
            Request::SetGroup {
                group,
                options,
                until_restart,
            } => self.set_group(group, options, until_restart, responder),
            Request::Upgrade { binary, disconnect } => {
                self.begin_upgrade(binary, disconnect, responder);
            }
            Request::Quit => {
                self.is_ending = true;
                responder(Ok(Done {}.into()));
            }
        }
    }

    /// Changes what a disk is.
    fn change(&mut self, disk: String, change: Change, responder: Responder) {
        let timeout = self.stop_timeout;
        let responder = match &change {
            Change::Adopt { .. } => {
                let text = format!("disk '{disk}': the configuration was not read within 60 s");
                let responder = self.timeouts.until(Instant::now() + LONG, text, responder);
                return self.adopt(disk, responder);
            }
            Change::Put { .. } | Change::Switch { .. } => responder,
            Change::SetFilter { .. } => self.briefly(&disk, responder),
            Change::Resize { .. } => {
                let text = format!(
                    "disk '{disk}': resizing takes longer than --stop-timeout and continues"
                );
                self.timeouts
                    .until(Instant::now() + timeout.0, text, responder)
            }
            Change::Remove { force, .. } => {
                let leave = if *force { Duration::ZERO } else { LEAVE };
                let text = format!(
                    "disk '{disk}': requests are still in flight after {timeout}; the disk is \
                     removed as soon as they have completed"
                );
                let until = Instant::now() + leave + timeout.0;
                self.timeouts.until(until, text, responder)
            }
        };
        self.request(disk, change, responder);
    }

    /// Passes a command on to the disk's host.
    fn ask_host(&mut self, disk: String, command: Command, responder: Responder) {
        let checked = match &command {
            Command::BeginCommit(order) => self.registry.check_image_change(&disk, order.unkept),
            _ => Ok(()),
        };
        if let Err(error) = checked.and_then(|()| self.registry.check_served(&disk)) {
            return responder(Err(error));
        }
        let responder = match command.is_slow() {
            false => self.briefly(&disk, responder),
            true => {
                let text = format!(
                    "disk '{disk}': the operation takes longer than 60 s and continues in the \
                     background"
                );
                self.timeouts.until(Instant::now() + LONG, text, responder)
            }
        };
        self.host.ask(Ask::of(&disk, command), responder);
    }

    /// Sends a command to the disk's host, and continues with the reply.
    fn then(
        &mut self,
        disk: &str,
        command: Command,
        next: impl FnOnce(&mut Controller, Answer) + Send + 'static,
    ) {
        let responder = self.later(next);
        self.host.ask(Ask::of(disk, command), responder);
    }

    /// Returns a callback that continues with its argument in a later step.
    fn later<T: Send + 'static>(
        &self,
        next: impl FnOnce(&mut Controller, T) + Send + 'static,
    ) -> Box<dyn FnOnce(T) + Send> {
        let (post, under_way) = (self.mail.post(), self.under_way.clone());
        Box::new(move |came| {
            let step: Step = Box::new(move |controller| {
                next(controller, came);
                drop(under_way);
            });
            post.send(step);
        })
    }

    /// Adds the timeout for commands that do no I/O: only a tenant's process can exceed it.
    fn briefly(&mut self, disk: &str, responder: Responder) -> Responder {
        let text = format!(
            "disk '{disk}': the disk's process did not respond within 5 s; retry, or see the log"
        );
        self.timeouts.until(Instant::now() + BRIEF, text, responder)
    }

    fn show(&mut self, name: String, responder: Responder) {
        if let Err(error) = self.registry.check_served(&name) {
            return responder(Err(error));
        }
        let responder = self.briefly(&name, responder);
        self.then(&name, Command::Show, |controller, answer| {
            let shown = answer.and_then(Shown::try_from);
            responder(shown.map(|shown| controller.disk(shown).into()));
        });
    }

    fn list(&mut self, responder: Responder) {
        self.list_shown(|controller, shown| {
            let disks = shown.into_iter().map(|shown| controller.disk(shown));
            let disks = Disks {
                disks: disks.collect(),
                failed: controller.failed(),
            };
            responder(Ok(disks.into()));
        });
    }

    /// All disks that are served, as their hosts show them.
    fn list_shown(&mut self, next: impl FnOnce(&mut Controller, Vec<Shown>) + Send + 'static) {
        let next = self.later(next);
        self.host.list(next);
    }

    /// The disks that are defined, but not served.
    fn failed(&self) -> Vec<FailedDisk> {
        let failures = self.registry.failures().map(|failure| FailedDisk {
            name: failure.name.to_owned(),
            owner: failure.owner,
            options: failure.spec.cloned(),
            problem: failure.problem.to_owned(),
            retried: failure.is_retried,
        });
        failures.collect()
    }

    /// Adds the disk's owner, and what the disk is after a restart.
    fn disk(&self, shown: Shown) -> Disk {
        let name = &shown.options.name;
        let owner = self.registry.owner_of(name).unwrap_or(Owner::Transient);
        let definition = self.registry.definition_of(name);
        Disk {
            definition: definition.map(|spec| spec.clone().without_defaults()),
            kept: owner != Owner::Transient,
            owner,
            options: shown.options,
            state: shown.state,
            created: shown.created,
        }
    }
}
