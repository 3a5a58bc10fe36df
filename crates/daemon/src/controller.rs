//! Carries out commands, on the control thread.
//!
//! The registry (`fathom_control`) decides what is to be done about disks' definitions. Disks themselves belong to the
//! [`Host`]. The result of an operation arrives in a later [`Controller::turn`], as a [`Step`].
//!
//! - `effects` starts the operations that the registry wants;
//! - `reload` reads definitions, `adopt` stores those of static disks;
//! - `groups` are disks that share limits;
//! - `waiting` has the timeouts of commands;
//! - `handover` continues in another process.

mod adopt;
mod effects;
mod groups;
mod handover;
mod places;
mod reload;
mod waiting;

use crate::command::{Ask, Command};
use crate::files::Keeper;
use crate::host::Host;
use crate::mailbox::{Mailbox, Post};
use crate::options::{ApiOptions, NbdOptions, ServeOptions};
use crate::reply::{Answer, Asker, Disk, Disks, Done, FailedDisk, Shown};
use crate::request::Request;
use crate::stop_timeout::StopTimeout;
use crate::tenancy::Tenancy;
use fathom_control::{Owner, Registry, Request as Change, RequestId};
use fathom_metrics::Events;
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
use waiting::Waiting;

/// Who asks for what takes no time waits so long at most.
const BRIEF: Duration = Duration::from_secs(5);

/// Who asks for what storage is waited for.
const LONG: Duration = Duration::from_secs(60);

/// Time that the users of a disk that is being removed may take to leave.
const LEAVE: Duration = Duration::from_secs(1);

/// A step that runs on the control thread.
pub type Step = Box<dyn FnOnce(&mut Controller) + Send>;

pub struct Controller {
    host: Box<dyn Host>,
    /// Which disks exist, and who owns their names.
    registry: Registry,
    /// Receivers of the replies to the registry's requests.
    askers: BTreeMap<RequestId, Asker>,
    next_request: u64,
    /// Disks that are being changed, as the host has shown them last.
    shown: BTreeMap<String, Shown>,
    /// When the server tries again to open disks, by name.
    retries: BTreeMap<String, Instant>,
    /// Had by whatever was begun and goes on in a later step.
    under_way: Arc<()>,
    waiting: Waiting,
    mail: Mailbox<Step>,
    events: Events,
    stop_timeout: StopTimeout,
    is_ending: bool,
    /// Writes the files of disks that are kept.
    keeper: Option<Keeper>,
    /// Their directory, and its lock.
    kept: Option<(PathBuf, OwnedFd)>,
    /// Somebody wants another process to go on.
    upgrade: Option<Upgrade>,
    /// The file that says what there is to be.
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
    /// The disks that `host` has are the configuration's.
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
            askers: BTreeMap::new(),
            next_request: 0,
            shown: BTreeMap::new(),
            retries: BTreeMap::new(),
            host,
            under_way: Arc::default(),
            waiting: Waiting::default(),
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

    /// For who asks on other threads.
    pub fn post(&self) -> Post<Step> {
        self.mail.post()
    }

    /// Somebody has asked for the end.
    pub fn is_ending(&self) -> bool {
        self.is_ending
    }

