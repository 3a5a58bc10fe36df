//! The io_uring engine: one ring for I/O, kicks and sleep.

use crate::engine::files::Files;
use crate::engine::operation;
use crate::engine::pinned::Pinned;
use crate::engine::pool::Pool;
use crate::engine::ring::{MAX_CQ_ENTRIES, Ring};
use crate::engine::{DEVICE_DISCARD, Users};
use fathom_core::token::Target;
use fathom_core::{
    Buffer, Completion, Engine, FileId, Io, IoKind, RequestId, SocketIo, Token, Wait,
};
use fathom_units::cause;
use io_uring::types::{CancelBuilder, Fd};
use io_uring::{cqueue, opcode, squeue};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

/// An eventfd that is watched by a multishot poll.
#[derive(Clone, Copy)]
struct Watch {
    fd: RawFd,
    token: Token,
    /// The `user_data` of the poll.
    user_data: u64,
}

/// Position of the bits that mark the engine's own completions, as [`Token::ENGINE`] does. The
/// `user_data` of a watch also carries its index and a serial number. The number is not reused
/// soon, so that a late completion is not attributed to the watch's successor.
const ENGINE_SHIFT: u32 = 60;
const SERIAL_SHIFT: u32 = 32;
const SERIALS: u64 = 1 << (ENGINE_SHIFT - SERIAL_SHIFT);

/// io_uring(7) for one worker. With DEFER_TASKRUN, completions run on this thread when it enters
/// the kernel, never by an interrupt of their own.
pub struct IoUring {
    ring: Ring,
    files: Files,
    /// Number of files for which a ring's table has room.
    table: u32,
    /// Number of files that the ring's table can hold; 0 if the ring has no table. Operations on
    /// files with higher numbers look the descriptor up.
    fixed_files: u32,
    /// Watches, by the index in `user_data`.
    watches: Vec<Option<Watch>>,
    watch_serial: u64,
    /// Watches whose multishot poll has ended.
    ended: Vec<u64>,
    /// Entries that did not fit into the submission queue.
    backlog: VecDeque<squeue::Entry>,
    /// Number of file operations of channels that have not completed.
    in_flight: usize,
    /// Number of socket operations that have not completed.
    on_sockets: usize,
    /// Threads for operations that the ring does not support: device discards.
    helpers: Option<Pool>,
    /// Guest memory registered with the ring, if memory is to be pinned.
    pinned: Option<Pinned>,
}

impl IoUring {
    /// Makes an engine. Fails with EPERM or ENOSYS where io_uring is not permitted.
    pub fn new(users: Users) -> io::Result<IoUring> {
        let ring = Ring::new(match users {
            Users::One => 0,
            Users::Many => MANY_COMPLETIONS,
        });
        Ok(IoUring::on(ring.map_err(explained)?, users))
    }

    fn on(ring: Ring, users: Users) -> IoUring {
        let table = match users {
            Users::One => FILES,
            Users::Many => MANY_FILES,
        };
        let fixed_files = make_file_table(&ring, table, &Files::default());
        IoUring {
            table,
            ring,
            files: Files::default(),
            fixed_files,
            watches: Vec::new(),
            watch_serial: 0,
            ended: Vec::new(),
            backlog: VecDeque::new(),
            in_flight: 0,
            on_sockets: 0,
            helpers: None,
            pinned: None,
        }
    }

    /// # Safety
    /// As for [`Engine::push`].
    #[inline]
    unsafe fn entry(&self, io: &Io) -> squeue::Entry {
        let (fd, flags) = if io.file.0 < self.fixed_files {
            (Fd(io.file.0 as RawFd), squeue::Flags::FIXED_FILE)
        } else {
            (Fd(self.files.get(io.file)), squeue::Flags::empty())
        };
        // SAFETY: as required of the caller.
        unsafe { operation::entry(io, fd, self.pinned.as_ref()) }.flags(flags)
    }

