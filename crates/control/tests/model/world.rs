//! A world around a registry: clients, a host, files, a configuration and crashes.

use crate::host::{Asked, Host};
use crate::properties;
use crate::store::{Ending, Store};
use fathom_control::{
    Done, Effect, ErrorKind, Event, Found, HostRequest, Registry, Removal, Reply, Request,
    RequestError, RequestId, Settings,
};
use fathom_spec::DiskSpec;
use serde::Serialize;
use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};

/// How many times each kind of step may happen.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Budget {
    pub requests: u8,
    pub crashes: u8,
    /// Failures of the host or of a file system.
    pub failures: u8,
    /// Writes of guests.
    pub writes: u8,
    pub edits: u8,
    pub reloads: u8,
    /// False replies of a hostile disk's process.
    pub lies: u8,
}

/// A rule of an earlier version that loses data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub enum OldRule {
    #[default]
    None,
    /// A static disk that is changed gets a file, and becomes persistent.
    StaticBecomesPersistent,
    /// A definition is recorded before its file is written.
    NotedBeforeWritten,
    /// A switch stores the image, but not the keys.
    KeysAreNotStored,
    /// A condition is checked when the request arrives.
    ConditionIsCheckedEarly,
}

#[derive(Clone, Serialize)]
pub struct World {
    pub registry: Registry,
    pub host: Host,
    pub store: Store,
    /// The present contents of the configuration.
    pub config: BTreeMap<String, DiskSpec>,
    /// Other contents that the configuration may get.
    #[serde(skip)]
    pub edits: Vec<BTreeMap<String, DiskSpec>>,
    /// Requests that clients may send, each with its disk.
    #[serde(skip)]
    pub menu: Vec<(String, Request)>,
    pub budget: Budget,
    /// Definitions that were read but not yet passed to the registry.
    pub read: Option<(Vec<DiskSpec>, Vec<DiskSpec>)>,
    /// Requests without a reply, by their identities.
    pub outstanding: BTreeMap<u64, usize>,
    pub retries: BTreeSet<String>,
    /// Disks whose image the user has changed in the configuration since the server's start.
    pub edited: BTreeSet<String>,
    /// Whether the configuration was edited.
    pub is_edited: bool,
    /// Number of requests with the same condition that have succeeded.
    pub conditional_successes: u8,
    pub has_crashed: bool,
    pub has_failed: bool,
    pub next_id: u64,
    /// `next_id` at the last crash.
    pub asked_before_crash: u64,
    pub old_rule: OldRule,
}

/// A possible next step.
#[derive(Clone, Debug)]
pub enum Step {
    Send(usize),
    HostDoes {
        asked: usize,
        fails: bool,
    },
    HostLies {
        asked: usize,
        lie: usize,
    },
    StoreDoes(Ending),
    GuestWrites(String),
    Edit(usize),
    ReadDefinitions,
    TakeDefinitions,
    Retry(String),
    /// The server is killed and started again; the file operation in progress may have completed.
    Crash {
        is_durable: bool,
    },
}

impl World {
    /// Starts a server with this configuration, these files and these images.
    pub fn start(
        config: Vec<DiskSpec>,
        files: Vec<DiskSpec>,
        images: &[&str],
        budget: Budget,
    ) -> World {
        let by_name = |specs: Vec<DiskSpec>| {
            let named = specs.into_iter().map(|spec| (spec.name.clone(), spec));
            named.collect::<BTreeMap<_, _>>()
        };
        let mut host = Host::default();
        for image in images {
            host.images.insert((*image).to_owned(), Default::default());
        }
        let mut world = World {
            registry: Registry::new(settings(), [], BTreeMap::new()),
            host,
            store: Store {
                files: by_name(files),
                operations: Default::default(),
            },
            config: by_name(config),
            edits: Vec::new(),
            menu: Vec::new(),
            budget,
            read: None,
            outstanding: BTreeMap::new(),
            retries: BTreeSet::new(),
            edited: BTreeSet::new(),
            is_edited: false,
            conditional_successes: 0,
            has_crashed: false,
            has_failed: false,
            next_id: 0,
            asked_before_crash: 0,
            old_rule: OldRule::None,
        };
        world.begin().unwrap();
        world
    }

