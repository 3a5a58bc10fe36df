//! A port for a file through Linux AIO. The port uses the system calls directly, because libaio
//! only wraps them.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use super::buffers::Buffers;
use super::status::{describe_status, status};
use crate::error::{Error, Result};
use crate::memory::Buffer;
use crate::options::Load;
use crate::port::{Counters, Done, Op, Port};

const IOCB_CMD_PREAD: u16 = 0;
const IOCB_CMD_PWRITE: u16 = 1;
const IOCB_CMD_FDSYNC: u16 = 3;

/// `struct iocb` of linux/aio_abi.h, on little-endian machines.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    eventfd: u32,
}

/// `struct io_event` of linux/aio_abi.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct IoEvent {
    data: u64,
    object: u64,
    result: i64,
    result2: i64,
}

/// The AIO context of a worker.
pub struct Aio {
    /// The kernel's `aio_context_t`. `Drop` destroys it before the memory that it refers to is
    /// freed.
    context: u64,
    file: Arc<File>,
    buffers: Buffers,
    len: u32,
    /// I/O control blocks, indexed by slot.
    iocbs: Box<[Iocb]>,
    /// Operation of each slot in flight, indexed by slot.
    ops: Vec<Op>,
    /// Pointers to those of `iocbs` that have not been submitted yet.
    queued: Vec<*mut Iocb>,
    events: Box<[IoEvent]>,
    /// Number of `events` that have not been reaped yet.
    ready: usize,
    calls: u64,
}

// SAFETY: `queued` points into `iocbs`, which is a heap allocation owned by this struct. No other
// field has thread affinity.
unsafe impl Send for Aio {}

impl Aio {
    /// Creates a context for as many requests as the load has in flight.
    pub fn new(file: Arc<File>, load: &Load) -> Result<Aio> {
        let mut context = 0u64;
        let depth = usize::from(load.iodepth);
        let buffers = Buffers::new(load)?;
        // SAFETY: io_setup writes one word to `context`.
        check(unsafe { libc::syscall(libc::SYS_io_setup, depth, &raw mut context) }).map_err(
            |e| {
                Error::os(
                    "the kernel refuses Linux AIO (see /proc/sys/fs/aio-max-nr)",
                    e,
                )
            },
        )?;
        Ok(Aio {
            context,
            file,
            buffers,
            len: load.bs,
            iocbs: vec![Iocb::default(); depth].into(),
            ops: vec![Op::Read; depth],
            queued: Vec::with_capacity(depth),
            events: vec![IoEvent::default(); depth].into(),
            ready: 0,
            calls: 0,
        })
    }

    fn hand_over(&mut self) -> io::Result<()> {
        while !self.queued.is_empty() {
            let count = self.queued.len();
            self.calls += 1;
            // SAFETY: each pointer refers to an iocb in `self.iocbs`, which is never moved or
            // grown. The kernel copies the iocbs. The memory that they name stays valid until
            // `self` is dropped, which waits for all requests in flight.
            let taken = check(unsafe {
                libc::syscall(
                    libc::SYS_io_submit,
                    self.context,
                    count,
                    self.queued.as_mut_ptr(),
                )
            })?;
            self.queued.drain(..taken);
        }
        Ok(())
    }

    fn get_events(&mut self) -> io::Result<usize> {
        self.calls += 1;
        // SAFETY: the kernel writes at most `events.len()` events, and the timeout is null.
        check(unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                1usize,
                self.events.len(),
                self.events.as_mut_ptr(),
                std::ptr::null_mut::<libc::timespec>(),
            )
        })
    }
}

impl Port for Aio {
    fn buffer(&self, slot: u16) -> Buffer {
        self.buffers.get(slot)
    }

    /// Queues a request.
    ///
    /// # Panics
    /// If the operation is a discard or write-zeroes, which Linux AIO does not support.
    fn queue(&mut self, slot: u16, op: Op, offset: u64) {
        self.ops[usize::from(slot)] = op;
        let iocb = &mut self.iocbs[usize::from(slot)];
        *iocb = Iocb {
            data: slot.into(),
            fd: self.file.as_raw_fd().cast_unsigned(),
            // A flush has no data, so its buffer and length must be zero.
            opcode: IOCB_CMD_FDSYNC,
            ..Iocb::default()
        };
        if op != Op::Flush {
            iocb.opcode = match op {
                Op::Read => IOCB_CMD_PREAD,
                Op::Write => IOCB_CMD_PWRITE,
                _ => unreachable!("refused with the options"),
            };
            iocb.buffer = self.buffers.get(slot).as_ptr().expose_provenance() as u64;
            iocb.bytes = self.len.into();
            iocb.offset = offset.cast_signed();
        }
        self.queued.push(iocb);
    }

    fn submit(&mut self) -> Result<()> {
        self.hand_over().map_err(|e| Error::os("io_submit", e))
    }

    fn reap(&mut self, done: &mut Vec<Done>) -> Result<()> {
        for event in &self.events[..std::mem::take(&mut self.ready)] {
            let slot = event.data as u16;
            let op = self.ops[usize::from(slot)];
            done.push(Done {
                slot,
                // The cast is lossless: a request is at most 64 MiB.
                status: status(op, self.len, event.result as i32),
            });
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        match self.get_events() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(e) => Err(Error::os("io_getevents", e)),
            Ok(count) => {
                self.ready = count;
                Ok(())
            }
        }
    }

    fn counters(&mut self) -> Counters {
        Counters {
            kicks: self.calls,
            calls: 0,
        }
    }

    fn describe_status(&self, status: i32) -> String {
        describe_status(status)
    }
}

impl Drop for Aio {
    fn drop(&mut self) {
        // SAFETY: io_destroy gets the context from io_setup, and waits for all requests in flight.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

fn check(result: libc::c_long) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}
