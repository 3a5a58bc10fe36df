//! The state of a tenant.

use super::groups::Group;
use super::log::shown;
use super::permits::Permits;
use super::process::Process;
use super::reply::{self, Known};
use fathom_control::{ErrorKind, RequestError};
use fathom_host::Outcome;
use fathom_host::link::{FromTenant, ToTenant};
use fathom_host::users::User;
use fathom_requests::{Answer, Ask, Command, Reply, Responder, Shown};
use fathom_sockets::Listener;
use fathom_spec::DiskSpec;
use fathom_trace::Summary;
use fathom_units::cause;
use serde::de::IgnoredAny;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time that a process may take to end in addition to its disks' time.
pub const MARGIN: Duration = Duration::from_secs(2);

/// A process that ends after this time is started again at once. Others are started after a pause,
/// which becomes longer.
const LIVES: Duration = Duration::from_secs(10);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Timeout for replies to commands that only read.
const EXPIRE: Duration = Duration::from_secs(10);

/// A disk of a tenant.
pub struct Disk {
    pub table: DiskSpec,
    /// Front-ends wait at this listener while the tenant has no process.
    pub listener: Option<Arc<Listener>>,
    /// The process serves the disk.
    pub is_there: bool,
    /// The disk's last known state.
    pub shown: Option<Shown>,
}

/// A command without a reply yet.
pub struct Asked {
    pub what: What,
    pub responder: Responder,
    pub ask: Ask,
    pub at: Instant,
}

impl Asked {
    /// Time after which the reply is late. None: the command may take long.
    pub fn expires(&self) -> Option<Instant> {
        let only_asks = matches!(
            self.ask.command,
            Command::Stats | Command::Slow | Command::Show | Command::Measure
        );
        only_asks.then(|| self.at + EXPIRE)
    }
}

/// A message of a tenant. Only the number of a reply has been read.
pub struct Said {
    pub message: FromTenant<IgnoredAny>,
    /// The whole message, in JSON.
    pub text: Vec<u8>,
}

/// The change that the reply to a command makes in the supervisor's records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The disk is added.
    Added,
    /// A disk that the previous process had is opened again.
    Restored,
    /// The disk is removed.
    Removed,
    Other,
}

/// A process that takes over from the tenant's process, which continues until then or has ended.
pub struct Replacement {
    /// None: the process has ended.
    pub process: Option<Process>,
    /// The permissions of the process.
    pub permits: Arc<Permits>,
    /// Time after which the replacement is given up.
    pub until: Instant,
    /// The process has taken over.
    pub serves: bool,
    /// Time for which queues were stopped, in milliseconds, once the old process has reported it.
    pub pause_ms: Option<f64>,
    /// The old process waits until the new one has ended.
    pub owes_go_on: bool,
}

pub struct Tenant {
    pub name: String,
    /// User of its process. None: the supervisor's user.
    pub user: Option<User>,
    /// The process. Without one, the supervisor must start it.
    pub process: Option<Process>,
    /// A process that is about to take over.
    pub replacement: Option<Replacement>,
    /// A process that was killed and may not have ended yet: the next process starts after its end.
    ending: Option<Process>,
    /// The disks, in the order in which they were added.
    pub disks: Vec<Disk>,
    asked: BTreeMap<u64, Asked>,
    next: u64,
    pub permits: Arc<Permits>,
    /// Time of the next start of its process, or of the next attempt to open its disks.
    pub restart: Option<Instant>,
    pause: Duration,
    pub outcomes: Vec<(String, Outcome)>,
    /// The supervisor has requested the end of the process.
    is_to_end: bool,
    pub ended_well: bool,
}

impl Disk {
    /// Whether a library makes network connections for the disk.
    pub fn connects(&self) -> bool {
        self.table.image.kind().network
    }
}

impl Tenant {
    /// Whether a disk of the tenant makes network connections.
    pub fn connects(&self) -> bool {
        self.disks.iter().any(Disk::connects)
    }

    /// Directories with settings of libraries: see [`ToTenant::Begin`].
    pub fn settings_dirs(&self) -> Option<Vec<PathBuf>> {
        let disks = self.disks.iter().filter(|disk| disk.connects());
        let dirs = disks.filter_map(|disk| disk.table.image.settings_dir());
        self.connects().then(|| dirs.map(Path::to_owned).collect())
    }

    pub fn new(name: String, user: Option<User>) -> Tenant {
        Tenant {
            name,
            user,
            process: None,
            replacement: None,
            ending: None,
            disks: Vec::new(),
            asked: BTreeMap::new(),
            next: 0,
            permits: Arc::default(),
            restart: None,
            pause: Duration::ZERO,
            outcomes: Vec::new(),
            is_to_end: false,
            ended_well: false,
        }
    }

    pub fn has(&self, disk: &str) -> bool {
        self.disks.iter().any(|other| other.table.name == disk)
    }

    pub fn disk(&mut self, name: &str) -> Option<&mut Disk> {
        self.disks.iter_mut().find(|disk| disk.table.name == name)
    }

