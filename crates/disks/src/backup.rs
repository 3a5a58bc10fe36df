//! Backups: NBD clients read the disk as of an instant, at a socket of the backup's own.

use super::serving::Serving;
use super::shared_disk::SharedDisk;
use fathom_core::{ThreadKind, thread_starts};
use fathom_exports::NbdServer;
use fathom_exports::nbd::{Export, Exports, Options};
use fathom_jobs::Source;
use fathom_jobs::backup::{Backup, Status, Terms};
use fathom_metrics::BackupInfo;
use fathom_metrics::{Events, Happened};
use fathom_sockets::{Access, Listener};
use fathom_units::cause;
use parking_lot::{Condvar, Mutex};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use std::collections::VecDeque;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Characters that are percent-encoded in a path in a URI.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'/')
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');

/// Source, limits and socket of a new backup.
pub struct Order {
    pub disk: String,
    /// The backup's identity.
    pub id: String,
    pub source: Source,
    pub terms: Terms,
    /// Where clients connect.
    pub socket: PathBuf,
    pub access: Access,
    pub shared: Arc<SharedDisk>,
    pub events: Events,
}

/// A backup that has begun, and may have ended.
#[derive(Clone)]
pub struct Running {
    id: String,
    socket: PathBuf,
    bitmap: Option<String>,
    successor: Option<u64>,
    since: Instant,
    shared: Arc<Shared>,
}

/// Identities of backups that have ended, or that were ended before they began.
///
/// No further backup may have such an identity: a late request to begin would leave a backup that
/// no client ends.
#[derive(Default)]
pub struct EndedBackups(VecDeque<String>);

impl EndedBackups {
    /// Maximum number of stored identities. A request overtakes far fewer other requests.
    const MOST: usize = 256;

    pub fn add(&mut self, id: &str) {
        if self.has(id) {
            return;
        }
        if self.0.len() == EndedBackups::MOST {
            self.0.pop_front();
        }
        self.0.push_back(id.to_owned());
    }

    pub fn has(&self, id: &str) -> bool {
        self.0.iter().any(|ended| ended == id)
    }
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Notified when the backup has ended.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    /// The NBD server and the backup, until the backup ends.
    parts: Option<(Serving<NbdServer>, Backup)>,
    is_ending: bool,
    /// Whether the backup has ended and released the disk.
    is_over: bool,
    /// Status of the backup at its end.
    last: Status,
}

impl Order {
    /// Begins the backup. May block. The error is for the user: the disk is unchanged.
    pub fn begin(self) -> Result<Running, String> {
        let listener = Listener::bind(&self.socket, self.access);
        let listener = listener.map_err(|error| error.to_string())?;
        let shared = Arc::<Shared>::default();
        let disk = self.disk.clone();
        let (ending, events) = (Arc::downgrade(&shared), self.events.clone());
        let failed = move |problem: &str| {
            tracing::warn!("disk '{disk}': backup failed: {problem}");
            let (disk, problem) = (disk.clone(), problem.to_owned());
            events.tell(Happened::BackupFailed { disk, problem });
            if let Some(shared) = ending.upgrade() {
                shared.end_soon(None);
            }
        };
        let backup = Backup::start(self.source, &self.terms, Box::new(failed))?;
        let (view, workers) = backup.view();
        // Clients that know the backup's identity are never served another backup. The disk's name
        // and the empty name refer to any present backup.
        let exports = [&self.disk, &self.id].map(|name| {
            let text = "the disk as of the backup's begin".to_owned();
            let export = Export::new(name.clone(), text, view.clone(), workers.clone());
            match &self.terms.bitmap {
                Some(bitmap) => export.with_bitmap(bitmap.clone()),
                None => export,
            }
        });
        let serving = serve(exports.into(), listener);
        let serving = match serving {
            Ok(serving) => serving,
            Err(problem) => {
                // (No client could read the backup.)
                backup.give_up(&problem);
                backup.end();
                return Err(problem);
            }
        };
        let successor = backup.successor();
        shared.state.lock().parts = Some((serving, backup));
        let leaving = Arc::downgrade(&shared);
        self.shared.set_followers_leave(Box::new(move || {
            if let Some(shared) = leaving.upgrade() {
                shared.end_soon(Some("the virtual machine disconnected from the disk"));
            }
        }));
        if shared.state.lock().status().problem.is_some() {
            // The backup failed before `parts` was set, so the callback could not end it.
            shared.end_soon(None);
        }
        let disk = self.disk;
        tracing::info!("disk '{disk}': backup begun");
        self.events.tell(Happened::BackupBegun { disk });
        Ok(Running {
            id: self.id,
            socket: self.socket,
            bitmap: self.terms.bitmap,
            successor,
            since: Instant::now(),
            shared,
        })
    }
}

