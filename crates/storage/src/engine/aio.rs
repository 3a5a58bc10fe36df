//! Thin wrapper of Linux AIO: a context, its system calls, and the ring of completions that the
//! kernel shares with the process.

use libc::iovec;
use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering};

/// linux/aio_abi.h
const IOCB_CMD_PREAD: u16 = 0;
const IOCB_CMD_PWRITE: u16 = 1;
const IOCB_CMD_PREADV: u16 = 7;
const IOCB_CMD_PWRITEV: u16 = 8;
const IOCB_FLAG_RESFD: u32 = 1;

/// `struct aio_ring` in the kernel's fs/aio.c, to which an io_context_t points. User space (libaio,
/// QEMU) relies on its layout, which its magic number identifies.
#[repr(C)]
struct Header {
    id: u32,
    /// Number of events that the ring holds.
    nr: u32,
    /// Index of the next event to read; written by this process.
    head: AtomicU32,
    /// Index of the next event to write; written by the kernel.
    tail: AtomicU32,
    magic: u32,
    compat_features: u32,
    incompat_features: u32,
    header_length: u32,
}

const AIO_RING_MAGIC: u32 = 0xa10a_10a1;

/// `struct iocb` of a little-endian machine. (musl's headers do not define it.)
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Iocb {
    pub(crate) aio_data: u64,
    aio_key: u32,
    aio_rw_flags: i32,
    aio_lio_opcode: u16,
    aio_reqprio: i16,
    aio_fildes: u32,
    aio_buf: u64,
    aio_nbytes: u64,
    aio_offset: i64,
    aio_reserved2: u64,
    aio_flags: u32,
    aio_resfd: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) data: u64,
    pub(crate) obj: u64,
    pub(crate) res: i64,
    pub(crate) res2: i64,
}

/// An AIO context.
pub(crate) struct Context {
    /// The io_context_t: the address of the ring.
    id: usize,
    capacity: usize,
}

impl Context {
    /// Makes a context for `capacity` operations, or for fewer if the system's limit
    /// (fs.aio-max-nr) does not allow that number.
    pub(crate) fn new(capacity: usize) -> io::Result<Context> {
        let mut capacity = capacity;
        loop {
            let mut id = 0usize;
            // SAFETY: io_setup(2) writes the new context's id.
            let result = unsafe { libc::syscall(libc::SYS_io_setup, capacity, &mut id) };
            if result == 0 {
                let context = Context { id, capacity };
                context.check()?;
                return Ok(context);
            }
            let error = io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::EAGAIN) || capacity <= 16 {
                return Err(error);
            }
            capacity /= 2;
        }
    }

    fn check(&self) -> io::Result<()> {
        let header = self.header();
        let known = header.magic == AIO_RING_MAGIC
            && header.incompat_features == 0
            && header.header_length as usize == size_of::<Header>();
        if !known {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        }
        Ok(())
    }

    /// Maximum number of operations in flight.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    fn header(&self) -> &Header {
        // SAFETY: the kernel maps the ring at the context's id while the context exists; fields
        // that change are atomics.
        unsafe { &*(self.id as *const Header) }
    }

    /// Starts operations, and returns the number that the kernel has accepted. An error concerns
    /// the first operation, or is EAGAIN.
    ///
    /// # Safety
    /// The iocbs are valid. The iovecs of the iocbs stay valid until this function returns. The
    /// memory that the iovecs name stays valid until the operations complete.
    pub(crate) unsafe fn submit(&self, iocbs: &mut [*mut Iocb]) -> io::Result<usize> {
        // SAFETY: as required of the caller.
        let taken = unsafe {
            libc::syscall(
                libc::SYS_io_submit,
                self.id,
                iocbs.len(),
                iocbs.as_mut_ptr(),
            )
        };
        usize::try_from(taken).map_err(|_| io::Error::last_os_error())
    }

    /// Returns whether an operation has completed; makes no system call.
    #[inline]
    pub(crate) fn ready(&self) -> bool {
        let header = self.header();
        header.head.load(Ordering::Relaxed) != header.tail.load(Ordering::Acquire)
    }

    /// Takes all completions that are available; makes no system call.
    #[inline]
    pub(crate) fn reap(&self, mut each: impl FnMut(Event)) {
        let header = self.header();
        let mut head = header.head.load(Ordering::Relaxed);
        let tail = header.tail.load(Ordering::Acquire);
        let events = (self.id + size_of::<Header>()) as *const Event;
        while head != tail {
            // SAFETY: `head` is less than `nr`; the kernel wrote this event before it moved the
            // tail past it.
            each(unsafe { *events.add(head as usize) });
            head = (head + 1) % header.nr;
        }
        header.head.store(head, Ordering::Release);
    }
}

/// Waits for the operations in flight.
impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context is this value's own; nothing uses it any more.
        let result = unsafe { libc::syscall(libc::SYS_io_destroy, self.id) };
        debug_assert_eq!(result, 0);
    }
}

/// Parameters of one read or write.
#[derive(Clone, Copy)]
pub(crate) struct Operation {
    pub(crate) fd: RawFd,
    pub(crate) write: bool,
    pub(crate) rw_flags: i32,
    pub(crate) iov: *const iovec,
    pub(crate) iov_len: usize,
    pub(crate) offset: u64,
    pub(crate) data: u64,
    /// Eventfd that the completion signals.
    pub(crate) event: RawFd,
}

impl Operation {
    /// Makes the iocb. A single segment uses an opcode that imports no iovecs.
    ///
    /// # Safety
    /// The iovecs are valid.
    pub(crate) unsafe fn iocb(self) -> Iocb {
        // SAFETY: zero is a valid value of a structure of integers.
        let mut iocb: Iocb = unsafe { std::mem::zeroed() };
        let vectored = self.iov_len != 1;
        iocb.aio_lio_opcode = match (self.write, vectored) {
            (false, false) => IOCB_CMD_PREAD,
            (true, false) => IOCB_CMD_PWRITE,
            (false, true) => IOCB_CMD_PREADV,
            (true, true) => IOCB_CMD_PWRITEV,
        };
        if vectored {
            iocb.aio_buf = self.iov as u64;
            iocb.aio_nbytes = self.iov_len as u64;
        } else {
            // SAFETY: there is one iovec.
            let iov = unsafe { *self.iov };
            iocb.aio_buf = iov.iov_base as u64;
            iocb.aio_nbytes = iov.iov_len as u64;
        }
        iocb.aio_data = self.data;
        iocb.aio_rw_flags = self.rw_flags;
        iocb.aio_fildes = self.fd as u32;
        iocb.aio_offset = self.offset as i64;
        iocb.aio_flags = IOCB_FLAG_RESFD;
        iocb.aio_resfd = self.event as u32;
        iocb
    }
}
