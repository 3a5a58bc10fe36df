//! What is known of a tenant.

use super::permits::Permits;
use super::process::Process;
use crate::answer::{Answer, Asker, Kind, Refusal};
use crate::command::{Ask, Command};
use crate::link::{FromTenant, ToTenant};
use crate::objects::Outcome;
use crate::table::DiskTable;
use crate::users::User;
use fathom_exports::Listener;
use fathom_trace::Summary;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How much longer than its disks a process may take to end.
pub const MARGIN: Duration = Duration::from_secs(2);

/// A process that has lived for so long is started again at once when it ends; others after a while,
/// which becomes longer.
const LIVES: Duration = Duration::from_secs(10);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// One of its disks.
pub struct Disk {
    pub table: DiskTable,
    /// Its front-ends wait here while there is no process.
    pub listener: Option<Arc<Listener>>,
    /// The process has it.
    pub is_there: bool,
    /// How it was last shown.
    pub shown: Value,
}

/// What it was asked, and not answered yet.
pub struct Asked {
    pub what: What,
    pub asker: Asker,
    pub ask: Ask,
    pub at: Instant,
}

/// What its answer changes here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A disk comes.
    Added,
    /// One that the process had before it ended.
    Restored,
    /// A disk goes.
    Removed,
    Other,
}

pub struct Tenant {
    pub name: String,
    /// Whose its process is; None: the supervisor's user's.
    pub user: Option<User>,
    /// None: it is to be started.
    pub process: Option<Process>,
    /// In the order in which they came.
    pub disks: Vec<Disk>,
    asked: BTreeMap<u64, Asked>,
    next: u64,
    pub permits: Arc<Permits>,
    /// When it is to be started, or its disks are to be tried again.
    pub restart: Option<Instant>,
    pause: Duration,
    pub outcomes: Vec<(String, Outcome)>,
    pub ended_well: bool,
}

impl Tenant {
    pub fn new(name: String, user: Option<User>) -> Tenant {
        Tenant {
            name,
            user,
            process: None,
            disks: Vec::new(),
            asked: BTreeMap::new(),
            next: 0,
            permits: Arc::default(),
            restart: None,
            pause: Duration::ZERO,
            outcomes: Vec::new(),
            ended_well: false,
        }
    }

    pub fn has(&self, disk: &str) -> bool {
        self.disks.iter().any(|other| other.table.name == disk)
    }

    pub fn disk(&mut self, name: &str) -> Option<&mut Disk> {
        self.disks.iter_mut().find(|disk| disk.table.name == name)
    }

    /// A disk that is just coming, or going.
    pub fn is_changing(&self, name: &str) -> Option<What> {
        let mut changes = self
            .asked
            .values()
            .filter(|asked| asked.ask.about() == Some(name));
        let change = changes.find(|one| one.what != What::Other)?;
        Some(change.what)
    }

    pub fn is_idle(&self) -> bool {
        self.disks.is_empty() && self.asked.is_empty()
    }

    /// Ask it; it may be that nobody is there.
    pub fn ask(&mut self, asked: Asked) {
        let Some(process) = &self.process else {
            return (asked.asker)(Err(gone(&asked.ask)));
        };
        let number = self.next;
        let message = ToTenant::Ask {
            number,
            ask: asked.ask.clone(),
        };
        match process.link.send(&message, None, false) {
            Ok(()) => {
                self.next += 1;
                self.asked.insert(number, asked);
            }
            Err(error) => {
                let name = &self.name;
                let text = format!("the process of tenant '{name}' takes nothing in: {error}");
                (asked.asker)(Err(Kind::Late.because(text)));
            }
        }
    }

    pub fn take_asked(&mut self, number: u64) -> Option<Asked> {
        self.asked.remove(&number)
    }

    pub fn receive(&mut self) -> io::Result<Option<FromTenant>> {
        let Some(process) = &self.process else {
            return Ok(None);
        };
        let received = process.link.receive::<FromTenant>(false)?;
        let message = received.map(|(message, _)| message);
        if let Some(FromTenant::Ended(summaries)) = &message {
            let outcomes = summaries.iter().map(|(name, summary)| {
                let outcome = Outcome {
                    summary: summary.clone(),
                    injected: None,
                };
                (name.clone(), outcome)
            });
            self.outcomes = outcomes.collect();
            self.ended_well = true;
        }
        Ok(message)
    }

    /// Take in something of the last that it says; true: it has ended.
    pub fn drain(&mut self) -> bool {
        match self.receive() {
            Ok(Some(FromTenant::Ended(_))) | Err(_) => true,
            Ok(Some(_)) => false,
            Ok(None) => self.process.is_none(),
        }
    }

    /// Since when it has been asked to let go of a disk, whoever uses that.
    pub fn is_to_let_go(&self) -> Option<Instant> {
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
            tracing::warn!("tenant '{}' takes nothing in: {error}", self.name);
        }
    }

    pub fn kill(&mut self) {
        if let Some(process) = self.process.take() {
            let how = process.end();
            tracing::debug!("the process of tenant '{}' {how}", self.name);
        }
    }

    /// The process is no more, and nobody has told it to end.
    pub fn has_ended(&mut self) {
        let Some(process) = self.process.take() else {
            return;
        };
        let has_lived = process.started.elapsed() >= LIVES;
        let how = process.end();
        self.pause = match (has_lived, self.pause) {
            (true, _) => Duration::ZERO,
            (false, Duration::ZERO) => FIRST_PAUSE,
            (false, pause) => (pause * 2).min(LONGEST_PAUSE),
        };
        tracing::error!(
            "the process of tenant '{}' {how}: it is started again",
            self.name
        );
        self.restart = Some(Instant::now() + self.pause);
        self.disks.iter_mut().for_each(|disk| disk.is_there = false);
        for (_, asked) in std::mem::take(&mut self.asked) {
            if let (What::Added | What::Removed, Some(name)) = (asked.what, asked.ask.about()) {
                self.permits.forget(name);
                self.disks.retain(|disk| disk.table.name != name);
            }
            (asked.asker)(match asked.what {
                What::Removed => nothing_done(),
                _ => Err(gone(&asked.ask)),
            });
        }
    }

    /// Something of it could not be had: try again later.
    pub fn try_later(&mut self) {
        self.pause = (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        self.restart = Some(Instant::now() + self.pause);
    }
}

/// The last of a disk that went with its process: nobody knows what it has done.
pub fn nothing_done() -> Answer {
    let none = serde_json::to_value(Summary::default());
    none.map_err(|error| Kind::Failed.because(error.to_string()))
}

fn gone(ask: &Ask) -> Refusal {
    let disk = ask.about().unwrap_or_default();
    let text =
        format!("the process of disk '{disk}' has ended and is started again: ask once more");
    Kind::Failed.because(text)
}

/// An answer for nobody but the log.
pub fn to_log(name: String) -> Asker {
    Box::new(move |answer: Answer| {
        if let Err(refusal) = answer {
            tracing::error!("disk '{name}': {refusal}");
        }
    })
}
