//! The engine on Linux AIO.

use crate::engine::aio::{Context, Iocb, Operation};
use crate::engine::epoll::Epoll;
use crate::engine::files::Files;
use crate::engine::pool::Pool;
use crate::engine::sockets::Sockets;
use crate::engine::threads::BUSY_LOOK;
use fathom_core::{Completion, Engine, EventNotifier, FileId, Io, IoKind, SocketIo, Token, Wait};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

/// Number of operations the context can hold at the start.
const CAPACITY: usize = 1024;

/// Maximum number of iovecs in one operation (UIO_MAXIOV).
const MAX_IOVECS: u32 = 1024;

/// Delay before io_submit(2) is repeated when the kernel accepts nothing although nothing is in
/// flight.
const STARVED: Duration = Duration::from_millis(1);

/// Linux AIO: io_submit(2) for reads and writes, which must use direct I/O because others would
/// block in it. Operations that AIO does not support go to a pool of threads.
pub struct Native {
    context: Context,
    /// Eventfd that each completion signals.
    event: EventNotifier,
    epoll: Epoll,
    pool: Pool,
    files: Files,
    sockets: Sockets,
    /// Operations that were pushed and not yet accepted by the kernel.
    queued: Vec<Iocb>,
    pointers: Vec<*mut Iocb>,
    /// Number of operations that the kernel has accepted and not completed.
    in_flight: usize,
    /// Whether the kernel accepts no more until an operation completes.
    full: bool,
    since_look: u32,
}

impl Native {
    /// Creates the engine.
    ///
    /// # Errors
    /// If the AIO context or a file descriptor cannot be created.
    pub fn new() -> io::Result<Native> {
        let (epoll, pool) = (Epoll::new()?, Pool::new()?);
        let event = EventNotifier::new()?;
        epoll.watch(pool.event(), Token::ENGINE)?;
        epoll.watch(event.as_raw_fd(), Token::ENGINE)?;
        Ok(Native {
            context: Context::new(CAPACITY)?,
            event,
            epoll,
            pool,
            files: Files::default(),
            sockets: Sockets::default(),
            queued: Vec::new(),
            pointers: Vec::new(),
            in_flight: 0,
            full: false,
            since_look: 0,
        })
    }

    /// Submits queued operations to the kernel, as many as it accepts.
    fn start(&mut self, out: &mut Vec<Completion>) {
        self.full = false;
        let mut taken = 0;
        while taken < self.queued.len() && !self.full {
            let room = self.context.capacity() - self.in_flight;
            let batch = room.min(self.queued.len() - taken);
            if batch == 0 {
                self.full = true;
                break;
            }
            self.pointers.clear();
            let iocbs = self.queued[taken..taken + batch].iter_mut();
            self.pointers.extend(iocbs.map(std::ptr::from_mut));
            // SAFETY: the memory that the iocbs name is valid as required of the callers of `push`.
            match unsafe { self.context.submit(&mut self.pointers) } {
                Ok(n) => {
                    self.in_flight += n;
                    taken += n;
                    self.full = n == 0;
                }
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN | libc::EINTR) => self.full = true,
                    errno => {
                        let token = Token::from_u64(self.queued[taken].aio_data);
                        let result = -errno.unwrap_or(libc::EIO);
                        out.push(Completion { token, result });
                        taken += 1;
                    }
                },
            }
        }
        self.queued.drain(..taken);
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        let before = out.len();
        self.context.reap(|event| {
            out.push(Completion {
                token: Token::from_u64(event.data),
                result: event.res as i32,
            });
        });
        let reaped = out.len() - before;
        self.in_flight -= reaped;
        self.full &= reaped == 0;
        self.sockets.run(out);
        self.pool.reap(out);
    }

    /// Sleeps until `out` has a completion, a signal arrives or the time is over.
    fn sleep(&mut self, wait: Wait, out: &mut Vec<Completion>) -> io::Result<()> {
        let before = out.len();
        let is_starved = self.full && self.in_flight == 0;
        let wait = match wait {
            Wait::Forever if is_starved => Wait::For(STARVED),
            Wait::For(time) if is_starved => Wait::For(time.min(STARVED)),
            other => other,
        };
        // An event may belong to completions that were reaped earlier.
        while out.len() == before && self.pool.before_sleep() {
            let woken = self.epoll.wait(wait, &mut self.sockets, out);
            self.pool.after_sleep();
            self.reap(out);
            if !woken? {
                break;
            }
        }
        self.reap(out);
        Ok(())
    }
}

