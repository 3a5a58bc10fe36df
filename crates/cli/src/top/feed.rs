//! Where samples come from: a thread for each server, which are looked for again and again.

use fathom_client::{Client, ClientError, Server, place};
use fathom_metrics::Sample;
use fathom_units::short_duration;
use serde_json::Value;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// How often servers are looked for.
const LOOK: Duration = Duration::from_millis(500);
/// How soon another interval is noticed.
const BRIEF: Duration = Duration::from_millis(100);
/// So much news waits to be taken; who has more waits.
const QUEUED: usize = 1024;

/// Whose samples.
#[derive(Clone, Debug)]
pub enum Which {
    /// Of all of this machine's servers that are this user's.
    All,
    One {
        server: Server,
        disk: Option<String>,
    },
    /// Of these.
    Fleet(Arc<[Server]>),
}

/// What has come.
pub enum News {
    Sample(String, Box<Sample>),
    /// A server cannot be heard any more; with why, if it is there.
    Gone(String, Option<String>),
    /// What a server knows of a disk's slow requests; None: it keeps none.
    Slow(String, String, Option<Value>),
}

pub struct Feed {
    news: Receiver<News>,
    to: SyncSender<News>,
    interval_ms: Arc<AtomicU64>,
    which: Which,
    patience: Duration,
}

impl Feed {
    /// `patience`: for each answer.
    pub fn start(which: Which, interval: Duration, patience: Duration) -> Feed {
        let (to, news) = sync_channel(QUEUED);
        let interval_ms = Arc::new(AtomicU64::new(interval.as_millis() as u64));
        let finder = Finder {
            which: which.clone(),
            to: to.clone(),
            interval_ms: interval_ms.clone(),
            patience,
            watched: Arc::default(),
        };
        // It looks as long as there is this process.
        thread::spawn(move || finder.run());
        Feed {
            news,
            to,
            interval_ms,
            which,
            patience,
        }
    }

    pub fn set_interval(&self, interval: Duration) {
        self.interval_ms.store(interval.as_millis() as u64, Relaxed);
    }

    /// What has come since, or comes within that time.
    pub fn take(&self, patience: Duration) -> Vec<News> {
        let first = self.news.recv_timeout(patience).ok();
        first
            .into_iter()
            .chain(self.news.try_iter().take(QUEUED))
            .collect()
    }

    /// How long somebody who is just coming is waited for, beyond an interval.
    pub fn patience(&self) -> Duration {
        self.patience + BRIEF
    }

    pub fn is_fleet(&self) -> bool {
        matches!(self.which, Which::Fleet(_))
    }

    /// The servers that are to be heard.
    pub fn servers(&self) -> Vec<String> {
        self.which.found().into_keys().collect()
    }

    /// Have slow requests of a disk told: they come as news.
    pub fn ask_slow(&self, server: &str, disk: &str) {
        let Some(asked) = self.which.found().remove(server) else {
            return; // it has gone
        };
        let (to, server, disk) = (self.to.clone(), server.to_owned(), disk.to_owned());
        thread::spawn(move || {
            let told = Client::of(asked)
                .and_then(|client| client.get(&["v1", "disks", &disk, "slow"]).send::<Value>());
            // Nobody may listen any more.
            let _ = to.send(News::Slow(server, disk, told.ok()));
        });
    }
}

impl Which {
    /// By name, each once: some of a server's names are links to its socket.
    fn found(&self) -> BTreeMap<String, Server> {
        let real = |path: PathBuf| Server::Local(path.canonicalize().unwrap_or(path));
        let all: Vec<_> = match self {
            Which::All => place::all()
                .into_iter()
                .map(|(_, path)| real(path))
                .collect(),
            Which::One { server, .. } => vec![match server {
                Server::Local(path) => real(path.clone()),
                other => other.clone(),
            }],
            Which::Fleet(servers) => servers.to_vec(),
        };
        let named = all.into_iter().map(|server| (server.to_string(), server));
        named.collect()
    }

