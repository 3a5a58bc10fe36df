//! Operations in flight by Linux AIO: the system calls themselves (libaio wraps no more than these).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::engine::{Done, Flight};
use super::target::Memory;

const IOCB_CMD_PREAD: u16 = 0;
const IOCB_CMD_PWRITE: u16 = 1;

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

pub(super) struct Aio<'a> {
    /// The kernel's `aio_context_t`.
    context: u64,
    file: BorrowedFd<'a>,
    memory: &'a Memory,
    opcode: u16,
    /// By slot.
    iocbs: Box<[Iocb]>,
    /// Those of `iocbs` that are to be submitted.
    queued: Vec<*mut Iocb>,
    events: Box<[IoEvent]>,
    /// Finished ones that nobody has reaped yet.
    ready: std::ops::Range<usize>,
    in_flight: usize,
}

impl<'a> Aio<'a> {
    pub fn new(
        file: BorrowedFd<'a>,
        memory: &'a Memory,
        write: bool,
        depth: u32,
    ) -> io::Result<Aio<'a>> {
        let mut context = 0u64;
        // SAFETY: io_setup writes one word to `context`.
        check(unsafe { libc::syscall(libc::SYS_io_setup, depth, &raw mut context) })?;
        let depth = depth as usize;
        Ok(Aio {
            context,
            file,
            memory,
            opcode: if write {
                IOCB_CMD_PWRITE
            } else {
                IOCB_CMD_PREAD
            },
            iocbs: vec![Iocb::default(); depth].into(),
            queued: Vec::with_capacity(depth),
            events: vec![IoEvent::default(); depth].into(),
            ready: 0..0,
            in_flight: 0,
        })
    }

    fn hand_over(&mut self) -> io::Result<()> {
        while !self.queued.is_empty() {
            let count = self.queued.len();
            // SAFETY: each pointer is to an iocb in `self.iocbs`, which is never moved or grown;
            // the kernel copies them. The memory that they name stays until `self` is dropped,
            // which waits for everything in flight.
            let taken = check(unsafe {
                libc::syscall(
                    libc::SYS_io_submit,
                    self.context,
                    count,
                    self.queued.as_mut_ptr(),
                )
            })?;
            self.in_flight += taken;
            self.queued.drain(..taken);
        }
        Ok(())
    }

    fn wait(&mut self, least: usize) -> io::Result<()> {
        loop {
            // SAFETY: the kernel writes at most `events.len()` events; no time-out is given.
            let got = check(unsafe {
                libc::syscall(
                    libc::SYS_io_getevents,
                    self.context,
                    least,
                    self.events.len(),
                    self.events.as_mut_ptr(),
                    std::ptr::null_mut::<libc::timespec>(),
                )
            });
            match got {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
                Ok(count) => {
                    self.in_flight -= count;
                    self.ready = 0..count;
                    return Ok(());
                }
            }
        }
    }
}

impl Flight for Aio<'_> {
    fn name(&self) -> &'static str {
        "io_submit"
    }

    fn queue(&mut self, slot: u32, offset: u64) {
        let (memory, length) = self.memory.slot(slot);
        let iocb = &mut self.iocbs[slot as usize];
        *iocb = Iocb {
            data: slot.into(),
            opcode: self.opcode,
            fd: self.file.as_raw_fd().cast_unsigned(),
            buffer: memory.expose_provenance() as u64,
            bytes: length as u64,
            offset: offset.cast_signed(),
            ..Iocb::default()
        };
        self.queued.push(iocb);
    }

    fn submit(&mut self, wait: u32) -> io::Result<()> {
        self.hand_over()?;
        if wait > 0 && self.ready.is_empty() {
            self.wait(wait as usize)?;
        }
        Ok(())
    }

    fn reap(&mut self) -> Option<Done> {
        let event = self.events[self.ready.next()?];
        Some(Done {
            slot: event.data as u32,
            result: event.result,
        })
    }
}

impl Drop for Aio<'_> {
    fn drop(&mut self) {
        // SAFETY: io_destroy takes the context that io_setup gave; it waits for what is in flight.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

fn check(result: libc::c_long) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}
