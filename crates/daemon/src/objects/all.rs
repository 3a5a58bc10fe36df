//! All objects of a daemon, and what is asked of them.

use super::changes::{self, Changing, Event, What};
use super::disk::Served;
use super::nbd::Nbd;
use super::tracer::Tracer;
use crate::control::{Answer, Ask, ClientId, Info, Request};
use crate::error::Error;
use crate::mailbox::Mailbox;
use crate::options::{DiskOptions, ServeOptions, SocketSpec, StopTimeout};
use crate::signals::LeftToThisThread;
use crate::socket;
use crate::table::DiskTable;
use fathom_exports::Listener;
use fathom_filters::Filters;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;
use serde_json::{Value, json};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

/// The longest name of a disk that is added.
const MAX_NAME: usize = 64;

/// The disks, in the order in which they came, and the server of their NBD clients.
pub struct Objects {
    disks: Vec<Served>,
    /// Disks that come or go: their names are taken.
    changing: Vec<Changing>,
    nbd: Option<Nbd>,
    filters: Arc<Filters>,
    events: Mailbox<Event>,
    stop_timeout: StopTimeout,
    started: Instant,
}

impl Objects {
    /// Opens the disks that there are from the start. `clients`: where those of NBD connect.
    pub fn open(
        options: ServeOptions,
        front_ends: Vec<Option<Listener>>,
        clients: Vec<Listener>,
    ) -> Result<Objects, Error> {
        let filters = Arc::new(Filters::default());
        let disks = options.disks.into_iter().zip(front_ends);
        let disks = disks.map(|(disk, listener)| Served::open(disk, listener, &filters));
        let disks = disks.collect::<Result<Vec<_>, _>>()?;
        let nbd = options.nbd.map(|nbd| Nbd::start(&nbd, clients, &disks));
        Ok(Objects {
            disks,
            changing: Vec::new(),
            nbd: nbd.transpose()?,
            filters,
            events: Mailbox::new().map_err(Error::io("cannot make a mailbox"))?,
            stop_timeout: options.stop_timeout,
            started: Instant::now(),
        })
    }

    /// Let front-ends in.
    pub fn serve(&mut self) -> Result<(), Error> {
        self.disks.iter_mut().try_for_each(Served::serve)
    }

    pub fn disks(&self) -> &[Served] {
        &self.disks
    }

    pub fn nbd(&self) -> Option<&Nbd> {
        self.nbd.as_ref()
    }