    fn disk(&self) -> Option<&str> {
        match self {
            Which::All | Which::Fleet(_) => None,
            Which::One { disk, .. } => disk.as_deref(),
        }
    }
}

/// Finds servers, and has each watched.
struct Finder {
    which: Which,
    to: SyncSender<News>,
    interval_ms: Arc<AtomicU64>,
    patience: Duration,
    watched: Arc<Mutex<BTreeSet<String>>>,
}

impl Finder {
    fn run(self) {
        loop {
            for (name, server) in self.which.found() {
                let is_new = lock(&self.watched).insert(name.clone());
                if is_new {
                    self.watch(name, server);
                }
            }
            thread::sleep(LOOK);
        }
    }

    fn watch(&self, name: String, server: Server) {
        let watched = self.watched.clone();
        let watcher = Watcher {
            name: name.clone(),
            disk: self.which.disk().map(str::to_owned),
            to: self.to.clone(),
            interval_ms: self.interval_ms.clone(),
            patience: self.patience,
            has_told: Cell::new(false),
        };
        thread::spawn(move || {
            let is_remote = matches!(server, Server::Remote(_));
            let ended = watcher.run(server);
            // Those that have gone from here are just not there any more. One of another host that told
            // something may be upgraded.
            let is_missed = is_remote && !watcher.has_told.get();
            let problem = ended.err().filter(|error| is_missed || !error.is_gone());
            let problem = problem.map(|error| explain(&watcher.name, &error));
            let has_problem = problem.is_some();
            // Nobody may listen any more.
            let _ = watcher.to.send(News::Gone(watcher.name, problem));
            if has_problem {
                // It does not go away that soon.
                thread::sleep(4 * LOOK);
            }
            lock(&watched).remove(&name);
        });
    }
}

fn lock(watched: &Mutex<BTreeSet<String>>) -> std::sync::MutexGuard<'_, BTreeSet<String>> {
    watched.lock().unwrap_or_else(PoisonError::into_inner)
}

fn explain(name: &str, error: &ClientError) -> String {
    match error {
        ClientError::Refused {
            status: 404, text, ..
        } if text.contains("/v1/live") => {
            format!("{name}: this version of the server does not support intervals")
        }
        // Their own words name no server.
        ClientError::Refused { text, .. } => format!("{name}: {text}"),
        other => other.to_string(),
    }
}

/// Hears one server.
struct Watcher {
    name: String,
    disk: Option<String>,
    to: SyncSender<News>,
    interval_ms: Arc<AtomicU64>,
    patience: Duration,
    has_told: Cell<bool>,
}

impl Watcher {
    /// Until the server is there no more.
    fn run(&self, server: Server) -> Result<(), ClientError> {
        let client = Client::of(server)?;
        loop {
            let interval = self.interval_ms.load(Relaxed);
            let text = short_duration(Duration::from_millis(interval));
            let call = client.get(&["v1", "live"]).within(self.patience);
            let call = call.parameter("interval", &text);
            let call = match &self.disk {
                Some(disk) => call.parameter("disk", disk),
                None => call,
            };
            let mut lines = call.stream()?;
            // A server that says nothing for that long is stuck, or its machine was.
            let mut patience = 3 * interval + 10_000;
            while self.interval_ms.load(Relaxed) == interval {
                let Some(line) = lines.next(BRIEF)? else {
                    patience = patience.saturating_sub(BRIEF.as_millis() as u64);
                    if patience == 0 {
                        return Err(ClientError::Late {
                            server: self.name.clone(),
                            after: Duration::from_millis(3 * interval + 10_000),
                        });
                    }
                    continue;
                };
                patience = 3 * interval + 10_000;
                let sample = serde_json::from_slice(&line);
                let sample = sample.map_err(|_| ClientError::NotFathom(self.name.clone()))?;
                self.has_told.set(true);
                if self
                    .to
                    .send(News::Sample(self.name.clone(), Box::new(sample)))
                    .is_err()
                {
                    return Ok(());
                }
            }
        }
    }
}