impl Engine for Native {
    fn name(&self) -> &'static str {
        "native"
    }

    /// Makes room for `n` operations. Operations that exceed the context's capacity wait in
    /// `queued`.
    fn reserve(&mut self, n: usize) -> io::Result<()> {
        self.pool.reserve(n);
        self.queued.reserve(n.saturating_sub(self.queued.len()));
        self.pointers.reserve(n.saturating_sub(self.pointers.len()));
        if n > self.context.capacity() && self.in_flight == 0 {
            // fs.aio-max-nr limits the capacity; the smaller context works, too.
            if let Ok(context) = Context::new(n) {
                self.context = context;
            }
        }
        Ok(())
    }

    fn add_file(&mut self, file: BorrowedFd<'_>) -> io::Result<FileId> {
        Ok(self.files.add(file.as_raw_fd()))
    }

    fn remove_file(&mut self, file: FileId) {
        self.files.remove(file);
    }

    unsafe fn push(&mut self, io: Io, token: Token) {
        let fd = self.files.get(io.file);
        let (write, dsync) = match io.kind {
            IoKind::Read => (false, false),
            IoKind::Write { dsync } => (true, dsync),
            // SAFETY: as required of the caller.
            _ => return unsafe { self.pool.push(fd, io, token) },
        };
        let operation = Operation {
            fd,
            write,
            rw_flags: if dsync { libc::RWF_DSYNC } else { 0 },
            iov: io.iov,
            iov_len: io.iov_len.min(MAX_IOVECS) as usize,
            offset: io.offset,
            data: token.to_u64(),
            event: self.event.as_raw_fd(),
        };
        // SAFETY: as required of the caller.
        self.queued.push(unsafe { operation.iocb() });
    }

    fn add_socket(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.sockets.add(&self.epoll, socket)
    }

    fn remove_socket(&mut self, socket: BorrowedFd<'_>) {
        self.epoll.unwatch(socket.as_raw_fd());
    }

    unsafe fn push_socket(&mut self, io: SocketIo, token: Token) {
        // SAFETY: as required of the caller.
        unsafe { self.sockets.push(io, token) };
    }

    fn cancel_socket(&mut self, token: Token) {
        self.sockets.cancel(token);
    }

    fn watch(&mut self, fd: RawFd, token: Token) -> io::Result<()> {
        self.epoll.watch(fd, token)
    }

    fn unwatch(&mut self, fd: RawFd, _token: Token) {
        self.epoll.unwatch(fd);
    }

    fn submit(&mut self, wait: Wait, out: &mut Vec<Completion>) -> io::Result<()> {
        let before = out.len();
        self.start(out);
        self.pool.submit();
        self.reap(out);
        if wait != Wait::No && out.len() == before {
            return self.sleep(wait, out);
        }
        self.since_look += 1;
        if self.since_look >= BUSY_LOOK {
            self.since_look = 0;
            self.epoll.wait(Wait::No, &mut self.sockets, out)?;
        }
        Ok(())
    }

    fn ready(&mut self) -> bool {
        if self.sockets.have_events(&self.epoll) {
            self.since_look = BUSY_LOOK;
            return true;
        }
        let queued = !self.queued.is_empty() && !self.full;
        let pool = self.pool.ready() || self.pool.queued() > 0;
        queued || pool || self.context.ready() || self.sockets.are_due()
    }
}
