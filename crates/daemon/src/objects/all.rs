//! All objects of a daemon, and what is asked of them.

use super::changes::{self, Changing, Event, What};
use super::disk::Served;
use super::nbd::Nbd;
use super::tracer::Tracer;
use crate::answer::{Answer, Asker, Kind, Refusal};
use crate::command::{Ask, Command};
use crate::error::Error;
use crate::info::Info;
use crate::mailbox::{Mailbox, Post};
use crate::options::{DiskOptions, ServeOptions, StopTimeout};
use crate::signals::LeftToThisThread;
use crate::socket;
use crate::socket_spec::SocketSpec;
use crate::table::{DiskTable, check_name, check_path};
use fathom_exports::Listener;
use fathom_filters::Filters;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;
use serde_json::json;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Who has just let go of a disk may be found here still: a disk that is to be removed has so long
/// to be out of use, and is looked at so often.
const LEAVE: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(20);

/// So many names are told to who has asked for one that is not there.
const MAX_NAMED: usize = 20;

/// A disk that is to be removed, but was in use.
struct Leaving {
    name: String,
    asker: Asker,
    until: Instant,
}

/// The disks, in the order in which they came, and the server of their NBD clients.
pub struct Objects {
    disks: Vec<Served>,
    /// Disks that come or go: their names are taken.
    changing: Vec<Changing>,
    /// Disks that are to go when nobody uses them.
    leaving: Vec<Leaving>,
    nbd: Option<Nbd>,
    filters: Arc<Filters>,
    events: Mailbox<Event>,
    stop_timeout: StopTimeout,
    started: Instant,
    is_ending: bool,
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
            leaving: Vec::new(),
            nbd: nbd.transpose()?,
            filters,
            events: Mailbox::new().map_err(Error::io("cannot make a mailbox"))?,
            stop_timeout: options.stop_timeout,
            started: Instant::now(),
            is_ending: false,
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

    /// For who asks on other threads.
    pub fn post(&self) -> Post<Event> {
        self.events.post()
    }

    /// Somebody has asked for the end.
    pub fn is_ending(&self) -> bool {
        self.is_ending
    }

    /// Carry a command out; who asks is answered at once or later.
    fn handle(&mut self, ask: Ask, asker: Asker) {
        let index = ask.disk.as_deref().map(|name| self.find(name)).transpose();
        let index = match index {
            Ok(index) => index,
            Err(refusal) => return answer(asker, Err(refusal)),
        };
        let answered = match (ask.command, index) {
            (Command::Add { options }, None) => return self.add(*options, asker),
            (Command::List, None) => {
                let disks = (0..self.disks.len()).map(|index| self.show(index));
                let disks = disks.collect::<Result<Vec<_>, _>>();
                disks.map(|disks| json!({ "disks": disks }))
            }
            (Command::Quit, None) => {
                self.is_ending = true;
                Ok(json!({ "quitting": true }))
            }
            (Command::Remove { force }, Some(index)) => return self.remove(index, force, asker),
            (command, Some(index)) => self.handle_for(index, command),
            (_, None) => Err(Kind::Invalid.because("that concerns one disk: name it")),
        };
        answer(asker, answered);
    }

    /// The disk that is meant.
    fn find(&self, name: &str) -> Result<usize, Refusal> {
        if let Some(found) = self.disks.iter().position(|disk| disk.name() == name) {
            return Ok(found);
        }
        if let Some(refusal) = self.is_changing(name) {
            return Err(refusal);
        }
        let names: Vec<_> = self
            .disks
            .iter()
            .map(Served::name)
            .take(MAX_NAMED)
            .collect();
        Err(
            Kind::Unknown.because(match (&names[..], self.disks.len() - names.len()) {
                ([], _) => format!("there is no disk '{name}'"),
                (names, 0) => format!("there is no disk '{name}', only {}", names.join(", ")),
                (names, more) => format!(
                    "there is no disk '{name}', only {} and {more} others",
                    names.join(", ")
                ),
            }),
        )
    }

    /// Why there is nothing to be done with that disk now.
    fn is_changing(&self, name: &str) -> Option<Refusal> {
        let change = self.changing.iter().find(|change| change.name == name)?;
        Some(Kind::Conflict.because(match change.what {
            What::Added => format!("disk '{name}' is just being added"),
            What::Removed => format!("disk '{name}' is just being removed"),
        }))
    }