fn serve(exports: Vec<Export>, listener: Listener) -> Result<Serving<NbdServer>, String> {
    let failed =
        |error: std::io::Error| format!("cannot serve the backup to clients: {}", cause(error));
    let exports = Exports::new(exports).map_err(|error| error.to_string())?;
    let server = NbdServer::new(exports, Options::default()).map_err(failed)?;
    let serve = move |server: &NbdServer| server.serve(&[listener]);
    let (kind, server) = (ThreadKind::NbdListener, Arc::new(server));
    Serving::start(kind, "backup", server, serve, NbdServer::stop).map_err(failed)
}

impl State {
    fn status(&self) -> Status {
        match &self.parts {
            Some((_, backup)) => backup.status(),
            None => self.last.clone(),
        }
    }
}

impl Shared {
    /// Begins to end the backup, on a thread of its own. With a `problem`, the backup has failed
    /// for this reason.
    fn end_soon(self: &Arc<Self>, problem: Option<&str>) {
        let mut state = self.state.lock();
        let Some((_, backup)) = &state.parts else {
            return;
        };
        if let Some(problem) = problem {
            backup.give_up(problem);
        }
        if std::mem::replace(&mut state.is_ending, true) {
            return;
        }
        let own = self.clone();
        let builder = thread::Builder::new().name("end a backup".into());
        let begun = builder.spawn(move || {
            thread_starts(ThreadKind::General);
            own.end();
        });
        // (If no thread could be started, a caller that waits for the end requests the end again.)
        state.is_ending = begun.is_ok();
    }

    fn end(&self) {
        let mut state = self.state.lock();
        state.last = state.status();
        let Some((mut serving, backup)) = state.parts.take() else {
            // Another thread is ending the backup.
            return self.ended.wait_while(&mut state, |state| !state.is_over);
        };
        drop(state);
        serving.begin_stop();
        while serving
            .end(Instant::now() + Duration::from_secs(1))
            .is_none()
        {}
        drop(serving);
        let last = backup.end();
        let mut state = self.state.lock();
        state.last = last;
        state.is_over = true;
        self.ended.notify_all();
    }
}

impl Running {
    /// Resumes the disk's users, if the backup holds them. False: the backup is ending.
    pub fn go_on(&self) -> bool {
        let state = self.shared.state.lock();
        let parts = state.parts.as_ref().filter(|_| !state.is_ending);
        parts.map(|(_, backup)| backup.go_on()).is_some()
    }

    /// The backup's identity.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the URI at which clients read this backup, and no other backup.
    pub fn uri(&self) -> String {
        format!(
            "nbd+unix:///{}?socket={}",
            self.id,
            percent_encode(self.socket.as_os_str().as_bytes(), ENCODED)
        )
    }

    pub fn is_over(&self) -> bool {
        self.shared.state.lock().is_over
    }

    /// Waits until the backup is over, or until `deadline`. False: the backup is not over.
    pub fn wait(&self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let (mut state, ended) = (self.shared.state.lock(), &self.shared.ended);
        ended.wait_while_for(&mut state, |state| !state.is_over, left);
        state.is_over
    }

    pub fn info(&self) -> BackupInfo {
        let Status { kept, problem } = self.shared.state.lock().status();
        BackupInfo {
            id: self.id.clone(),
            uri: self.uri(),
            bitmap: self.bitmap.clone(),
            successor: self.successor,
            kept,
            problem,
            seconds: self.since.elapsed().as_secs(),
        }
    }

    /// Begins to end the backup because the disk is being removed or the server is stopping. Does
    /// not wait for the end.
    pub fn begin_stop(&self) {
        self.shared
            .end_soon(Some("the disk is being removed, or the server is stopping"));
    }

    /// Ends the backup. Returns its final state when the backup has released the disk. May block.
    pub fn end(&self) -> BackupInfo {
        self.shared.end();
        self.info()
    }
}
