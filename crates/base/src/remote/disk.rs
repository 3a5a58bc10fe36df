//! Images on other kinds of storage: an NBD server, Ceph, or a file.

use crate::problem::Problem;
use fathom_core::{AlignedBuffer, Disk, Op};
use fathom_stack::{Client, DiskReply, DiskRequest, Job};
use fathom_storage::cached::CacheTerms;
use fathom_storage::{Cache, EngineKind, Location, OpenOptions};
use fathom_units::{Timeout, cause};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::Builder;
use tokio::sync::oneshot;

/// The requests in progress and where to send their replies.
type Waiting = Arc<Mutex<HashMap<u64, oneshot::Sender<DiskReply>>>>;

pub struct RemoteDisk {
    /// Dropping the client ends the worker and then the listening thread.
    client: Option<Client>,
    waiting: Waiting,
    next: AtomicU64,
    size: u64,
}

fn options(growable: bool) -> OpenOptions {
    OpenOptions {
        cache: Cache::Writeback,
        read_only: true,
        discard: false,
        growable,
        force_share: false,
        patient: false,
        succeeds: false,
        keeps_lock: false,
        superseded: Default::default(),
        engine: EngineKind::default(),
        workers: 1,
        server_timeout: None,
        // The keeper limits its own waiting time, so the storage may wait without limit.
        server_reconnect: Some(Timeout(None)),
        server_is_sought: true,
        server_connections: None,
        base: CacheTerms::default(),
        handover_state: Default::default(),
    }
}

impl RemoteDisk {
    pub async fn open(remote: String) -> Result<RemoteDisk, Problem> {
        // Uses a thread of its own, because a remote that never responds could block all writer
        // threads.
        let (sender, opened) = oneshot::channel();
        let job = move || drop(sender.send(open(&remote)));
        let started = Builder::new().name("remote".into()).spawn(job);
        started.map_err(|error| Problem::Away(cause(error)))?;
        let gone = |_| Err(Problem::Away("its thread has ended".into()));
        opened.await.unwrap_or_else(gone)
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    pub async fn read(&self, at: u64, len: u64) -> Result<Vec<u8>, Problem> {
        let away = |text: String| Problem::Away(text);
        // Reads must consist of whole sectors. Bytes beyond the end of the image read as zeroes.
        let whole = len.next_multiple_of(512);
        let pages = AlignedBuffer::try_new(whole as usize).map_err(|error| away(cause(error)))?;
        let tag = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, answer) = oneshot::channel();
        waiting(&self.waiting).insert(tag, sender);
        let mut ask = DiskRequest::new(Op::Read, at, whole, Some(pages));
        ask.tag = tag;
        self.client
            .as_ref()
            .expect("it is there until the end")
            .ask(ask);
        let answer = answer
            .await
            .map_err(|_| away("its thread has ended".into()))?;
        match (answer.errno, answer.ask.pages) {
            (0, Some(pages)) => Ok(pages.bytes()[..len as usize].to_vec()),
            (errno, _) => {
                let error = std::io::Error::from_raw_os_error(errno);
                Err(away(format!(
                    "reading at byte {at} failed: {}",
                    cause(error)
                )))
            }
        }
    }
}

impl Drop for RemoteDisk {
    /// Drops the client on another thread, because it waits for requests in flight, which may take
    /// long.
    fn drop(&mut self) {
        let client = self.client.take();
        let _ = Builder::new()
            .name("remote ends".into())
            .spawn(move || drop(client));
    }
}

fn waiting(all: &Waiting) -> MutexGuard<'_, HashMap<u64, oneshot::Sender<DiskReply>>> {
    all.lock()
}

fn open(remote: &str) -> Result<RemoteDisk, Problem> {
    let location: Location = remote.parse().map_err(Problem::Never)?;
    if ["cached", "memory", "null"].contains(&location.kind().name) {
        return Err(Problem::Never("a base image must be remote".into()));
    }
    let away = |error: fathom_core::DiskError| Problem::Away(error.to_string());
    // The last sector of a file may be incomplete.
    let is_file = location.path().is_some();
    let opened = location.open(&options(is_file)).map_err(away)?;
    let size = match &opened.bytes {
        Some(bytes) => bytes
            .len()
            .map_err(|error| Problem::Away(error.to_string()))?,
        None => opened
            .file
            .as_ref()
            .map_or(opened.disk.info().size, |file| file.info().size),
    };
    if let Some(file) = &opened.file {
        // A file that becomes shorter is being modified, so the missing bytes must not read as
        // zeroes.
        file.guard_end(Arc::new(move |missing| missing.start >= size));
    }
    opened.disk.activate().map_err(away)?;
    let mut job = Job::default();
    let client = job
        .client(opened.disk, EngineKind::default())
        .map_err(away)?;
    let waiting: Waiting = Arc::default();
    let listening = waiting.clone();
    let listen = move || {
        while let Some(answer) = next(&job, &listening) {
            if let Some(sender) = self::waiting(&listening).remove(&answer.ask.tag) {
                let _ = sender.send(answer);
            }
        }
    };
    let started = Builder::new().name("remote".into()).spawn(listen);
    started.map_err(|error| Problem::Away(cause(error)))?;
    Ok(RemoteDisk {
        client: Some(client),
        waiting,
        next: AtomicU64::new(0),
        size,
    })
}

/// Waits for the next reply. Returns `None` after the disk has been dropped.
fn next(job: &Job, waiting: &Waiting) -> Option<DiskReply> {
    loop {
        if let Some(answer) = job.wait_for(std::time::Duration::from_secs(1)) {
            return Some(answer);
        }
        if Arc::strong_count(waiting) == 1 {
            return None;
        }
    }
}