    #[inline]
    fn queue(&mut self, entry: squeue::Entry) {
        // SAFETY: the memory that the entry points to is valid until its completion, as required of
        // the callers of `push`; other entries point to no memory.
        if !self.backlog.is_empty() || unsafe { !self.ring.push(&entry) } {
            self.backlog.push_back(entry);
        }
    }

    fn poll(&mut self, watch: Watch) {
        let poll = opcode::PollAdd::new(Fd(watch.fd), libc::POLLIN as u32).multi(true);
        self.queue(poll.build().user_data(watch.user_data));
    }

    /// Moves entries of the backlog into the submission queue until it is full.
    fn refill(&mut self) {
        while let Some(entry) = self.backlog.front() {
            // SAFETY: as in `queue`.
            if unsafe { !self.ring.push(entry) } {
                return;
            }
            self.backlog.pop_front();
        }
    }

    fn enter(&mut self, wait: Wait) -> io::Result<()> {
        let (min_complete, timeout) = match wait {
            Wait::No => self.harvest(),
            Wait::Forever => (1, None),
            Wait::For(timeout) => (1, Some(timeout)),
        };
        match self.ring.enter(min_complete, timeout) {
            Err(error) if is_transient(&error) => Ok(()),
            result => result,
        }
    }

    /// Returns `min_complete` and the timeout for entering without waiting. The kernel runs at most
    /// [`DEFERRED_RUN`] deferred completions in one call, unless the caller waits for more. With a
    /// timeout of zero, waiting for more takes no time.
    fn harvest(&mut self) -> (u32, Option<Duration>) {
        if self.in_flight <= DEFERRED_RUN || self.ring.queued() > 0 || !self.ring.needs_enter() {
            return (0, None);
        }
        let all = u32::try_from(self.in_flight).unwrap_or(u32::MAX);
        (all.min(self.ring.cq_entries()), Some(Duration::ZERO))
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        let (watches, ended) = (&self.watches, &mut self.ended);
        let (mut reaped, mut on_sockets) = (0, 0);
        self.ring.reap(|cqe| {
            let user_data = cqe.user_data();
            if user_data >> ENGINE_SHIFT != Token::ENGINE.to_u64() >> ENGINE_SHIFT {
                let token = Token::from_u64(user_data);
                let on_socket = is_on_socket(token);
                reaped += 1;
                on_sockets += usize::from(on_socket);
                out.push(Completion {
                    token,
                    result: cqe.result(),
                });
            } else if let Some(watch) = known(watches, user_data) {
                if watch.token != Token::ENGINE {
                    out.push(Completion {
                        token: watch.token,
                        result: 0,
                    });
                }
                if cqe.result() == -libc::ECANCELED {
                    // The engine is being dropped.
                } else if cqe.result() < 0 {
                    tracing::error!("io_uring: cannot watch an eventfd: {cqe:?}");
                } else if !cqueue::more(cqe.flags()) {
                    ended.push(user_data);
                }
            }
        });
        self.in_flight -= reaped - on_sockets;
        self.on_sockets -= on_sockets;
        while let Some(user_data) = self.ended.pop() {
            self.rearm(user_data);
        }
    }

    #[inline]
    fn submit_ring(&mut self, wait: Wait, out: &mut Vec<Completion>) -> io::Result<()> {
        let before = out.len();
        loop {
            self.refill();
            let wait = if self.ring.has_completions() || out.len() > before {
                Wait::No
            } else {
                wait
            };
            if wait != Wait::No || self.ring.queued() > 0 || self.ring.needs_enter() {
                self.enter(if self.backlog.is_empty() {
                    wait
                } else {
                    Wait::No
                })?;
            }
            self.reap(out);
            if self.backlog.is_empty() || self.ring.queued() > 0 {
                return Ok(());
            }
        }
    }

    /// Returns the pool of threads, started on first use, or None if it cannot be started.
    #[cold]
    fn helpers(&mut self) -> Option<&mut Pool> {
        if self.helpers.is_none() {
            let pool = Pool::new().ok()?;
            self.watch(pool.event(), Token::ENGINE).ok()?;
            self.helpers = Some(pool);
        }
        self.helpers.as_mut()
    }