    pub fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        serde_json::to_vec(self).unwrap().hash(&mut hasher);
        hasher.finish()
    }

    /// Returns all possible next steps.
    pub fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        let left = &self.budget;
        if left.requests > 0 {
            steps.extend((0..self.menu.len()).map(Step::Send));
        }
        for (asked, request) in self.host.asked.iter().enumerate() {
            // The host carries out requests about one disk in order.
            let before = &self.host.asked[..asked];
            if before.iter().any(|earlier| earlier.disk == request.disk) {
                continue;
            }
            steps.push(Step::HostDoes {
                asked,
                fails: false,
            });
            // Users wait until the host has ended a switch, so that step cannot fail.
            let can_fail = !matches!(request.request, HostRequest::EndSwitch { .. });
            if left.failures > 0 && can_fail {
                steps.push(Step::HostDoes { asked, fails: true });
            }
            if left.lies > 0 {
                let lies = 0..self.host.lies(request).len();
                steps.extend(lies.map(|lie| Step::HostLies { asked, lie }));
            }
        }
        // A single thread reads and writes, and its results arrive in order.
        if !self.store.operations.is_empty() && self.read.is_none() {
            steps.push(Step::StoreDoes(Ending::Succeeds));
            if left.failures > 0 {
                steps.push(Step::StoreDoes(Ending::FailsBefore));
                steps.push(Step::StoreDoes(Ending::FailsAfter));
            }
        }
        if left.writes > 0 {
            let disks = self.host.disks.keys();
            let written = disks.filter(|disk| self.host.can_write(disk));
            steps.extend(written.cloned().map(Step::GuestWrites));
        }
        if left.edits > 0 {
            let others = (0..self.edits.len()).filter(|at| self.edits[*at] != self.config);
            steps.extend(others.map(Step::Edit));
        }
        match &self.read {
            None if left.reloads > 0 && self.store.operations.is_empty() => {
                steps.push(Step::ReadDefinitions);
            }
            None => {}
            Some(_) => steps.push(Step::TakeDefinitions),
        }
        steps.extend(self.retries.iter().cloned().map(Step::Retry));
        if left.crashes > 0 {
            steps.push(Step::Crash { is_durable: false });
            if !self.store.operations.is_empty() {
                steps.push(Step::Crash { is_durable: true });
            }
        }
        steps
    }

    /// Carries out a step. The error is a violation of a property.
    pub fn apply(&mut self, step: &Step) -> Result<(), String> {
        match step {
            Step::Send(at) => self.send(*at)?,
            Step::HostDoes { asked, fails } => {
                let asked = self.host.asked.remove(*asked);
                let outcome = match fails {
                    true => {
                        self.fail();
                        Err(ErrorKind::Failed.because("injected"))
                    }
                    false => self.host.carry_out(&asked, &self.store.files),
                };
                self.host_done(asked, outcome)?;
            }
            Step::HostLies { asked, lie } => {
                self.budget.lies -= 1;
                self.has_failed = true;
                let asked = self.host.asked.remove(*asked);
                let (is_done, reply) = self.host.lies(&asked).swap_remove(*lie);
                if is_done {
                    let _ = self.host.carry_out(&asked, &self.store.files);
                }
                self.host_done(asked, reply)?;
            }
            Step::StoreDoes(ending) => self.store_does(*ending)?,
            Step::GuestWrites(disk) => {
                self.budget.writes -= 1;
                self.host.write(disk);
            }
            Step::Edit(at) => {
                self.budget.edits -= 1;
                self.is_edited = true;
                let before = std::mem::replace(&mut self.config, self.edits[*at].clone());
                for (name, spec) in &self.config {
                    if before.get(name).map(|spec| &spec.image) != Some(&spec.image) {
                        self.edited.insert(name.clone());
                    }
                }
            }
            Step::ReadDefinitions => {
                self.budget.reloads -= 1;
                let config = self.config.values().cloned().collect();
                self.read = Some((config, self.store.files.values().cloned().collect()));
            }
            Step::TakeDefinitions => {
                let (declared, files) = self.read.take().unwrap();
                self.take_definitions(declared, files)?;
            }
            Step::Retry(disk) => {
                self.retries.remove(disk);
                let disk = disk.clone();
                self.feed(Event::RetryDue { disk })?;
            }
            Step::Crash { is_durable } => self.crash(*is_durable)?,
        }
        properties::check(self)
    }

    fn fail(&mut self) {
        self.budget.failures -= 1;
        self.has_failed = true;
    }

    fn send(&mut self, at: usize) -> Result<(), String> {
        self.budget.requests -= 1;
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.outstanding.insert(id.0, at);
        let (disk, mut request) = self.menu[at].clone();
        if let Request::Adopt { defined_at } = &mut request {
            let entry = self.config.get(&disk);
            *defined_at = entry.map(|_| "in the configuration".to_owned());
        }
        if self.old_rule == OldRule::ConditionIsCheckedEarly
            && let Request::Put { only_if, .. } = &mut request
            && let Some(served) = self.host.disks.get(&disk)
        {
            let version = fathom_control::version_of(&served.spec).unwrap();
            if only_if.check(&disk, Some(&version)).is_ok() {
                *only_if = Default::default();
            }
        }
        self.feed(Event::Requested { id, disk, request })
    }

    fn host_done(
        &mut self,
        asked: Asked,
        outcome: Result<Done, RequestError>,
    ) -> Result<(), String> {
        let is_change = matches!(outcome, Ok(Done::Put { created: false }));
        let name = asked.disk.clone();
        self.feed(Event::HostDone {
            disk: asked.disk,
            slot: asked.slot,
            outcome,
        })?;
        if self.old_rule == OldRule::StaticBecomesPersistent && is_change && asked.is_explicit {
            let spec = self.host.disks[&name].spec.clone().with_format();
            self.store.files.insert(name.clone(), spec.clone());
            self.note_persistent(spec);
        }
        Ok(())
    }

    fn store_does(&mut self, ending: Ending) -> Result<(), String> {
        let operation = self.store.operations.pop_front().unwrap();
        if ending != Ending::Succeeds {
            self.fail();
        }
        if ending != Ending::FailsBefore {
            let mut stored = operation.clone();
            if self.old_rule == OldRule::KeysAreNotStored
                && let Effect::Write(spec) = &mut stored
                && let Some(before) = self.store.files.get(&spec.name)
            {
                spec.keys = before.keys.clone();
            }
            self.store.change(&stored);
        }
        let problem = || "no space".to_owned();
        let outcome = (ending == Ending::Succeeds)
            .then_some(())
            .ok_or_else(problem);
        match operation {
            Effect::Write(spec) => {
                let disk = spec.name.clone();
                let is_failed = outcome.is_err();
                self.feed(Event::Stored { disk, outcome })?;
                if is_failed && self.old_rule == OldRule::NotedBeforeWritten {
                    self.note_persistent(*spec);
                }
                Ok(())
            }
            Effect::Erase { disk } => self.feed(Event::Stored { disk, outcome }),
            Effect::ReadFile { disk } => {
                let found = self.store.files.get(&disk).cloned().map(Box::new);
                let found = outcome.map(|()| found);
                self.feed(Event::FileRead { disk, found })
            }
            other => panic!("{other:?}"),
        }
    }

    /// Applies an old rule: records this definition for the disk.
    fn note_persistent(&mut self, spec: DiskSpec) {
        if !self.registry.is_settled() {
            return;
        }
        let (mut served, others) = self.registry.to_handover();
        let definition = fathom_control::Definition::Persistent(Box::new(spec.clone()));
        served.insert(spec.name, definition);
        let (registry, _) = Registry::from_handover(settings(), served, others, BTreeMap::new());
        self.registry = registry;
    }

    fn take_definitions(
        &mut self,
        declared: Vec<DiskSpec>,
        disks: Vec<DiskSpec>,
    ) -> Result<(), String> {
        let found = Found {
            disks,
            problems: Vec::new(),
        };
        let places = BTreeMap::new();
        self.feed(Event::DefinitionsRead {
            declared,
            places,
            found,
        })
    }

    /// Starts the server.
    fn begin(&mut self) -> Result<(), String> {
        self.registry = Registry::new(settings(), [], BTreeMap::new());
        let config = self.config.values().cloned().collect();
        self.take_definitions(config, self.store.files.values().cloned().collect())
    }

    fn crash(&mut self, is_durable: bool) -> Result<(), String> {
        self.budget.crashes -= 1;
        self.has_crashed = true;
        self.asked_before_crash = self.next_id;
        if is_durable {
            let operation = self.store.operations.front().cloned();
            operation.iter().for_each(|one| self.store.change(one));
        }
        self.store.operations.clear();
        self.host.asked.clear();
        self.host.disks.clear();
        self.read = None;
        self.outstanding.clear();
        self.retries.clear();
        // The user has named an image for a disk that only the configuration defines.
        for name in std::mem::take(&mut self.edited) {
            let is_static = !self.store.files.contains_key(&name);
            let image = self.config.get(&name).map(|spec| spec.image.to_string());
            let image = image.and_then(|image| self.host.images.get(&image));
            if let Some(image) = image.filter(|_| is_static) {
                self.host.acknowledged.insert(name, image.writes);
            }
        }
        self.begin()
    }

    /// Passes an event to the registry, and starts the resulting operations.
    fn feed(&mut self, event: Event) -> Result<(), String> {
        for effect in self.registry.take(event) {
            match effect {
                Effect::Ask {
                    disk,
                    slot,
                    request,
                } => {
                    let puts = |at: &usize| {
                        let (name, request) = &self.menu[*at];
                        *name == disk && matches!(request, Request::Put { .. })
                    };
                    let is_explicit = self.outstanding.values().any(puts);
                    self.host.asked.push(Asked {
                        disk,
                        slot,
                        request,
                        is_explicit,
                    });
                }
                Effect::Write(_) | Effect::Erase { .. } | Effect::ReadFile { .. } => {
                    self.store.operations.push_back(effect);
                }
                Effect::Reply { to, disk, reply } => {
                    let Some(at) = self.outstanding.remove(&to.0) else {
                        return Err(format!("request {} has a second reply", to.0));
                    };
                    self.take_reply(at, &disk, reply)?;
                }
                Effect::RetryAfter { disk, .. } => drop(self.retries.insert(disk)),
                Effect::Log(..) => {}
            }
        }
        Ok(())
    }

    fn take_reply(
        &mut self,
        at: usize,
        disk: &str,
        reply: Result<Reply, RequestError>,
    ) -> Result<(), String> {
        if reply.is_err() {
            return Ok(());
        }
        let request = self.menu[at].1.clone();
        if let Request::Put { only_if, .. } = &request
            && only_if.names_versions()
        {
            self.conditional_successes += 1;
        }
        properties::check_reply(self, disk, &request)
    }

    /// Returns whether no operation is in progress.
    pub fn is_quiet(&self) -> bool {
        self.host.asked.is_empty() && self.store.operations.is_empty() && self.read.is_none()
    }
}

fn settings() -> Settings {
    Settings {
        disks_dir: Some("/disks".into()),
        open_listener: None,
    }
}

/// Returns a disk on this image.
pub fn disk(name: &str, image: &str) -> DiskSpec {
    let mut spec = DiskSpec::new(name.into(), image.parse().unwrap());
    spec.filters = vec!["delay:read=1ms".parse().unwrap()];
    spec.with_format()
}

/// Returns a request to add or change this disk.
pub fn put(spec: &DiskSpec) -> (String, Request) {
    let request = Request::Put {
        spec: Box::new(spec.clone()),
        named: None,
        until_restart: false,
        only_if: Default::default(),
    };
    (spec.name.clone(), request)
}

pub fn remove(name: &str, how: Removal) -> (String, Request) {
    let request = Request::Remove {
        force: true,
        how,
        only_if: Default::default(),
    };
    (name.to_owned(), request)
}