    /// Returns whether the disk is being added, restored or removed. None: no such command is in
    /// progress.
    pub fn is_changing(&self, name: &str) -> Option<What> {
        let mut changes = self
            .asked
            .values()
            .filter(|asked| asked.ask.about() == Some(name));
        let change = changes.find(|one| one.what != What::Other)?;
        Some(change.what)
    }

    /// Control group of its process.
    pub fn group(&self) -> Option<Arc<Group>> {
        self.process.as_ref().and_then(|one| one.group.clone())
    }

    /// Reads the reply to a command about the disk `name`.
    pub fn read_reply(&self, name: &str, what: What, command: &Command, text: Vec<u8>) -> Answer {
        let disk = self.disks.iter().find(|disk| disk.table.name == name);
        let known = Known {
            name,
            table: disk.map(|disk| &disk.table),
            pid: self.process.as_ref().map_or(0, Process::pid),
            limits: self.group().map(|group| group.limits()),
        };
        reply::read(command, what != What::Other, &known, text)
    }

    pub fn is_idle(&self) -> bool {
        self.disks.is_empty() && self.is_settled()
    }

    /// Whether no command and no replacement of the process is in progress.
    pub fn is_settled(&self) -> bool {
        self.asked.is_empty() && self.replacement.is_none() && self.ending.is_none()
    }

    /// Time after which the first reply is late.
    pub fn expires(&self) -> Option<Instant> {
        self.asked.values().filter_map(Asked::expires).min()
    }

    /// Takes the commands whose replies are late, or with `all` every command. Later replies to
    /// them are ignored.
    pub fn take_expired(&mut self, now: Instant, all: bool) -> Vec<Asked> {
        let is_over = |asked: &Asked| all || asked.expires().is_some_and(|at| at <= now);
        let asked = std::mem::take(&mut self.asked).into_iter();
        let (over, left): (BTreeMap<_, _>, _) = asked.partition(|(_, asked)| is_over(asked));
        self.asked = left;
        over.into_values().collect()
    }

    /// Sends a command. While the process is being replaced, the command waits. Without a process,
    /// the command fails.
    pub fn ask(&mut self, asked: Asked) {
        let number = self.next;
        self.next += 1;
        if self.replacement.is_none() {
            match self.send(number, &asked) {
                Ok(()) => {}
                Err(error) => return (asked.responder)(Err(error)),
            }
        }
        self.asked.insert(number, asked);
    }

    /// Sends the commands that have waited for the end of a replacement.
    pub fn ask_what_waited(&mut self) {
        for (number, mut asked) in std::mem::take(&mut self.asked) {
            asked.at = Instant::now();
            match self.send(number, &asked) {
                Ok(()) => drop(self.asked.insert(number, asked)),
                Err(error) => (asked.responder)(Err(error)),
            }
        }
    }

    fn send(&self, number: u64, asked: &Asked) -> Result<(), RequestError> {
        let Some(process) = &self.process else {
            return Err(gone(&asked.ask));
        };
        self.permit(asked);
        let message = ToTenant::Ask {
            number,
            ask: asked.ask.clone(),
        };
        let sent = process.link.send(&message, None, false);
        sent.map_err(|error| {
            let name = &self.name;
            let text = format!(
                "tenant '{name}': its process does not read commands: {}",
                cause(error)
            );
            ErrorKind::Late.because(text)
        })
    }

    /// Grants the permissions that a command needs.
    fn permit(&self, asked: &Asked) {
        match (asked.what, &asked.ask.command) {
            (What::Added | What::Restored, Command::Put { options, .. }) => {
                let is_it = |disk: &&Disk| disk.table.name == options.name;
                let disk = self.disks.iter().find(is_it);
                let listener = disk.and_then(|disk| disk.listener.clone());
                self.permits.begin(options, listener);
            }
            (_, command) => {
                self.permits.extend(&asked.ask);
                if let Command::Put { options, .. } = command {
                    self.permits.begin_change(options);
                }
            }
        }
    }

    pub fn take_asked(&mut self, number: u64) -> Option<Asked> {
        self.asked.remove(&number)
    }

    pub fn receive(&mut self) -> io::Result<Option<Said>> {
        let Some(process) = &self.process else {
            return Ok(None);
        };
        let Some((text, _)) = process.link.receive_bytes(false)? else {
            return Ok(None);
        };
        let message = serde_json::from_slice::<FromTenant<IgnoredAny>>(&text)?;
        match &message {
            FromTenant::Outcome(name, summary) => self.note_outcome(name, summary),
            FromTenant::Ended(summaries) => {
                summaries
                    .iter()
                    .for_each(|(name, summary)| self.note_outcome(name, summary));
                self.ended_well = self.is_to_end;
            }
            _ => {}
        }
        Ok(Some(Said { message, text }))
    }

    /// Records the statistics that a process reports at its end.
    fn note_outcome(&mut self, name: &str, summary: &Summary) {
        let is_known = self.outcomes.iter().any(|(other, _)| other == name);
        if !self.is_to_end || !self.has(name) || is_known {
            return;
        }
        let summary = summary.clone();
        let injected = None;
        self.outcomes
            .push((name.to_owned(), Outcome { summary, injected }));
    }