    /// Readable when there is something for [`Objects::turn`].
    pub fn event(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    /// Each is readable when serving has ended by itself, which it should not.
    pub fn ended(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let front_ends = self.disks.iter().filter_map(Served::ended);
        front_ends.chain(self.nbd.iter().map(Nbd::ended))
    }

    /// Traces being written, each with its disk's index.
    pub fn traces(&self) -> impl Iterator<Item = (usize, &Tracer)> {
        let disks = self.disks.iter().enumerate();
        disks.filter_map(|(i, disk)| Some((i, disk.trace()?)))
    }

    /// See to the traces, of which these disks' were truncated.
    pub fn see_to_traces(&mut self, cut: &[usize]) {
        for disk in cut {
            self.disks[*disk].drop_cut_trace();
        }
        self.disks.iter_mut().for_each(Served::calibrate_trace);
    }

    /// `None`: the answer comes later, out of [`Objects::turn`].
    pub fn handle(&mut self, from: ClientId, ask: Ask) -> Option<Answer> {
        let Ask { disk, request } = ask;
        match (request, disk) {
            (Request::Disks, None) => {
                let names: Vec<_> = self.disks.iter().map(Served::name).collect();
                Some(Ok(json!({ "disks": names })))
            }
            (Request::Add { options }, None) => match self.add(from, *options) {
                Ok(()) => None,
                Err(problem) => Some(Err(problem)),
            },
            (Request::Disks | Request::Add { .. } | Request::Quit, _) => {
                Some(Err("that concerns the daemon, not one disk".into()))
            }
            (request, disk) => {
                let index = match self.find(disk.as_deref()) {
                    Ok(index) => index,
                    Err(problem) => return Some(Err(problem)),
                };
                match request {
                    Request::Remove { force } => match self.remove(from, index, force) {
                        Ok(()) => None,
                        Err(problem) => Some(Err(problem)),
                    },
                    request => Some(self.handle_for(index, request)),
                }
            }
        }
    }

    /// The disk that a client means.
    fn find(&self, name: Option<&str>) -> Result<usize, String> {
        let names = || {
            let names: Vec<_> = self.disks.iter().map(Served::name).collect();
            names.join(", ")
        };
        match (name, &self.disks[..]) {
            (None, [_]) => Ok(0),
            (None, []) => Err("there is no disk".into()),
            (None, _) => Err(format!("there are several disks, so name one: {}", names())),
            (Some(name), all) => {
                let found = all.iter().position(|disk| disk.name() == name);
                found.ok_or_else(|| match (self.is_changing(name), all) {
                    (Some(problem), _) => problem,
                    (None, []) => format!("there is no disk '{name}'"),
                    (None, _) => format!("there is no disk '{name}', only {}", names()),
                })
            }
        }
    }

    /// Why there is nothing to be done with that disk now.
    fn is_changing(&self, name: &str) -> Option<String> {
        let change = self.changing.iter().find(|change| change.name == name)?;
        Some(match change.what {
            What::Added => format!("disk '{name}' is just being added"),
            What::Removed => format!("disk '{name}' is just being removed"),
        })
    }

    fn handle_for(&mut self, index: usize, request: Request) -> Answer {
        let disk = &mut self.disks[index];
        match request {
            Request::Stats => answer(&disk.summary()),
            Request::Info => answer(&self.info(index)),
            Request::Trace { file } => disk.switch_trace(file),
            Request::Resize => disk.resize(),
            Request::Set { filter, options } => {
                let info = disk.set_filter(&filter, options)?;
                self.look(index)?;
                answer(&info)
            }
            Request::Disks | Request::Quit | Request::Add { .. } | Request::Remove { .. } => {
                unreachable!("they are handled before")
            }
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

/// Disks that come and go.
impl Objects {
    fn add(&mut self, from: ClientId, table: DiskTable) -> Result<(), String> {
        let name = check_name(&table.name)?.to_owned();
        if let Some(problem) = self.is_changing(&name) {
            return Err(problem);
        }
        if self.disks.iter().any(|disk| disk.name() == name) {
            return Err(format!("there is a disk '{name}' already"));
        }
        let options = table.into_options(self.nbd.is_some())?;
        let listener = listen(&options)?;
        let (filters, post) = (self.filters.clone(), self.events.post());
        let begun = changes::open(options, listener, filters, post);
        begun.map_err(|error| format!("cannot start a thread: {error}"))?;
        self.changing.push(Changing {
            name,
            what: What::Added,
            waiting: Some(from),
        });
        Ok(())
    }

    fn remove(&mut self, from: ClientId, index: usize, force: bool) -> Result<(), String> {
        let users = self.info(index).users();
        let name = self.disks[index].name().to_owned();
        if let (false, Some(users)) = (force, users) {
            return Err(format!(
                "disk '{name}' is in use by {users}: unplug it there first, or force it"
            ));
        }
        let close = changes::close(self.stop_timeout.0, self.events.post());
        let close = close.map_err(|error| format!("cannot start a thread: {error}"))?;
        let disk = self.disks.remove(index);
        let clients = self.nbd.as_ref().and_then(|nbd| nbd.remove(&disk));
        // It waits for that.
        let _ = close.send((disk, clients));
        self.changing.push(Changing {
            name,
            what: What::Removed,
            waiting: Some(from),
        });
        Ok(())
    }

    /// Go on with what other threads have done: answers for those who wait.
    pub fn turn(&mut self) -> Vec<(ClientId, Answer)> {
        let events = self.events.take().into_iter();
        events.filter_map(|event| self.take_in(event)).collect()
    }

    fn take_in(&mut self, event: Event) -> Option<(ClientId, Answer)> {
        let (name, answer) = match event {
            Event::Opened(name, opened) => {
                let served = opened.map_err(|error| error.to_string());
                let served = served.and_then(|disk| self.let_in(*disk));
                (name, served.and_then(|index| answer(&self.info(index))))
            }
            Event::Late(name) => {
                let change = self.changing.iter_mut().find(|one| one.name == name)?;
                let problem = format!(
                    "disk '{name}' still has requests in flight after {}: it is removed as soon \
                     as they have ended",
                    self.stop_timeout
                );
                tracing::warn!("{problem}");
                return change.waiting.take().map(|client| (client, Err(problem)));
            }
            Event::Closed(name, summary) => {
                tracing::info!("disk '{name}' is removed");
                let told = answer(&summary);
                (name, told)
            }
        };
        let index = self.changing.iter().position(|one| one.name == name)?;
        let change = self.changing.swap_remove(index);
        change.waiting.map(|client| (client, answer))
    }

    /// Its index.
    fn let_in(&mut self, mut disk: Served) -> Result<usize, String> {
        let _signals = LeftToThisThread::new();
        if let Some(nbd) = &self.nbd {
            nbd.add(&disk)?;
        }
        if let Err(error) = disk.serve() {
            self.nbd.iter().for_each(|nbd| drop(nbd.remove(&disk)));
            return Err(error.to_string());
        }
        tracing::info!("{}", disk.describe());
        self.disks.push(disk);
        Ok(self.disks.len() - 1)
    }

    /// Let everybody go, and wait until `deadline` for what is in flight.
    pub fn stop(&mut self, deadline: Instant) -> Result<(), Error> {
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
        // Of those that were just being opened nothing can be in flight.
        self.changing.retain(|change| change.what == What::Removed);
        self.wait_for_removals(deadline);
        let changing = self.changing.iter();
        late.extend(changing.map(|change| format!("disk '{}'", change.name)));
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

    /// Until `deadline`.
    fn wait_for_removals(&mut self, deadline: Instant) {
        while !self.changing.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(left) = Timespec::try_from(left).ok().filter(|_| !left.is_zero()) else {
                return;
            };
            let _ = poll(&mut [PollFd::new(&self.events, PollFlags::IN)], Some(&left));
            for event in self.events.take() {
                if let Event::Closed(name, _) = event {
                    self.changing.retain(|change| change.name != name);
                }
            }
        }
    }
}

fn answer(value: &impl Serialize) -> Result<Value, String> {
    serde_json::to_value(value).map_err(|error| error.to_string())
}

/// A name that can be a part of a path.
fn check_name(name: &str) -> Result<&str, String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    match (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(is_plain) {
        true => Ok(name),
        false => Err(format!(
            "a disk's name has 1 to {MAX_NAME} letters, digits, -, _ and ."
        )),
    }
}

/// Where its front-ends are to connect.
fn listen(options: &DiskOptions) -> Result<Option<Listener>, String> {
    match &options.vhost_user {
        None => Ok(None),
        Some(spec @ SocketSpec::Path(_)) => {
            let listener = socket::listen_for_front_ends(spec, options.access);
            listener.map(Some).map_err(|error| error.to_string())
        }
        Some(_) => Err("vhost-user: sockets are inherited at the start only; give a path".into()),
    }
}
