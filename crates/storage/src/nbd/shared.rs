//! What the disk and all its channels know.

use super::NbdOptions;
use super::connector::Connector;
use super::endpoint::{Connected, Endpoint, Greeted, cannot_start};
use super::halt::Halt;
use super::replay::{Replay, has_cache};
use super::unflushed::{Kept, Unflushed};
use fathom_core::DiskError;
use fathom_nbd::NbdUri;
use fathom_nbd::client::Export;
use fathom_nbd::protocol::Replies;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

pub(super) struct Shared {
    pub(super) endpoint: Endpoint,
    pub(super) options: NbdOptions,
    pub(super) export: Export,
    pub(super) connector: Connector,
    pub(super) halt: Arc<Halt>,
    links: Mutex<Links>,
    /// Writes that have been completed, and may have to be sent again.
    sequence: AtomicU64,
    /// Flushes that have been started.
    flush: AtomicU64,
    /// The last of them that has succeeded.
    flushed: AtomicU64,
    /// The first flush that makes all durable that has been written.
    needed: AtomicU64,
    /// The last flush that was made up because what it was for is given up.
    voided: AtomicU64,
    /// See [`Shared::distrust`].
    is_distrusted: AtomicBool,
    replaying: Mutex<()>,
}

/// The channels and their connections. These are lost together: a server that is gone for one is gone for
/// all, and nobody may see the disk before what was written has been written again.
pub(super) struct Links {
    /// Counts how often connections have been made.
    generation: u64,
    /// False: they are lost. Once all channels have let go, a thread looks for the server.
    are_up: bool,
    /// That thread is at it.
    is_sought: bool,
    pub(super) members: Vec<Member>,
    next_member: u64,
    /// The disk's first connection, until a channel takes it.
    first: Option<Connected>,
    /// See [`Shared::settle`].
    flush_is_wanted: bool,
    /// When the server was last found again, and the pause there would have been before the next attempt.
    pub(super) found: Option<(Instant, Duration)>,
    /// Of channels that have gone, or have let go of their connections.
    pub(super) logs: Vec<Unflushed>,
}

/// A channel.
pub(super) struct Member {
    number: u64,
    bell: Arc<OwnedFd>,
    /// It has connections, or is to fetch them.
    holds: bool,
    given: Option<Given>,
}

/// Connections for one channel.
pub(super) struct Given {
    pub(super) generation: u64,
    pub(super) connections: Vec<Connected>,
}

/// A channel's place among the others.
pub(super) struct Seat {
    number: u64,
    /// Signalled when the connections are lost, and when there are new ones.
    pub(super) bell: Arc<OwnedFd>,
}

impl Shared {
    pub(super) fn connect(uri: &NbdUri, options: NbdOptions) -> Result<Shared, DiskError> {
        let endpoint = Endpoint::new(uri, options.connect_timeout)?;
        let (greeted, export) = endpoint.connect()?;
        if export.is_read_only() && !options.read_only {
            return Err(endpoint.unusable("the server allows reading only: pass --readonly"));
        }
        if options.connections > 1 && !export.can_multi_conn() {
            return Err(endpoint.unusable(
                "the server takes one connection only (it does not offer CAN_MULTI_CONN): use \
                 --server-connections 1",
            ));
        }
        let connector = Connector::start().map_err(|source| DiskError::Io {
            path: endpoint.name(),
            what: "cannot start a thread to connect",
            source,
        })?;
        let shared = Shared {
            links: Mutex::new(Links {
                generation: 0,
                are_up: true,
                is_sought: false,
                members: Vec::new(),
                next_member: 0,
                first: Some(greeted.ready()),
                flush_is_wanted: false,
                found: None,
                logs: Vec::new(),
            }),
            endpoint,
            options,
            export,
            connector,
            halt: Arc::default(),
            sequence: AtomicU64::new(0),
            flush: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
            needed: AtomicU64::new(0),
            voided: AtomicU64::new(0),
            is_distrusted: AtomicBool::new(false),
            replaying: Mutex::default(),
        };
        let size = shared.size();
        if size == 0 {
            let problem = format!("is {} bytes long; a disk needs 512 at least", export.size);
            return Err(shared.endpoint.unusable(problem));
        }
        if size != export.size {
            tracing::warn!(
                "{uri}: its last {} bytes are not a whole block and will not be visible",
                export.size - size
            );
        }
        Ok(shared)
    }

    /// Of the disk, in bytes: whole blocks.
    pub(super) fn size(&self) -> u64 {
        self.export.size & !u64::from(self.export.minimum_block.max(512) - 1)
    }