    /// Receives one of the last messages. True: the process has ended.
    pub fn drain(&mut self) -> bool {
        match self.receive() {
            Ok(Some(said)) => matches!(said.message, FromTenant::Ended(_)),
            Err(_) => true,
            Ok(None) => self.process.is_none(),
        }
    }

    /// Time since which a forced removal of a disk has been in progress.
    pub fn is_to_let_go(&self) -> Option<Instant> {
        if self.replacement.is_some() {
            return None;
        }
        let is_forced =
            |asked: &&Asked| matches!(asked.ask.command, Command::Remove { force: true, .. });
        self.asked
            .values()
            .filter(is_forced)
            .map(|asked| asked.at)
            .min()
    }

    pub fn tell(&self, message: &ToTenant) {
        if let Some(process) = &self.process
            && let Err(error) = process.link.send(message, None, false)
        {
            tracing::warn!(
                "tenant '{}': its process does not read commands: {}",
                self.name,
                cause(error)
            );
        }
    }

    /// Takes all processes of the tenant, also those that were killed and have not ended.
    pub fn take_processes(&mut self) -> Vec<Process> {
        let replacement = self.replacement.take().and_then(|one| one.process);
        let all = [self.process.take(), replacement, self.ending.take()];
        all.into_iter().flatten().collect()
    }

    /// The process that was killed and has not ended.
    pub fn ending(&self) -> Option<&Process> {
        self.ending.as_ref()
    }

    /// Stops waiting for the end of a killed process. The locks of its images keep another process
    /// from using them before its last I/O has ended.
    pub fn stop_waiting_for_end(&mut self) -> Option<Process> {
        let ending = self.ending.take();
        if ending.is_some() {
            self.restart = Some(Instant::now());
        }
        ending
    }

    /// Kills a process that has ended or misbehaves. The process's commands fail, and another
    /// process is started after its end.
    pub fn lose_process(&mut self, mut process: Process) {
        process.kill();
        self.ending = Some(process);
        self.disks.iter_mut().for_each(|disk| disk.is_there = false);
        for (_, asked) in std::mem::take(&mut self.asked) {
            if let (What::Added | What::Removed, Some(name)) = (asked.what, asked.ask.about()) {
                self.permits.forget(name);
                self.disks.retain(|disk| disk.table.name != name);
            }
            (asked.responder)(match asked.what {
                What::Removed => Ok(no_statistics()),
                _ => Err(gone(&asked.ask)),
            });
        }
    }

    /// Schedules the next start if a killed process has ended. False: no killed process has ended.
    pub fn notice_end(&mut self) -> bool {
        let Some(mut process) = self.ending.take() else {
            return false;
        };
        if !process.kill() {
            self.ending = Some(process);
            return false;
        }
        let has_lived = process.started.elapsed() >= LIVES;
        let how = process.end();
        self.pause = match (has_lived, self.pause) {
            (true, _) => Duration::ZERO,
            (false, Duration::ZERO) => FIRST_PAUSE,
            (false, pause) => (pause * 2).min(LONGEST_PAUSE),
        };
        tracing::error!(
            "tenant '{}': its process {how}; the server starts it again",
            self.name
        );
        self.restart = Some(Instant::now() + self.pause);
        true
    }

    /// Time of the next start of its process, or of the next attempt to open its disks, unless
    /// another process takes over.
    pub fn restarts(&self) -> Option<Instant> {
        self.restart.filter(|_| self.replacement.is_none())
    }

    /// Tells its process to end.
    pub fn tell_to_end(&mut self) {
        self.is_to_end = true;
        self.tell(&ToTenant::End);
    }

    /// Tells the process that has the disks to end.
    pub fn begin_to_end(&mut self) {
        if let Some(Replacement {
            process: Some(new),
            pause_ms,
            serves,
            ..
        }) = self.replacement.take()
        {
            match (&self.process, pause_ms) {
                // (The old process may be waiting for this message.)
                (Some(_), None) if !serves => {
                    new.end();
                    self.tell(&ToTenant::GoOn);
                }
                _ => {
                    let old = self.process.replace(new);
                    old.map(Process::end);
                }
            }
        }
        self.tell_to_end();
    }

    /// Schedules another attempt, after a pause.
    pub fn try_later(&mut self) {
        self.pause = (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        self.restart = Some(Instant::now() + self.pause);
    }
}

/// Empty statistics of a disk whose process has ended: the process has not reported any.
pub fn no_statistics() -> Reply {
    Summary::default().into()
}

fn gone(ask: &Ask) -> RequestError {
    let disk = ask.about().unwrap_or_default();
    let text = format!("disk '{disk}': the disk's process has ended and is being restarted; retry");
    ErrorKind::Failed.because(text)
}

/// Returns a responder that only logs errors.
pub fn to_log(name: String) -> Responder {
    Box::new(move |answer: Answer| {
        if let Err(error) = answer {
            // (The text may come from a tenant.)
            tracing::error!("disk '{name}': {}", shown(&error.to_string()));
        }
    })
}
