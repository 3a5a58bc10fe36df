//! Sends commands to tenants' processes, and handles the replies.

use super::listing::Told;
use super::permits::Permits;
use super::process::Process;
use super::tenant::{Asked, Disk, MARGIN, Tenant, What, no_statistics, to_log};
use super::{Listing, Tenants, reply};
use fathom_control::{ErrorKind, RequestError, version_of};
use fathom_host::link::ToTenant;
use fathom_host::options::DiskOptions;
use fathom_host::socket;
use fathom_requests::{Ask, Command, Reply, Responder, Shown};
use fathom_sockets::Listener;
use fathom_spec::SocketSpec;
use fathom_spec::{DiskSpec, check_name};
use fathom_stack::position_of_filter;
use fathom_units::cause;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Timeout for each tenant's reply to a request about all disks.
const LIST: Duration = Duration::from_secs(3);

impl Tenants {
    pub(super) fn forward(&mut self, ask: Ask, responder: Responder) {
        let asked = match (&ask.command, &ask.disk) {
            (Command::Put { .. }, None) => return self.put(ask, responder),
            (Command::Remove { .. }, Some(name)) => {
                self.ask_about(name.clone(), What::Removed, ask, responder)
            }
            (_, Some(name)) => self.ask_about(name.clone(), What::Other, ask, responder),
            (_, None) => {
                return responder(Err(
                    ErrorKind::Invalid.because("the request must name a disk")
                ));
            }
        };
        if let Err((error, responder)) = asked {
            responder(Err(error));
        }
    }

    /// Adds a disk, or has its tenant change the disk. The tenant's process checks the request's
    /// condition.
    fn put(&mut self, mut ask: Ask, responder: Responder) {
        let Command::Put {
            options,
            named,
            only_if,
            ..
        } = &mut ask.command
        else {
            return;
        };
        let table = (**options).clone().without_defaults();
        let name = table.name.clone();
        let present = self.tenant_of(&name).and_then(|tenant| tenant.disk(&name));
        let Some(disk) = present else {
            return match only_if.check(&name, None) {
                Ok(()) => self.add(table, responder),
                Err(error) => responder(Err(error)),
            };
        };
        // (All options together decide which files may be opened for the disk.)
        if let Some(named) = named.take() {
            match table.over(&named, &disk.table) {
                Ok(table) => **options = table,
                Err(problem) => return responder(Err(ErrorKind::Invalid.because(problem))),
            }
        }
        if let Err((error, responder)) = self.ask_about(name, What::Other, ask, responder) {
            responder(Err(error));
        }
    }

    fn tenant_of(&mut self, disk: &str) -> Option<&mut Tenant> {
        self.all.values_mut().find(|tenant| tenant.has(disk))
    }

    /// Sends a command to the tenant that has this disk.
    fn ask_about(
        &mut self,
        name: String,
        what: What,
        ask: Ask,
        responder: Responder,
    ) -> Result<(), (RequestError, Responder)> {
        let names: Vec<_> = self.disks().map(|disk| disk.table.name.clone()).collect();
        let Some(tenant) = self.tenant_of(&name) else {
            return Err((fathom_control::unknown_disk(&name, &names), responder));
        };
        if let Some(change) = tenant.is_changing(&name) {
            let is_coming = change == What::Added;
            return Err((fathom_control::changing_disk(&name, is_coming), responder));
        }
        if let Err(error) = reply::refuse(&ask.command, &name) {
            return Err((error, responder));
        }
        let is_nowhere = tenant.process.is_none() && tenant.replacement.is_none();
        if what == What::Removed && is_nowhere {
            let version = tenant.disk(&name).map(|disk| version_of(&disk.table));
            let checked = version.transpose().and_then(|version| match &ask.command {
                Command::Remove { only_if, .. } => only_if.check(&name, version.as_deref()),
                _ => Ok(()),
            });
            if let Err(error) = checked {
                return Err((error, responder));
            }
            self.forget(&name);
            responder(Ok(no_statistics()));
            return Ok(());
        }
        let at = Instant::now();
        tenant.ask(Asked {
            what,
            responder,
            ask,
            at,
        });
        Ok(())
    }

    /// Adds a disk.
    fn add(&mut self, table: DiskSpec, responder: Responder) {
        let name = table.name.clone();
        if let Err(error) = self.begin_to_add(&table) {
            return responder(Err(error));
        }
        if let Some(tenant) = self.tenant_of(&name) {
            let ask = put(table);
            let what = What::Added;
            let at = Instant::now();
            tenant.ask(Asked {
                what,
                responder,
                ask,
                at,
            });
            if tenant.is_changing(&name).is_none() {
                // (The process is not reachable, and the client has the error.)
                self.forget(&name);
            }
        }
    }

