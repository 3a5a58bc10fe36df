//! Which disks there are to be, why, and what becomes of them when the server starts again.
//!
//! Everything that is asked of a server comes here. Disks themselves are somebody else's (see
//! [`Host`]), who is asked in turn; what comes of that goes on in a later [`Book::turn`], as a
//! [`Step`].
//!
//! - `origin` is why a disk is there, `definitions` is how it is defined, `ownership` who owns its name;
//! - `keeping` adds, changes and removes disks; `writing` has their files follow, by `pending_writes`;
//! - `groups` are disks that share limits;
//! - `reload` does what the configuration says, and what it says when it is read again;
//! - `switching` is how disks go on with other images;
//! - `waiting` is for who has waited long enough;
//! - `handover` has all of it go on in another process.

mod definitions;
mod groups;
mod handover;
mod keeping;
mod origin;
mod ownership;
mod pending_writes;
mod places;
mod reload;
mod switching;
mod waiting;
mod writing;

use crate::answer::{Answer, Asker};
use crate::command::{Ask, Command, Completion, SwitchTo};
use crate::events::Events;
use crate::files::Keeper;
use crate::host::Host;
use crate::mailbox::{Mailbox, Post};
use crate::options::{ApiOptions, NbdOptions, ServeOptions};
use crate::owner::Owner;
use crate::stop_timeout::StopTimeout;
use crate::tenancy::Tenancy;
pub use definitions::{Definitions, Removal};
use fathom_sandbox::Mode;
use fathom_stack::PoolOptions;
pub use groups::ThrottleGroup;
pub use handover::Upgrade;
pub use origin::Origin;
use pending_writes::PendingWrites;
use places::places;
pub use reload::one_definition_each;
use serde_json::{Value, json};
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

/// What is to be done on the book's own thread.
pub type Step = Box<dyn FnOnce(&mut Book) + Send>;