    #[cold]
    fn submit_with_helpers(&mut self, wait: Wait, out: &mut Vec<Completion>) -> io::Result<()> {
        let before = out.len();
        if let Some(helpers) = &mut self.helpers {
            helpers.submit();
            helpers.reap(out);
        }
        let may_sleep = |pool: &Pool| out.len() == before && pool.before_sleep();
        let wait = match &self.helpers {
            Some(pool) if wait != Wait::No && !may_sleep(pool) => Wait::No,
            _ => wait,
        };
        let submitted = self.submit_ring(wait, out);
        if let Some(helpers) = &mut self.helpers {
            helpers.after_sleep();
            helpers.reap(out);
        }
        submitted
    }

    fn rearm(&mut self, user_data: u64) {
        if let Some(watch) = known(&self.watches, user_data) {
            self.poll(watch);
        }
    }
}

/// Explains ENOMEM: some kernels (6.18, for example) count a ring's memory as locked memory, for
/// all of a user's processes together.
fn explained(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(libc::ENOMEM) => io::Error::new(
            io::ErrorKind::OutOfMemory,
            "no memory for the ring, which counts as locked memory; raise that limit (ulimit -l, \
             or LimitMEMLOCK= of the systemd unit)",
        ),
        _ => error,
    }
}

/// Returns the watch with this `user_data`, if it still exists.
#[inline]
fn known(watches: &[Option<Watch>], user_data: u64) -> Option<Watch> {
    let watch = (*watches.get(user_data as u32 as usize)?)?;
    (watch.user_data == user_data).then_some(watch)
}

/// Returns whether a completion belongs to a socket: tokens of sources and of channels as such are
/// used for nothing else. Completions of watches do not reach this function.
#[inline]
fn is_on_socket(token: Token) -> bool {
    match token.target() {
        Target::Source { .. } => true,
        Target::Request { id, .. } => id == RequestId::NOBODY,
        _ => false,
    }
}

impl Engine for IoUring {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    /// Makes room for `n` operations. While nothing is in flight, replaces the ring by one whose
    /// completion queue cannot overflow, up to the kernel's limit. Otherwise the kernel keeps
    /// completions that do not fit until there is room (IORING_FEAT_NODROP), which is slower but
    /// loses nothing.
    fn reserve(&mut self, n: usize) -> io::Result<()> {
        self.backlog.reserve(n.saturating_sub(self.backlog.len()));
        let wanted = n.saturating_add(self.watches.len());
        let wanted = u32::try_from(wanted)
            .unwrap_or(u32::MAX)
            .saturating_add(WATCH_ROOM)
            .min(MAX_CQ_ENTRIES);
        if wanted <= self.ring.cq_entries() || self.in_flight + self.on_sockets > 0 {
            return Ok(());
        }
        let Ok(ring) = Ring::new(wanted) else {
            // Without memory for a larger ring, the present ring stays; it works, too.
            return Ok(());
        };
        self.fixed_files = make_file_table(&ring, self.table, &self.files);
        self.backlog.clear();
        self.ring = ring;
        if let Some(pinned) = &mut self.pinned {
            pinned.move_to(&self.ring);
        }
        for place in 0..self.watches.len() {
            if let Some(watch) = self.watches[place] {
                self.poll(watch);
            }
        }
        Ok(())
    }

    fn add_file(&mut self, file: BorrowedFd<'_>) -> io::Result<FileId> {
        let id = self.files.add(file.as_raw_fd());
        if id.0 < self.fixed_files
            && let Err(error) = self.ring.update_file(id.0, file.as_raw_fd())
        {
            self.files.remove(id);
            return Err(error);
        }
        Ok(id)
    }