    /// Makes the disk's socket, and starts the tenant's process for its first disk.
    fn begin_to_add(&mut self, table: &DiskSpec) -> Result<(), RequestError> {
        let invalid = |text| ErrorKind::Invalid.because(text);
        check_name(&table.name).map_err(invalid)?;
        table.check_paths().map_err(invalid)?;
        if let Some(pool) = &table.pool
            && !self.pools.contains_key(pool)
        {
            return Err(invalid(format!(
                "no pool '{pool}'; add a table [pool.{pool}] to the configuration"
            )));
        }
        let options = DiskOptions::of(table.clone(), false).map_err(invalid)?;
        let listener = listen(&options)?.map(Arc::new);
        let name = table.tenant.as_ref().unwrap_or(&table.name).clone();
        let disk = Disk {
            table: table.clone(),
            listener,
            is_there: false,
            shown: None,
        };
        if let Some(tenant) = self.all.get_mut(&name) {
            if disk.connects() && !tenant.connects() {
                return Err(ErrorKind::Conflict.because(format!(
                    "tenant '{name}' has no disks on {}, so its process cannot connect to any; \
                     give the disk another tenant, or add it before the tenant's other disks",
                    table.image.kind().name
                )));
            }
            tenant.disks.push(disk);
        } else {
            let user = self.user_of(&name);
            let user = user.map_err(|text| ErrorKind::Conflict.because(text))?;
            let mut tenant = Tenant::new(name.clone(), user);
            tenant.disks.push(disk);
            let started = self.start(&tenant, tenant.permits.clone(), None);
            let failed = |error| {
                format!(
                    "tenant '{name}': cannot start its process: {}",
                    cause(error)
                )
            };
            let process = started.map_err(|error| ErrorKind::Failed.because(failed(error)))?;
            tenant.process = Some(process);
            self.all.insert(name, tenant);
        }
        Ok(())
    }

    /// Starts a process of this tenant, with these permissions.
    pub(super) fn start(
        &self,
        tenant: &Tenant,
        permits: Arc<Permits>,
        predecessor: Option<OwnedFd>,
    ) -> std::io::Result<Process> {
        let begin = ToTenant::Begin {
            pools: self.pools.clone(),
            stop_timeout_ms: self.stop_timeout.0.as_millis() as u64,
            sandbox: self.sandbox.to_string(),
            user: tenant.user,
            connects: tenant.settings_dirs(),
        };
        let limits = self.tenancy.allowance_of(&tenant.name);
        let group = self.groups.enter(&tenant.name, &limits, tenant.group());
        let group = group.map_err(std::io::Error::other)?;
        let events = self.events.clone();
        Process::start(&tenant.name, &begin, predecessor, group, permits, events)
    }

    /// Starts a tenant's process if the tenant has none, and sends the process the disks that it
    /// lacks.
    pub(super) fn restore(&mut self, name: &str) {
        let Some(tenant) = self.all.get(name) else {
            return;
        };
        let process = match tenant.process {
            Some(_) => Ok(None),
            None => self.start(tenant, tenant.permits.clone(), None).map(Some),
        };
        let Some(tenant) = self.all.get_mut(name) else {
            return;
        };
        tenant.restart = None;
        match process {
            Ok(None) => {}
            Ok(started) => tenant.process = started,
            Err(error) => {
                tracing::error!(
                    "tenant '{name}': cannot start its process, so its disks are not served: \
                     {}; the server retries",
                    cause(error)
                );
                return tenant.try_later();
            }
        }
        let missing = tenant.disks.iter().filter(|disk| !disk.is_there);
        let missing: Vec<_> = missing.map(|disk| disk.table.clone()).collect();
        for table in missing {
            let responder = to_log(table.name.clone());
            let ask = put(table);
            let what = What::Restored;
            let at = Instant::now();
            tenant.ask(Asked {
                what,
                responder,
                ask,
                at,
            });
        }
    }

    /// Handles a tenant's reply: a whole message, in JSON.
    pub(super) fn take_in(&mut self, tenant: &str, number: u64, text: Vec<u8>) {
        let Some(tenant) = self.all.get_mut(tenant) else {
            return;
        };
        // (A tenant may send a reply to no command, or a late one.)
        let Some(Asked {
            what,
            responder,
            ask,
            ..
        }) = tenant.take_asked(number)
        else {
            return;
        };
        let name = ask.about().unwrap_or_default().to_owned();
        let answer = tenant.read_reply(&name, what, &ask.command, text);
        match (what, &answer) {
            (What::Added | What::Restored, Ok(_)) => tenant.permits.seal(&name),
            (What::Restored, Err(_)) => tenant.try_later(),
            (What::Added, Err(_)) | (What::Removed, Ok(_)) => self.forget(&name),
            (What::Other, answer) if matches!(ask.command, Command::Put { .. }) => {
                tenant.permits.end_change(&name, answer.is_ok());
            }
            (What::Removed, Err(_)) | (What::Other, _) => {}
        }
        if let (Ok(reply), Some(disk)) =
            (&answer, self.tenant_of(&name).and_then(|t| t.disk(&name)))
        {
            disk.is_there = true;
            note(disk, ask.command, reply);
        }
        responder(answer);
    }