    pub(super) fn takes_one_only(&self) -> DiskError {
        self.endpoint.unusable(
            "the server takes one connection only (it does not offer CAN_MULTI_CONN): use \
             --iothreads 1",
        )
    }

    pub(super) fn links(&self) -> MutexGuard<'_, Links> {
        self.links.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Connects once more, blocking. The export must still be the same.
    pub(super) fn connect_again(&self) -> Result<Greeted, DiskError> {
        let (greeted, export) = self.endpoint.connect()?;
        // The id is the server's to choose, each time.
        let same_context = export.allocation.is_some() == self.export.allocation.is_some();
        let export = Export {
            allocation: self.export.allocation,
            ..export
        };
        match same_context && export == self.export {
            true => Ok(greeted),
            false => Err(self
                .endpoint
                .unusable("the server's export is not what it was (its size, or what it can do)")),
        }
    }

    /// As many as a channel has.
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

    /// One more channel, with its connections, if there are any at the moment; blocking.
    pub(super) fn join(self: &Arc<Shared>) -> Result<(Seat, Option<Given>), DiskError> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let bell = Arc::new(bell.map_err(|source| cannot_start(&self.endpoint, source.into()))?);
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
            // (Without connections it gets some when there are any.)
            let given = given.filter(|_| links.are_up);
            let number = links.next_member;
            links.next_member += 1;
            links.members.push(Member {
                number,
                bell: bell.clone(),
                holds: given.is_some(),
                given: None,
            });
            return Ok((Seat { number, bell }, given));
        }
    }

    /// What may block, by a thread that may do what it takes.
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

    /// The connections of this generation are of no more use.
    pub(super) fn lose(&self, generation: u64, why: &str) {
        let mut links = self.links();
        if !links.are_up || links.generation != generation {
            return;
        }
        links.are_up = false;
        links.first = None;
        tracing::error!("{}: {why}; looking for it again", self.endpoint.uri());
        for member in &mut links.members {
            // Nobody has used these.
            member.holds &= member.given.take().is_none();
            ring(&member.bell);
        }
    }

    /// A channel has no connections any more; `log`: what it has written. `leaves`: it ends. True: it was the
    /// last one, and the server is to be looked for.
    pub(super) fn let_go(&self, seat: &Seat, log: Unflushed, leaves: bool) -> bool {
        let mut links = self.links();
        if !log.is_empty() {
            links.logs.push(log);
        }
        let flushed = self.flushed.load(Ordering::SeqCst);
        links.logs.iter_mut().for_each(|log| log.trim(flushed));
        links.logs.retain(|log| !log.is_empty());
        if let Some(member) = links.members.iter_mut().find(|m| m.number == seat.number) {
            member.holds = false;
            member.given = None;
        }
        let holds = links.members.iter().any(|member| member.holds);
        let was_last = !links.are_up && !links.is_sought && !holds;
        links.is_sought |= was_last;
        if leaves {
            links.members.retain(|member| member.number != seat.number);
        }
        was_last
    }

    /// What a bell was about: new connections.
    pub(super) fn fetch(&self, seat: &Seat) -> Option<Given> {
        let mut links = self.links();
        let member = links.members.iter_mut().find(|m| m.number == seat.number);
        member.and_then(|member| member.given.take())
    }

    pub(super) fn is_current(&self, generation: u64) -> bool {
        let links = self.links();
        links.are_up && links.generation == generation
    }

    /// The number of one more write that has been completed, and is not durable, and the first flush that
    /// makes it so. Flushes that begin from now on have that number, or larger ones.
    #[inline]
    pub(super) fn wrote(&self) -> (u64, u64) {
        let mark = self.flush.load(Ordering::SeqCst) + 1;
        self.needed.fetch_max(mark, Ordering::Relaxed);
        (self.sequence.fetch_add(1, Ordering::Relaxed), mark)
    }

    /// A flush begins; returns its number.
    pub(super) fn begin_flush(&self) -> u64 {
        self.flush.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// This flush has succeeded.
    pub(super) fn has_flushed(&self, number: u64) {
        if self.is_distrusted() {
            return;
        }
        self.flushed.fetch_max(number, Ordering::SeqCst);
    }

    /// The last flush that has succeeded.
    pub(super) fn flushed(&self) -> u64 {
        self.flushed.load(Ordering::SeqCst)
    }

    /// Makes durable what has been written, blocking: the disk is not in use any more, and whoever has it next
    /// does not know of it. What cannot be flushed in time is given up: it must not be put over what somebody
    /// else has written meanwhile.
    pub(super) fn settle(self: &Arc<Shared>) -> Result<(), DiskError> {
        let needed = self.needed.load(Ordering::SeqCst);
        if !has_cache(&self.export) || self.options.writethrough || needed <= self.flushed() {
            return Ok(());
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
        // By a connection that the writes have gone by: were it lost, that would be found out.
        let patience = match links.are_up {
            true => self.patience(),
            false => self.options.connect_timeout,
        };
        links.flush_is_wanted = true;
        links.members.iter().for_each(|member| ring(&member.bell));
        drop(links);
        let deadline = Instant::now() + patience;
        while self.flushed() < needed {
            if Instant::now() > deadline {
                return Err(self.endpoint.unusable(
                    "the server has not made durable in time what was written: what was not flushed \
                     is given up",
                ));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Nothing that was written until now is ever written again.
    fn give_up(&self) {
        let number = self.begin_flush();
        self.voided.fetch_max(number, Ordering::SeqCst);
        // What is being written again ends with what the server has in hand.
        let deadline = Instant::now() + self.options.connect_timeout;
        while self.replaying.try_lock().is_err() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.flushed.fetch_max(number, Ordering::SeqCst);
        self.links().logs.clear();
    }

    /// Somebody wants what has been written to be durable; whoever asks sees to it.
    pub(super) fn takes_flush(&self) -> bool {
        std::mem::take(&mut self.links().flush_is_wanted)
    }

    /// Writes what is kept once more, in its order, and flushes if there was anything; blocking. Returns how many
    /// writes it was.
    pub(super) fn write_again(
        &self,
        greeted: &mut Greeted,
        logs: &[Unflushed],
    ) -> Result<usize, DiskError> {
        let _under_way = self.replaying.lock().unwrap_or_else(|e| e.into_inner());
        let voided = self.voided.load(Ordering::SeqCst);
        let goes_on = || !self.halt.is_over() && self.voided.load(Ordering::SeqCst) == voided;
        let mut writes: Vec<Kept<'_>> = logs.iter().flat_map(Unflushed::kept).collect();
        writes.sort_unstable_by_key(|write| write.sequence);
        let count = writes.len();
        let number = self.begin_flush();
        if count > 0 {
            let (transport, patience) = (&mut greeted.transport, self.patience());
            let mut replay = Replay::new(transport, &self.export, patience, &goes_on);
            let replayed = replay.run(writes);
            replayed.map_err(|problem| self.endpoint.unusable(problem))?;
        }
        self.is_distrusted.store(false, Ordering::SeqCst);
        self.has_flushed(number);
        Ok(count)
    }

    /// The server has failed to flush: what it says of other flushes is not believed.
    pub(super) fn distrust(&self) {
        self.is_distrusted.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_distrusted(&self) -> bool {
        self.is_distrusted.load(Ordering::SeqCst)
    }

    /// How long a server may take that somebody waits for.
    pub(super) fn patience(&self) -> Duration {
        self.options.timeout.unwrap_or(EVER)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let replies = self.export.replies;
        let links = self.links.get_mut().unwrap_or_else(|e| e.into_inner());
        let unused = links.first.take();
        unused.into_iter().for_each(|one| one.part(replies));
    }
}

/// For who waits as long as it takes.
const EVER: Duration = Duration::from_secs(3600);

/// A server that is lost so soon after it was found is not sought at once.
const SOON: Duration = Duration::from_secs(10);

impl Links {
    /// The last pause, if the server was found only a moment ago.
    pub(super) fn hurry(&self) -> Option<Duration> {
        let found = self.found.filter(|(when, _)| when.elapsed() < SOON);
        found.map(|(_, pause)| pause)
    }

    /// All channels get new connections, one set each; what is left waits for the next one, or is not needed.
    pub(super) fn give(
        &mut self,
        sets: Vec<Vec<Connected>>,
        first: Option<Connected>,
        replies: Replies,
    ) {
        self.generation += 1;
        (self.are_up, self.is_sought) = (true, false);
        self.first = first;
        let mut sets = sets.into_iter();
        for (member, connections) in self.members.iter_mut().zip(&mut sets) {
            member.holds = true;
            member.given = Some(Given {
                generation: self.generation,
                connections,
            });
            ring(&member.bell);
        }
        sets.flatten().for_each(|one| one.part(replies));
    }
}

fn ring(bell: &OwnedFd) {
    // An eventfd's counter cannot overflow by ones.
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
}
