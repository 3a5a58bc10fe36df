//! State shared by the disk and all its channels.

use super::NbdOptions;
use super::connector::Connector;
use super::endpoint::{Connected, Endpoint, Greeted, cannot_start};
use super::flushes::Flushes;
use super::halt::Halt;
use super::links::{Given, Links, Seat};
use super::replay::Replay;
use super::unflushed::{Kept, Unflushed};
use fathom_core::{DiskError, EventNotifier};
use fathom_nbd::NbdUri;
use fathom_nbd::client::Export;
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

pub(super) struct Shared {
    pub(super) endpoint: Endpoint,
    pub(super) options: NbdOptions,
    pub(super) export: Export,
    pub(super) connector: Connector,
    pub(super) halt: Arc<Halt>,
    /// Whether the disk was abandoned permanently.
    is_halted: AtomicBool,
    links: Mutex<Links>,
    pub(super) flushes: Flushes,
    /// Locked while kept writes are sent again.
    replaying: Mutex<()>,
}

impl Shared {
    pub(super) fn connect(uri: &NbdUri, options: NbdOptions) -> Result<Shared, DiskError> {
        let endpoint = Endpoint::new(uri, options.context(), options.connect_timeout)?;
        let (greeted, export) = endpoint.connect()?;
        if export.is_read_only() && !options.read_only {
            return Err(endpoint.unusable("the server's export is read-only; pass --readonly"));
        }
        if options.connections > 1 && !export.can_multi_conn() {
            return Err(endpoint.unusable(
                "the server accepts only one connection (it does not offer CAN_MULTI_CONN); pass \
                 --server-connections 1",
            ));
        }
        let connector = Connector::start().map_err(|source| DiskError::Io {
            path: endpoint.name(),
            what: "cannot start a thread to connect",
            source,
        })?;
        let shared = Shared {
            is_halted: AtomicBool::new(false),
            links: Mutex::new(Links::new(greeted.ready())),
            endpoint,
            options,
            export,
            connector,
            halt: Arc::default(),
            flushes: Flushes::default(),
            replaying: Mutex::default(),
        };
        let size = shared.size();
        if size == 0 {
            let problem = format!("{} bytes long; a disk needs at least 512", export.size);
            return Err(shared.endpoint.unusable(problem));
        }
        if size != export.size && !shared.options.read_only {
            let problem = format!(
                "the export's size of {} bytes is not a multiple of its block size, so its last \
                 {} bytes could not be written; enlarge the export, or open it read-only",
                export.size,
                export.size - size
            );
            return Err(shared.endpoint.unusable(problem));
        }
        if size != export.size {
            tracing::warn!(
                "{uri}: the last {} bytes are not a whole block, and are not part of the disk",
                export.size - size
            );
        }
        Ok(shared)
    }

    /// Returns the disk's size in bytes: whole blocks.
    pub(super) fn size(&self) -> u64 {
        self.export.size & !u64::from(self.export.minimum_block.max(512) - 1)
    }

    pub(super) fn takes_one_only(&self) -> DiskError {
        self.endpoint.unusable(
            "the server accepts only one connection (it does not offer CAN_MULTI_CONN); pass \
             --iothreads 1",
        )
    }