    /// Replies to a command with an error, because the tenant's reply is late.
    pub(super) fn give_up(&mut self, asked: Asked) {
        let name = asked.ask.about().unwrap_or_default().to_owned();
        match asked.what {
            What::Added => self.forget(&name),
            What::Restored => {
                if let Some(tenant) = self.tenant_of(&name) {
                    tenant.try_later();
                }
            }
            // (Whether the process still has the disk is not known; its successor finds out.)
            What::Removed => {
                if let Some(disk) = self.tenant_of(&name).and_then(|tenant| tenant.disk(&name)) {
                    disk.is_there = false;
                }
            }
            What::Other => {}
        }
        if let (Command::Put { .. }, Some(tenant)) = (&asked.ask.command, self.tenant_of(&name)) {
            tenant.permits.end_change(&name, false);
        }
        let text = format!("disk '{name}': the disk's process did not respond in time");
        (asked.responder)(Err(ErrorKind::Late.because(text)));
    }

    /// Removes a disk from the supervisor's records. A tenant without disks ends.
    fn forget(&mut self, disk: &str) {
        let Some(tenant) = self.tenant_of(disk) else {
            return;
        };
        tenant.disks.retain(|other| other.table.name != disk);
        tenant.permits.forget(disk);
        if tenant.is_idle() {
            let name = tenant.name.clone();
            tenant.tell_to_end();
            let until = Instant::now() + self.stop_timeout.0 + MARGIN;
            let tenant = self.all.remove(&name);
            self.leaving.extend(tenant.map(|tenant| (tenant, until)));
        }
    }

    pub(super) fn disks(&self) -> impl Iterator<Item = &Disk> {
        self.all.values().flat_map(|tenant| &tenant.disks)
    }

    /// Sends a command about each disk. For a disk whose tenant does not reply, its last state is
    /// used.
    pub(super) fn ask_all(&mut self, command: Command, told: Told) {
        let listing = Listing::new(told, Instant::now() + LIST);
        let names: Vec<_> = self.disks().map(|disk| disk.table.name.clone()).collect();
        for (index, name) in names.into_iter().enumerate() {
            let known = match command {
                Command::Show => self.shown(&name).map(Reply::from),
                _ => None,
            };
            let place = listing.place(index, known);
            let ask = Ask {
                disk: Some(name.clone()),
                command: command.clone(),
            };
            if let Err((error, responder)) = self.ask_about(name, What::Other, ask, place) {
                responder(Err(error));
            }
        }
        self.listings.push(listing);
    }

    fn shown(&mut self, name: &str) -> Option<Shown> {
        let disk = self.tenant_of(name).and_then(|tenant| tenant.disk(name));
        disk.and_then(|disk| disk.shown.clone())
    }
}

fn put(table: DiskSpec) -> Ask {
    Ask {
        disk: None,
        command: Command::put(table),
    }
}

/// Records the disk's new options and state after a command.
fn note(disk: &mut Disk, done: Command, reply: &Reply) {
    if let Reply::Shown(shown) = reply {
        disk.shown = Some((**shown).clone());
    }
    match done {
        Command::Put { options, .. } => {
            disk.table = options.without_defaults();
        }
        Command::Set {
            filter, options, ..
        } => {
            let names: Vec<_> = disk.table.filters.iter().map(|spec| &*spec.name).collect();
            if let Ok(at) = position_of_filter(&names, &filter) {
                disk.table.set_filter(at, &options);
            }
        }
        Command::Resize { .. } => {
            if let Reply::Size(now) = reply
                && let Some(image) = disk.table.image.with_size(now.size)
            {
                disk.table.image = image;
            }
        }
        Command::Trace { file } => disk.table.trace = file,
        _ => {}
    }
}

/// Makes the listener of the disk's front-ends.
fn listen(options: &DiskOptions) -> Result<Option<Listener>, RequestError> {
    if options.fuse.is_some() {
        let text = "fuse: a server with tenants mounts no files, because a tenant's process is \
                    trusted with nothing outside it; use a server without tenants";
        return Err(ErrorKind::Invalid.because(text));
    }
    match &options.vhost_user {
        None => Ok(None),
        Some(spec @ SocketSpec::Path(_)) => {
            let listener = socket::listen_for_front_ends(spec, options.access);
            let listener = listener.map(Some);
            listener.map_err(|error| ErrorKind::Failed.because(error.to_string()))
        }
        Some(_) => {
            let text = "vhost-user: tenants cannot inherit sockets; give a path";
            Err(ErrorKind::Invalid.because(text))
        }
    }
}