    fn handle_for(&mut self, index: usize, command: Command) -> Answer {
        let failed = |text| Kind::Failed.because(text);
        let disk = &mut self.disks[index];
        match command {
            Command::Stats => to_json(&disk.summary()),
            Command::Show => self.show(index),
            Command::Trace { file } => {
                let checked = file.as_deref().map_or(Ok(()), check_path);
                checked.map_err(|text| Kind::Invalid.because(text))?;
                disk.switch_trace(file).map_err(failed)
            }
            Command::Resize => disk.resize().map_err(failed),
            Command::Set { filter, options } => {
                let info = disk.set_filter(&filter, options);
                let info = info.map_err(|text| Kind::Invalid.because(text))?;
                self.look(index).map_err(failed)?;
                to_json(&info)
            }
            Command::List | Command::Quit | Command::Add { .. } | Command::Remove { .. } => {
                Err(Kind::Invalid.because("that concerns the server, not one disk"))
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

    fn show(&self, index: usize) -> Answer {
        let options = to_json(&self.disks[index].table())?;
        Ok(json!({ "options": options, "state": self.info(index) }))
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
    fn add(&mut self, table: DiskTable, asker: Asker) {
        let name = table.name.clone();
        if let Err(refusal) = self.begin_to_add(table) {
            return answer(asker, Err(refusal));
        }
        self.changing.push(Changing {
            name,
            what: What::Added,
            waiting: Some(asker),
        });
    }

    fn begin_to_add(&self, table: DiskTable) -> Result<(), Refusal> {
        let invalid = |text| Kind::Invalid.because(text);
        check_name(&table.name).map_err(invalid)?;
        let name = &*table.name;
        if let Some(refusal) = self.is_changing(name) {
            return Err(refusal);
        }
        if self.disks.iter().any(|disk| disk.name() == name) {
            return Err(Kind::Conflict.because(format!("there is a disk '{name}' already")));
        }
        table.check_paths().map_err(invalid)?;
        let options = DiskOptions::of(table, self.nbd.is_some()).map_err(invalid)?;
        let listener = listen(&options)?;
        let (filters, post) = (self.filters.clone(), self.events.post());
        let begun = changes::open(options, listener, filters, post);
        begun.map_err(|error| Kind::Failed.because(format!("cannot start a thread: {error}")))
    }

    fn remove(&mut self, index: usize, force: bool, asker: Asker) {
        let name = self.disks[index].name().to_owned();
        match force {
            true => self.close(index, asker),
            false => self.leave(Leaving {
                name,
                asker,
                until: Instant::now() + LEAVE,
            }),
        }
    }

    /// Remove it, if nobody uses it.
    fn leave(&mut self, leaving: Leaving) {
        let index = match self.find(&leaving.name) {
            Ok(index) => index,
            Err(refusal) => return answer(leaving.asker, Err(refusal)),
        };
        match self.info(index).users() {
            None => self.close(index, leaving.asker),
            Some(_) if Instant::now() < leaving.until => self.leaving.push(leaving),
            Some(users) => {
                let name = leaving.name;
                let refusal = Kind::Conflict.because(format!(
                    "disk '{name}' is in use by {users}: unplug it there first, or force it"
                ));
                answer(leaving.asker, Err(refusal));
            }
        }
    }

    /// How long [`Objects::turn`] can wait.
    pub fn patience(&self) -> Option<Duration> {
        (!self.leaving.is_empty()).then_some(LOOK)
    }

    fn close(&mut self, index: usize, asker: Asker) {
        let name = self.disks[index].name().to_owned();
        let close = match changes::close(self.stop_timeout.0, self.events.post()) {
            Ok(close) => close,
            Err(error) => {
                let refusal = Kind::Failed.because(format!("cannot start a thread: {error}"));
                return answer(asker, Err(refusal));
            }
        };
        let disk = self.disks.remove(index);
        let clients = self.nbd.as_ref().and_then(|nbd| nbd.remove(&disk));
        // It waits for that.
        let _ = close.send((disk, clients));
        self.changing.push(Changing {
            name,
            what: What::Removed,
            waiting: Some(asker),
        });
    }

    /// Go on with what other threads have for it.
    pub fn turn(&mut self) {
        for event in self.events.take() {
            self.take_in(event);
        }
        for leaving in std::mem::take(&mut self.leaving) {
            self.leave(leaving);
        }
    }

    fn take_in(&mut self, event: Event) {
        let (name, outcome) = match event {
            Event::Asked(ask, asker) => return self.handle(ask, asker),
            Event::Opened(name, opened) => {
                let served = opened.map_err(|error| Kind::Failed.because(error.to_string()));
                let served = served.and_then(|disk| self.let_in(*disk));
                (name, served.and_then(|index| self.show(index)))
            }
            Event::Late(name) => return self.tell_late(&name),
            Event::Closed(name, summary) => {
                tracing::info!("disk '{name}' is removed");
                (name, to_json(&summary))
            }
        };
        if let Some(index) = self.changing.iter().position(|one| one.name == name)
            && let Some(asker) = self.changing.swap_remove(index).waiting
        {
            answer(asker, outcome);
        }
    }

    fn tell_late(&mut self, name: &str) {
        let text = format!(
            "disk '{name}' still has requests in flight after {}: it is removed as soon as they \
             have ended",
            self.stop_timeout
        );
        tracing::warn!("{text}");
        let change = self.changing.iter_mut().find(|one| one.name == name);
        if let Some(asker) = change.and_then(|change| change.waiting.take()) {
            answer(asker, Err(Kind::Late.because(text)));
        }
    }

    /// Its index.
    fn let_in(&mut self, mut disk: Served) -> Result<usize, Refusal> {
        let _signals = LeftToThisThread::new();
        let added = self.nbd.as_ref().map_or(Ok(()), |nbd| nbd.add(&disk));
        if let Err(text) = added {
            changes::give_up(disk);
            return Err(Kind::Conflict.because(text));
        }
        if let Err(error) = disk.serve() {
            self.nbd.iter().for_each(|nbd| drop(nbd.remove(&disk)));
            changes::give_up(disk);
            return Err(Kind::Failed.because(error.to_string()));
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

fn answer(asker: Asker, answer: Answer) {
    // It may be gone.
    let _ = asker.send(answer);
}

fn to_json(value: &impl Serialize) -> Answer {
    serde_json::to_value(value).map_err(|error| Kind::Failed.because(error.to_string()))
}

/// Where its front-ends are to connect.
fn listen(options: &DiskOptions) -> Result<Option<Listener>, Refusal> {
    match &options.vhost_user {
        None => Ok(None),
        Some(spec @ SocketSpec::Path(_)) => {
            let listener = socket::listen_for_front_ends(spec, options.access);
            let listener = listener.map(Some);
            listener.map_err(|error| Kind::Failed.because(error.to_string()))
        }
        Some(_) => {
            let text = "vhost-user: sockets are inherited at the start only; give a path";
            Err(Kind::Invalid.because(text))
        }
    }
}
