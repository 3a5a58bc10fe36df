//! Receives samples with a thread for each server, and keeps looking for new servers.

use fathom_client::{Client, ClientError, Server, place};
use fathom_metrics::Sample;
use fathom_units::short_duration;
use parking_lot::Mutex;
use serde_json::Value;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

/// Interval between two searches for servers.
const LOOK: Duration = Duration::from_millis(500);
/// Interval at which a watcher checks whether the sampling interval has changed.
const BRIEF: Duration = Duration::from_millis(100);
/// Number of queued messages, after which watchers wait.
const QUEUED: usize = 1024;

/// Selects the servers and disks to watch.
#[derive(Clone, Debug)]
pub enum Which {
    /// All servers of this user on this host.
    All,
    One {
        server: Server,
        disk: Option<String>,
    },
    /// These servers.
    Fleet(Arc<[Server]>),
}

/// A message from a watcher.
pub enum News {
    Sample(String, Box<Sample>),
    /// A server's stream has ended; with the reason if that is a problem.
    Gone(String, Option<String>),
    /// The server's slow requests of a disk, or `None` if the request for them failed.
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
    /// Starts the threads. `patience` is the timeout for each reply.
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
        // The thread runs until the process exits.
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

    /// Returns the queued messages; without any, waits for the first up to `patience`.
    pub fn take(&self, patience: Duration) -> Vec<News> {
        let first = self.news.recv_timeout(patience).ok();
        first
            .into_iter()
            .chain(self.news.try_iter().take(QUEUED))
            .collect()
    }

    /// Time to wait for a late sample, in addition to an interval.
    pub fn patience(&self) -> Duration {
        self.patience + BRIEF
    }

    pub fn is_fleet(&self) -> bool {
        matches!(self.which, Which::Fleet(_))
    }

    /// Returns the names of the servers to watch.
    pub fn servers(&self) -> Vec<String> {
        self.which.found().into_keys().collect()
    }

    /// Requests the slow requests of a disk. The reply arrives as [`News::Slow`].
    pub fn ask_slow(&self, server: &str, disk: &str) {
        let Some(asked) = self.which.found().remove(server) else {
            return; // the server has stopped
        };
        let (to, server, disk) = (self.to.clone(), server.to_owned(), disk.to_owned());
        thread::spawn(move || {
            let told = Client::of(asked)
                .and_then(|client| client.get(&["v1", "disks", &disk, "slow"]).send::<Value>());
            // The receiver may be gone.
            let _ = to.send(News::Slow(server, disk, told.ok()));
        });
    }
}

impl Which {
    /// Returns the servers by name, each once: several links may lead to one socket.
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

/// Finds servers and starts a watcher for each.
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
            // A local server that has stopped is no problem. A remote server that has sent samples
            // before may be upgrading.
            let is_missed = is_remote && !watcher.has_told.get();
            let problem = ended.err().filter(|error| is_missed || !error.is_gone());
            let problem = problem.map(|error| explain(&watcher.name, &error));
            let has_problem = problem.is_some();
            // The receiver may be gone.
            let _ = watcher.to.send(News::Gone(watcher.name, problem));
            if has_problem {
                // A problem lasts: wait longer before the next attempt.
                thread::sleep(4 * LOOK);
            }
            lock(&watched).remove(&name);
        });
    }
}

fn lock(watched: &Mutex<BTreeSet<String>>) -> parking_lot::MutexGuard<'_, BTreeSet<String>> {
    watched.lock()
}

fn explain(name: &str, error: &ClientError) -> String {
    match error {
        ClientError::Refused {
            status: 404, text, ..
        } if text.contains("/v1/live") => {
            format!("{name}: this version of the server does not support intervals")
        }
        // The server's own error does not name the server.
        ClientError::Refused { text, .. } => format!("{name}: {text}"),
        other => other.to_string(),
    }
}

/// Receives the samples of one server.
struct Watcher {
    name: String,
    disk: Option<String>,
    to: SyncSender<News>,
    interval_ms: Arc<AtomicU64>,
    patience: Duration,
    has_told: Cell<bool>,
}

impl Watcher {
    /// Forwards samples until the server closes the stream or fails.
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
            // Timeout in milliseconds for a server that is stuck or unreachable.
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