    pub(super) fn links(&self) -> MutexGuard<'_, Links> {
        self.links.lock()
    }

    /// Connects again; blocking. The export must be unchanged.
    pub(super) fn connect_again(&self) -> Result<Greeted, DiskError> {
        let (greeted, export) = self.endpoint.connect()?;
        // The server may choose another context ID for each connection.
        let same_context = export.context.is_some() == self.export.context.is_some();
        let export = Export {
            context: self.export.context,
            ..export
        };
        match same_context && export == self.export {
            true => Ok(greeted),
            false => Err(self
                .endpoint
                .unusable("the server's export has changed (its size or features)")),
        }
    }

    /// Makes all connections of one channel; `first` is used as one of them.
    pub(super) fn connect_all(
        &self,
        first: Option<Connected>,
    ) -> Result<Vec<Connected>, DiskError> {
        let mut connections: Vec<_> = first.into_iter().collect();
        while connections.len() < self.options.connections {
            match self.connect_again() {
                Ok(greeted) => connections.push(greeted.ready()),
                Err(error) => {
                    let replies = self.export.replies;
                    connections.into_iter().for_each(|one| one.part(replies));
                    return Err(error);
                }
            }
        }
        Ok(connections)
    }

    /// Adds a channel, with its connections if the server is connected at the moment; blocking.
    pub(super) fn join(self: &Arc<Shared>) -> Result<(Seat, Option<Given>), DiskError> {
        let notifier = EventNotifier::new();
        let notifier = notifier.map_err(|source| cannot_start(&self.endpoint, source))?;
        let notifier = Arc::new(notifier);
        let mut connected: Option<Given> = None;
        loop {
            let mut links = self.links();
            if !self.export.can_multi_conn() && !links.members.is_empty() {
                return Err(self.takes_one_only());
            }
            let generation = links.generation;
            let given = connected
                .take()
                .filter(|given| given.generation == generation);
            if links.are_up && given.is_none() {
                let first = links.first.take();
                drop(links);
                connected = Some(Given {
                    generation,
                    connections: self.on_thread(move |shared| shared.connect_all(first))?,
                });
                continue;
            }
            // A channel without connections receives them when the server is connected.
            let given = given.filter(|_| links.are_up);
            return Ok((links.add(notifier, given.is_some()), given));
        }
    }

    /// Runs a blocking job on a thread that has the necessary privileges.
    fn on_thread<T: Send + 'static>(
        self: &Arc<Shared>,
        job: impl FnOnce(&Shared) -> Result<T, DiskError> + Send + 'static,
    ) -> Result<T, DiskError> {
        let (done, outcome) = sync_channel(1);
        let shared = self.clone();
        self.connector.ask(move || drop(done.send(job(&shared))));
        let ended = || self.endpoint.unusable("its connecting thread has ended");
        outcome.recv().map_err(|_| ended())?
    }

    /// Abandons the connections of this generation.
    pub(super) fn lose(&self, generation: u64, why: &str) {
        if self.links().lose(generation) {
            let next = match self.options.reconnect {
                Some(_) => "connecting again, and requests wait",
                None => {
                    "requests fail, and the server does not connect again, because the export \
                     might be another disk (--server-reconnect)"
                }
            };
            tracing::error!("{}: {why}; {next}", self.endpoint.uri());
        }
    }

    /// Abandons the disk: all channels close their connections and fail their requests, and no
    /// reconnection is tried.
    pub(super) fn give_up_for_good(&self) {
        self.is_halted.store(true, Ordering::SeqCst);
        self.halt.halt();
        let mut links = self.links();
        let generation = links.generation;
        if !links.lose(generation) {
            links.ring_all();
        }
    }

    pub(super) fn is_halted(&self) -> bool {
        self.is_halted.load(Ordering::SeqCst)
    }

    /// Returns whether lost connections are re-established.
    pub(super) fn is_sought(&self) -> bool {
        self.options.reconnect.is_some() && !self.is_halted()
    }

    /// See [`Links::let_go`].
    pub(super) fn let_go(&self, seat: &Seat, log: Unflushed, leaves: bool) -> bool {
        self.links().let_go(seat, log, leaves, self.flushes.last())
    }

    /// Takes the channel's new connections, after its notifier was signalled.
    pub(super) fn fetch(&self, seat: &Seat) -> Option<Given> {
        self.links().fetch(seat)
    }

    pub(super) fn is_current(&self, generation: u64) -> bool {
        self.links().is_current(generation)
    }

    /// Makes all completed writes durable; blocking. The disk is not in use any more, and its next
    /// user does not know of these writes. Writes that cannot be flushed in time are given up: they
    /// must not overwrite what others write meanwhile.
    pub(super) fn settle(self: &Arc<Shared>) -> Result<(), DiskError> {
        let needed = self.flushes.needed();
        if !self.export.has_cache() || self.options.writethrough || needed <= self.flushes.last() {
            return Ok(());
        }
        if self.is_halted() {
            return Err(self
                .endpoint
                .unusable("given up with writes that are not durable"));
        }
        let flushed = self.flush_all(needed);
        if flushed.is_err() {
            self.give_up();
        }
        flushed
    }

    fn flush_all(self: &Arc<Shared>, needed: u64) -> Result<(), DiskError> {
        let mut links = self.links();
        if links.members.is_empty() && links.are_up {
            let logs = std::mem::take(&mut links.logs);
            drop(links);
            return self.on_thread(move |shared| {
                let mut greeted = shared.connect_again()?;
                shared.write_again(&mut greeted, &logs)?;
                greeted.ready().part(shared.export.replies);
                Ok(())
            });
        }
        // Flush on a connection that carried the writes: if it was lost, the loss is detected.
        let patience = match links.are_up {
            true => self.patience(),
            false => self.options.connect_timeout,
        };
        links.flush_is_wanted = true;
        links.ring_all();
        drop(links);
        let deadline = Instant::now() + patience;
        while self.flushes.last() < needed {
            if Instant::now() > deadline {
                return Err(self.endpoint.unusable(
                    "the server did not flush in time; writes that were not flushed are lost",
                ));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Gives up all writes completed so far, so that they are never sent again.
    fn give_up(&self) {
        let voided = self.flushes.void();
        // A replay in progress stops after the commands that the server is processing.
        let deadline = Instant::now() + self.options.connect_timeout;
        while self.replaying.try_lock().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.flushes.has_ended(voided);
        self.links().logs.clear();
    }

    /// Takes the request for a flush; a caller that gets true must begin one.
    pub(super) fn takes_flush(&self) -> bool {
        std::mem::take(&mut self.links().flush_is_wanted)
    }

    /// Sends the kept writes again in their order, and then a flush, if there are any; blocking.
    /// Returns the number of writes.
    pub(super) fn write_again(
        &self,
        greeted: &mut Greeted,
        logs: &[Unflushed],
    ) -> Result<usize, DiskError> {
        let _under_way = self.replaying.lock();
        let voided = self.flushes.voided();
        let goes_on = || !self.halt.is_over() && self.flushes.voided() == voided;
        let mut writes: Vec<Kept<'_>> = logs.iter().flat_map(Unflushed::kept).collect();
        writes.sort_unstable_by_key(|write| write.sequence);
        let count = writes.len();
        let number = self.flushes.begin();
        if count > 0 {
            let (transport, patience) = (&mut greeted.transport, self.patience());
            let mut replay = Replay::new(transport, &self.export, patience, &goes_on);
            let replayed = replay.run(writes);
            replayed.map_err(|problem| self.endpoint.unusable(problem))?;
        }
        self.flushes.trust();
        self.flushes.succeeded(number);
        Ok(count)
    }

    /// Returns the timeout for a server in blocking operations.
    pub(super) fn patience(&self) -> Duration {
        self.options.timeout.unwrap_or(EVER)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let replies = self.export.replies;
        let links = self.links.get_mut();
        let unused = links.first.take();
        unused.into_iter().for_each(|one| one.part(replies));
    }
}

/// Timeout of blocking operations if none is configured.
const EVER: Duration = Duration::from_secs(3600);