pub struct Book {
    host: Box<dyn Host>,
    /// Why each disk is there, by name.
    origins: BTreeMap<String, Origin>,
    definitions: Definitions,
    /// `FILE:LINE` of each disk's entry in the configuration.
    places: BTreeMap<String, String>,
    /// Files of persistent disks that are being written, by disk.
    writing: BTreeMap<String, PendingWrites<Step>>,
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

impl Book {
    /// The disks that `host` has are the configuration's.
    pub fn new(host: Box<dyn Host>, options: &ServeOptions) -> io::Result<Book> {
        let names = host.names().into_iter();
        let declared = options.disks.iter();
        let declared = declared.filter_map(|disk| disk.table.as_deref().cloned());
        Ok(Book {
            definitions: Definitions::of(declared),
            places: places(&options.disks),
            writing: BTreeMap::new(),
            origins: names.map(|name| (name, Origin::Configuration)).collect(),
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

    /// One of these is readable when there is something for [`Book::turn`].
    pub fn events(&self) -> Vec<BorrowedFd<'_>> {
        let mut events = self.host.events();
        events.push(self.mail.as_fd());
        events
    }

    /// Nothing goes on in a later step.
    fn is_settled(&self) -> bool {
        Arc::strong_count(&self.under_way) == 1
    }

    /// How long [`Book::turn`] can wait.
    pub fn patience(&self) -> Option<Duration> {
        let own = [self.waiting.patience(), self.until_upgrade_is_late()];
        let own = own.into_iter().flatten();
        own.chain(self.host.patience()).min()
    }

    /// Go on with what has come. False: something has ended that should not.
    pub fn turn(&mut self) -> bool {
        let goes_on = self.host.turn();
        self.take_steps();
        self.waiting.tell_late();
        goes_on
    }

    /// Carries out what has come of commands.
    fn take_steps(&mut self) {
        for step in self.mail.take() {
            step(self);
        }
    }

    /// Carry a command out; who asks is answered at once or later.
    pub fn handle(&mut self, ask: Ask, asker: Asker) {
        let Ask { disk, command } = ask;
        match (command, disk) {
            (
                Command::Put {
                    options,
                    named,
                    temporary,
                    only_if,
                },
                None,
            ) => self.put_by_request(*options, named, temporary, only_if, asker),
            (
                Command::Remove {
                    force,
                    temporary,
                    only_if,
                },
                Some(name),
            ) => {
                let how = match temporary {
                    true => Removal::UntilRestart,
                    false => Removal::Definition,
                };
                self.remove(name, force, how, only_if, asker);
            }
            (
                Command::Set {
                    filter,
                    options,
                    temporary,
                },
                Some(name),
            ) => self.set_filter(name, filter, options, temporary, asker),
            (Command::Resize { size, shrink }, Some(name)) => {
                self.resize(name, size, shrink, asker);
            }
            (Command::CompleteMirror(how), Some(name)) => {
                self.switch(name, SwitchTo::Mirror, &how, asker);
            }
            (Command::Snapshot(order), Some(name)) => {
                let how = Completion {
                    unkept: order.unkept,
                    leave_bitmaps: order.leave_bitmaps,
                };
                self.switch(name, SwitchTo::Layer(order.overlay), &how, asker);
            }
            (Command::Show, Some(name)) => self.show(name, asker),
            (Command::List, None) => self.list(asker),
            (Command::ListGroups, None) => self.list_groups(asker),
            (
                Command::SetGroup {
                    group,
                    options,
                    temporary,
                },
                None,
            ) => self.set_group(group, options, temporary, asker),
            (Command::Upgrade { binary, disconnect }, None) => {
                self.begin_upgrade(binary, disconnect, asker);
            }
            (Command::Quit, None) => {
                self.is_ending = true;
                asker(Ok(json!({ "quitting": true })));
            }
            (Command::BeginCommit(order), Some(name)) => {
                match self.said_elsewhere(&name, order.unkept) {
                    Some(refusal) => asker(Err(refusal)),
                    None => self.slowly(name, Command::BeginCommit(order), asker),
                }
            }
            (
                command @ (Command::BeginMirror(_)
                | Command::BeginStream(_)
                | Command::EndStream
                | Command::BeginBackup { .. }
                | Command::EndBackup { .. }
                | Command::Bitmaps(_)
                | Command::Snapshots(_)
                | Command::EndMirror { .. }),
                Some(name),
            ) => self.slowly(name, command, asker),
            (command, disk) => {
                let asker = self.briefly(disk.as_deref(), asker);
                self.host.ask(Ask { disk, command }, asker);
            }
        }
    }

    /// For what may take long, and goes on then.
    fn slowly(&mut self, name: String, command: Command, asker: Asker) {
        let text = format!(
            "disk '{name}': the operation takes longer than 60 s and continues in the \
            background"
        );
        let asker = self.waiting.until(Instant::now() + LONG, text, asker);
        let disk = Some(name);
        self.host.ask(Ask { disk, command }, asker);
    }

    /// Ask who has the disks, and go on with what comes of it.
    fn then(
        &mut self,
        disk: Option<String>,
        command: Command,
        next: impl FnOnce(&mut Book, Answer) + Send + 'static,
    ) {
        let asker = self.later(next);
        self.host.ask(Ask { disk, command }, asker);
    }

    /// Takes what comes, and goes on with it in a later step.
    fn later<T: Send + 'static>(
        &self,
        next: impl FnOnce(&mut Book, T) + Send + 'static,
    ) -> Box<dyn FnOnce(T) + Send> {
        let (post, under_way) = (self.mail.post(), self.under_way.clone());
        Box::new(move |came| {
            let step: Step = Box::new(move |book| {
                next(book, came);
                drop(under_way);
            });
            post.send(step);
        })
    }

    /// For what takes no time, unless a disk's process says nothing.
    fn briefly(&mut self, disk: Option<&str>, asker: Asker) -> Asker {
        let name = disk.unwrap_or_default();
        let text = format!(
            "disk '{name}': the disk's process did not respond within 5 s; retry, or see the log"
        );
        self.waiting.until(Instant::now() + BRIEF, text, asker)
    }

    fn show(&mut self, name: String, asker: Asker) {
        let asker = self.briefly(Some(&name), asker);
        self.then(Some(name), Command::Show, |book, answer| {
            asker(answer.map(|mut disk| {
                book.add_origin(&mut disk);
                disk
            }));
        });
    }

    fn list(&mut self, asker: Asker) {
        self.then(None, Command::List, |book, answer| {
            asker(answer.map(|mut list| {
                let disks = list["disks"].as_array_mut();
                disks
                    .into_iter()
                    .flatten()
                    .for_each(|disk| book.add_origin(disk));
                list
            }));
        });
    }

    /// Adds the owner of a disk, and whether the disk is served again after a restart.
    fn add_origin(&self, disk: &mut Value) {
        let name = disk["state"]["name"].as_str().unwrap_or_default();
        let owner = self.owner_of(name);
        let owner = owner.map_or(Owner::Transient, Origin::owner);
        // (A tenant's process may say anything.)
        if let Some(disk) = disk.as_object_mut() {
            disk.insert("kept".into(), (owner != Owner::Transient).into());
            disk.insert("owner".into(), owner.name().into());
        }
    }
}