    fn remove_file(&mut self, file: FileId) {
        self.files.remove(file);
        if file.0 < self.fixed_files
            && let Err(error) = self.ring.update_file(file.0, -1)
        {
            tracing::warn!("io_uring: cannot unregister a file: {}", cause(error));
        }
    }

    fn pin_memory(&mut self) -> bool {
        // Several users of the engine may each call this function.
        self.pinned.get_or_insert_with(|| Pinned::new(&self.ring));
        true
    }

    unsafe fn add_memory(&mut self, memory: &[Buffer]) {
        if let Some(pinned) = &mut self.pinned {
            for buffer in memory {
                // SAFETY: as required of the caller.
                unsafe { pinned.add(&self.ring, *buffer) };
            }
        }
    }

    fn remove_memory(&mut self, memory: &[Buffer]) {
        if let Some(pinned) = &mut self.pinned {
            for buffer in memory {
                pinned.remove(&self.ring, *buffer);
            }
        }
    }

    #[inline]
    unsafe fn push(&mut self, io: Io, token: Token) {
        let fd = self.files.get(io.file);
        if matches!(io.kind, IoKind::Allocate { mode } if mode == DEVICE_DISCARD)
            && let Some(helpers) = self.helpers()
        {
            // SAFETY: as required of the caller.
            return unsafe { helpers.push(fd, io, token) };
        }
        // SAFETY: as required of the caller.
        let entry = unsafe { self.entry(&io) };
        self.in_flight += 1;
        self.queue(entry.user_data(token.to_u64()));
    }

