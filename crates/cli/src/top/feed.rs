//! Where samples come from: a thread for each server, which are looked for again and again.

use fathom_client::{Client, ClientError, place};
use fathom_daemon::Sample;
use fathom_units::short_duration;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// How often servers are looked for.
const LOOK: Duration = Duration::from_millis(500);
/// How soon another interval is noticed.
const BRIEF: Duration = Duration::from_millis(100);

/// Whose samples.
#[derive(Clone, Debug)]
pub enum Which {
    /// Of all of this machine's servers that are this user's.
    All,
    One {
        socket: PathBuf,
        disk: Option<String>,
    },
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
    to: Sender<News>,
    interval_ms: Arc<AtomicU64>,
    which: Which,
}

impl Feed {
    pub fn start(which: Which, interval: Duration) -> Feed {
        let (to, news) = channel();
        let interval_ms = Arc::new(AtomicU64::new(interval.as_millis() as u64));
        let finder = Finder {
            which: which.clone(),
            to: to.clone(),
            interval_ms: interval_ms.clone(),
            watched: Arc::default(),
        };
        // It looks as long as there is this process.
        thread::spawn(move || finder.run());
        Feed {
            news,
            to,
            interval_ms,
            which,
        }
    }

    pub fn set_interval(&self, interval: Duration) {
        self.interval_ms.store(interval.as_millis() as u64, Relaxed);
    }

    /// What has come since, or comes within that time.
    pub fn take(&self, patience: Duration) -> Vec<News> {
        let first = self.news.recv_timeout(patience).ok();
        first.into_iter().chain(self.news.try_iter()).collect()
    }

    /// The servers that are to be heard.
    pub fn servers(&self) -> Vec<String> {
        let found = self.which.found();
        found.iter().map(|path| name_of(path)).collect()
    }

    /// Have slow requests of a disk told: they come as news.
    pub fn ask_slow(&self, server: &str, disk: &str) {
        let (to, server, disk) = (self.to.clone(), server.to_owned(), disk.to_owned());
        thread::spawn(move || {
            let told = Client::connect(Path::new(&server))
                .and_then(|client| client.get(&["v1", "disks", &disk, "slow"]).send::<Value>());
            // Nobody may listen any more.
            let _ = to.send(News::Slow(server, disk, told.ok()));
        });
    }
}

impl Which {
    /// Sockets, each once: some of a server's names are links to it.
    fn found(&self) -> BTreeSet<PathBuf> {
        let all = match self {
            Which::All => place::all().into_iter().map(|(_, path)| path).collect(),
            Which::One { socket, .. } => vec![socket.clone()],
        };
        let real = all
            .into_iter()
            .map(|path| path.canonicalize().unwrap_or(path));
        real.collect()
    }

    fn disk(&self) -> Option<&str> {
        match self {
            Which::All => None,
            Which::One { disk, .. } => disk.as_deref(),
        }
    }
}

fn name_of(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Finds servers, and has each watched.
struct Finder {
    which: Which,
    to: Sender<News>,
    interval_ms: Arc<AtomicU64>,
    watched: Arc<Mutex<BTreeSet<PathBuf>>>,
}

impl Finder {
    fn run(self) {
        loop {
            for path in self.which.found() {
                let is_new = lock(&self.watched).insert(path.clone());
                if is_new {
                    self.watch(path);
                }
            }
            thread::sleep(LOOK);
        }
    }

    fn watch(&self, path: PathBuf) {
        let watched = self.watched.clone();
        let watcher = Watcher {
            name: name_of(&path),
            disk: self.which.disk().map(str::to_owned),
            to: self.to.clone(),
            interval_ms: self.interval_ms.clone(),
        };
        thread::spawn(move || {
            let ended = watcher.run(&path);
            let problem = ended.err().filter(|error| !error.is_gone());
            let problem = problem.map(|error| explain(&watcher.name, &error));
            let has_problem = problem.is_some();
            // Nobody may listen any more.
            let _ = watcher.to.send(News::Gone(watcher.name, problem));
            if has_problem {
                // It does not go away that soon.
                thread::sleep(4 * LOOK);
            }
            lock(&watched).remove(&path);
        });
    }
}

fn lock(watched: &Mutex<BTreeSet<PathBuf>>) -> std::sync::MutexGuard<'_, BTreeSet<PathBuf>> {
    watched.lock().unwrap_or_else(PoisonError::into_inner)
}

fn explain(name: &str, error: &ClientError) -> String {
    match error {
        ClientError::Refused { status: 404, text } if text.contains("/v1/live") => {
            format!("{name}: this server is of a version that tells nothing of intervals")
        }
        other => other.to_string(),
    }
}

/// Hears one server.
struct Watcher {
    name: String,
    disk: Option<String>,
    to: Sender<News>,
    interval_ms: Arc<AtomicU64>,
}

impl Watcher {
    /// Until the server is there no more.
    fn run(&self, path: &Path) -> Result<(), ClientError> {
        let client = Client::connect(path)?;
        loop {
            let interval = self.interval_ms.load(Relaxed);
            let text = short_duration(Duration::from_millis(interval));
            let call = client.get(&["v1", "live"]).parameter("interval", &text);
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
                            path: path.to_owned(),
                            seconds: (3 * interval + 10_000) / 1000,
                        });
                    }
                    continue;
                };
                patience = 3 * interval + 10_000;
                let sample = serde_json::from_slice(&line);
                let sample = sample.map_err(|_| ClientError::NotFathom(path.to_owned()))?;
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