    /// One of these is readable when there is something for [`Controller::turn`].
    pub fn events(&self) -> Vec<BorrowedFd<'_>> {
        let mut events = self.host.events();
        events.push(self.mail.as_fd());
        events
    }

    /// Nothing goes on in a later step.
    fn is_settled(&self) -> bool {
        Arc::strong_count(&self.under_way) == 1
    }

    /// How long [`Controller::turn`] can wait.
    pub fn patience(&self) -> Option<Duration> {
        let retry = self.retries.values().min();
        let retry = retry.map(|at| at.saturating_duration_since(Instant::now()));
        let own = [self.waiting.patience(), self.until_upgrade_is_late(), retry];
        let own = own.into_iter().flatten();
        own.chain(self.host.patience()).min()
    }

    /// Go on with what has come. False: something has ended that should not.
    pub fn turn(&mut self) -> bool {
        let goes_on = self.host.turn();
        self.take_steps();
        self.waiting.tell_late();
        self.retry_due();
        goes_on
    }

    /// Carries out what has come of commands.
    fn take_steps(&mut self) {
        for step in self.mail.take() {
            step(self);
        }
    }

    /// Carries a request out; the reply comes at once or later.
    pub fn handle(&mut self, request: Request, asker: Asker) {
        match request {
            Request::List => self.list(asker),
            Request::Show { disk } => self.show(disk, asker),
            Request::Change { disk, change } => self.change(disk, change, asker),
            Request::Host { disk, command } => self.ask_host(disk, command, asker),
            Request::ListGroups => self.list_groups(asker),
            Request::SetGroup {
                group,
                options,
                until_restart,
            } => self.set_group(group, options, until_restart, asker),
            Request::Upgrade { binary, disconnect } => {
                self.begin_upgrade(binary, disconnect, asker);
            }
            Request::Quit => {
                self.is_ending = true;
                asker(Ok(Done {}.into()));
            }
        }
    }

    /// Changes what a disk is.
    fn change(&mut self, disk: String, change: Change, asker: Asker) {
        let timeout = self.stop_timeout;
        let asker = match &change {
            Change::Adopt { .. } => {
                let text = format!("disk '{disk}': the configuration was not read within 60 s");
                let asker = self.waiting.until(Instant::now() + LONG, text, asker);
                return self.adopt(disk, asker);
            }
            Change::Put { .. } | Change::Switch { .. } => asker,
            Change::SetFilter { .. } => self.briefly(&disk, asker),
            Change::Resize { .. } => {
                let text = format!(
                    "disk '{disk}': resizing takes longer than --stop-timeout and continues"
                );
                self.waiting.until(Instant::now() + timeout.0, text, asker)
            }
            Change::Remove { force, .. } => {
                let leave = if *force { Duration::ZERO } else { LEAVE };
                let text = format!(
                    "disk '{disk}': requests are still in flight after {timeout}; the disk is \
                     removed as soon as they have completed"
                );
                let until = Instant::now() + leave + timeout.0;
                self.waiting.until(until, text, asker)
            }
        };
        self.request(disk, change, asker);
    }

    /// Passes a command on to the disk's host.
    fn ask_host(&mut self, disk: String, command: Command, asker: Asker) {
        let checked = match &command {
            Command::BeginCommit(order) => self.registry.check_image_change(&disk, order.unkept),
            _ => Ok(()),
        };
        if let Err(error) = checked.and_then(|()| self.registry.check_served(&disk)) {
            return asker(Err(error));
        }
        let asker = match command.is_slow() {
            false => self.briefly(&disk, asker),
            true => {
                let text = format!(
                    "disk '{disk}': the operation takes longer than 60 s and continues in the \
                     background"
                );
                self.waiting.until(Instant::now() + LONG, text, asker)
            }
        };
        self.host.ask(Ask::of(&disk, command), asker);
    }

    /// Sends a command to the disk's host, and continues with the reply.
    fn then(
        &mut self,
        disk: &str,
        command: Command,
        next: impl FnOnce(&mut Controller, Answer) + Send + 'static,
    ) {
        let asker = self.later(next);
        self.host.ask(Ask::of(disk, command), asker);
    }

    /// Takes what comes, and goes on with it in a later step.
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

    /// For what takes no time, unless a disk's process says nothing.
    fn briefly(&mut self, disk: &str, asker: Asker) -> Asker {
        let text = format!(
            "disk '{disk}': the disk's process did not respond within 5 s; retry, or see the log"
        );
        self.waiting.until(Instant::now() + BRIEF, text, asker)
    }

    fn show(&mut self, name: String, asker: Asker) {
        if let Err(error) = self.registry.check_served(&name) {
            return asker(Err(error));
        }
        let asker = self.briefly(&name, asker);
        self.then(&name, Command::Show, |controller, answer| {
            let shown = answer.and_then(Shown::try_from);
            asker(shown.map(|shown| controller.disk(shown).into()));
        });
    }

    fn list(&mut self, asker: Asker) {
        self.list_shown(|controller, shown| {
            let disks = shown.into_iter().map(|shown| controller.disk(shown));
            let disks = Disks {
                disks: disks.collect(),
                failed: controller.failed(),
            };
            asker(Ok(disks.into()));
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