    /// Does nothing: socket operations name the descriptor itself.
    fn add_socket(&mut self, _socket: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    unsafe fn push_socket(&mut self, io: SocketIo, token: Token) {
        // SAFETY: as required of the caller.
        let entry = unsafe { operation::socket_entry(&io) };
        self.on_sockets += 1;
        self.queue(entry.user_data(token.to_u64()));
    }

    fn cancel_socket(&mut self, token: Token) {
        let cancel = opcode::AsyncCancel::new(token.to_u64()).build();
        self.queue(cancel.user_data(Token::ENGINE.to_u64()));
    }

    fn watch(&mut self, fd: RawFd, token: Token) -> io::Result<()> {
        self.watch_serial = self.watch_serial % (SERIALS - 1) + 1;
        let free = self.watches.iter().position(Option::is_none);
        let place = free.unwrap_or(self.watches.len());
        let watch = Watch {
            fd,
            token,
            user_data: Token::ENGINE.to_u64() | self.watch_serial << SERIAL_SHIFT | place as u64,
        };
        match free {
            Some(free) => self.watches[free] = Some(watch),
            None => self.watches.push(Some(watch)),
        }
        self.ended.reserve(self.watches.len());
        self.poll(watch);
        Ok(())
    }

    fn unwatch(&mut self, fd: RawFd, token: Token) {
        let is_meant = |w: &mut Watch| w.fd == fd && w.token == token;
        let mut places = self.watches.iter_mut();
        if let Some(watch) = places.find_map(|place| place.take_if(is_meant)) {
            let remove = opcode::PollRemove::new(watch.user_data).build();
            self.queue(remove.user_data(Token::ENGINE.to_u64()));
        }
    }

    #[inline]
    fn submit(&mut self, wait: Wait, out: &mut Vec<Completion>) -> io::Result<()> {
        if self.helpers.is_some() {
            return self.submit_with_helpers(wait, out);
        }
        self.submit_ring(wait, out)
    }

    /// Returns whether completions are available or entries wait to be submitted.
    #[inline]
    fn ready(&mut self) -> bool {
        let helpers = |pool: &Pool| pool.ready() || pool.queued() > 0;
        self.ring.has_completions()
            || self.ring.needs_enter()
            || self.ring.queued() > 0
            || self.helpers.as_ref().is_some_and(helpers)
    }
}

/// Waits for all operations in flight: until they complete, the kernel writes to memory that others
/// own. Cancels socket operations first, which might never complete.
impl Drop for IoUring {
    fn drop(&mut self) {
        let mut scrap = Vec::new();
        if self.on_sockets > 0 {
            let all = CancelBuilder::any();
            let cancel = opcode::AsyncCancel2::new(all).build();
            self.queue(cancel.user_data(Token::ENGINE.to_u64()));
        }
        let mut is_reported = false;
        while self.in_flight + self.on_sockets > 0 {
            // After an error, too, the owners of the memory must not get it back.
            if let Err(error) = self.submit(Wait::Forever, &mut scrap) {
                if !std::mem::replace(&mut is_reported, true) {
                    tracing::error!(
                        "io_uring: cannot wait for I/O in flight, which is retried: {}",
                        cause(error)
                    );
                }
                std::thread::sleep(RETRY);
            }
            scrap.clear();
        }
    }
}

/// Registers the ring's table of files, with the present files. Returns the number of files it has
/// room for.
fn make_file_table(ring: &Ring, room: u32, files: &Files) -> u32 {
    let mut fds = files.all().to_vec();
    fds.resize(room as usize, -1);
    match ring.register_files(&fds) {
        true => room,
        false => 0,
    }
}

/// Size of the file table of one disk's ring: an image and its backing files.
const FILES: u32 = 64;

/// Size of the file table of a ring for many disks.
const MANY_FILES: u32 = 8192;

/// Number of completion queue entries of a ring for many disks. The ring is not replaced later, as
/// operations are always in flight.
const MANY_COMPLETIONS: u32 = 32768;

/// Maximum number of deferred completions that the kernel runs in one call
/// (IO_LOCAL_TW_DEFAULT_MAX).
const DEFERRED_RUN: usize = 20;

/// Interval between two attempts to wait for operations in flight after the kernel has refused.
const RETRY: Duration = Duration::from_millis(10);

/// Completion queue entries reserved for watches.
const WATCH_ROOM: u32 = 256;

/// Returns whether the error is harmless: a signal arrived, the time is over, or the kernel is
/// short of memory or of room for completions and accepts the rest next time.
fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ETIME)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::ring::Setup;
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::AsFd;

    /// Makes engines that behave like those of older kernels, as far as this kernel allows.
    fn engines() -> Vec<IoUring> {
        let mut engines: Vec<_> = [Setup::Deferred, Setup::Cooperative, Setup::Plain]
            .into_iter()
            .map(|setup| IoUring::on(Ring::with(setup, 0).expect("a ring"), Users::One))
            .collect();
        let mut without_table = IoUring::new(Users::One).expect("a ring");
        without_table.fixed_files = 0;
        engines.push(without_table);
        engines.push(IoUring::new(Users::Many).expect("a ring"));
        engines
    }

    #[test]
    fn older_setups_work_alike() {
        for mut engine in engines() {
            let file = tempfile::tempfile().expect("a file");
            file.set_len(4096).expect("sized");
            let id = engine.add_file(file.as_fd()).expect("added");
            let event = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
            engine
                .watch(event.as_raw_fd(), Token::MAILBOX)
                .expect("watched");
            let mut bytes = [1u8; 512];
            let iov = libc::iovec {
                iov_base: bytes.as_mut_ptr().cast(),
                iov_len: bytes.len(),
            };
            let io = Io {
                kind: IoKind::Read,
                file: id,
                offset: 0,
                len: 512,
                iov: &iov,
                iov_len: 1,
            };
            for n in 0..100 {
                let token = Token::request(RequestId(n), 0);
                // SAFETY: the test waits for the completion.
                unsafe { engine.push(io, token) };
                rustix::io::write(&event, &1u64.to_ne_bytes()).expect("signalled");
                let mut out = Vec::new();
                while out.len() < 2 {
                    engine.submit(Wait::Forever, &mut out).expect("submitted");
                }
                let read = Completion { token, result: 512 };
                let kick = Completion {
                    token: Token::MAILBOX,
                    result: 0,
                };
                assert!(out.contains(&read) && out.contains(&kick), "{out:?}");
            }
        }
    }
}
