//! A port for a file through io_uring. A single system call submits a batch and waits for
//! completions.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use io_uring::squeue::{Entry, Flags};
use io_uring::{IoUring, opcode, types};

use super::buffers::Buffers;
use super::page_cache;
use super::status::{describe_status, fallocate_mode, status};
use crate::error::{Error, Result};
use crate::memory::Buffer;
use crate::options::{File as FileOptions, Load, Wait};
use crate::port::{Counters, Done, Op, Port};

const ENTER_GETEVENTS: u32 = 1;

/// The io_uring of a worker.
pub struct Uring {
    /// Declared first, so that it is dropped before the memory that it refers to.
    ring: IoUring,
    file: Arc<File>,
    buffers: Buffers,
    len: u32,
    fixed_buffers: bool,
    fixed_file: bool,
    wait: Wait,
    /// Operation of each slot in flight, indexed by slot.
    ops: Vec<Op>,
    enters: u64,
}

impl Uring {
    /// Creates the ring. Must be called on the thread that will use it, because the ring has a
    /// single issuer.
    pub fn new(file: Arc<File>, target: &FileOptions, load: &Load) -> Result<Uring> {
        let entries = u32::from(load.iodepth).next_power_of_two();
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(entries)
            .or_else(|_| IoUring::new(entries))
            .map_err(|e| Error::os("creating an io_uring", e))?;
        let uring = Uring {
            ring,
            buffers: Buffers::new(load)?,
            file,
            len: load.bs,
            fixed_buffers: target.fixedbufs,
            fixed_file: target.registerfiles,
            wait: target.wait,
            ops: vec![Op::Read; usize::from(load.iodepth)],
            enters: 0,
        };
        uring.register(load)?;
        Ok(uring)
    }

    fn register(&self, load: &Load) -> Result<()> {
        if self.fixed_file {
            self.ring
                .submitter()
                .register_files(&[self.file.as_raw_fd()])
                .map_err(|e| Error::os("registering the file", e))?;
        }
        if self.fixed_buffers {
            let iovec = |slot| libc::iovec {
                iov_base: self.buffers.get(slot).as_ptr().cast(),
                iov_len: self.len as usize,
            };
            let all: Vec<libc::iovec> = (0..load.iodepth).map(iovec).collect();
            // SAFETY: `self` owns the buffers, and drops the ring first.
            unsafe { self.ring.submitter().register_buffers(&all) }
                .map_err(|e| Error::os("registering the buffers", e))?;
        }
        Ok(())
    }

    fn entry(&self, slot: u16, op: Op, at: u64) -> Entry {
        // With a registered file, this number is an index into the file table.
        let (fd, flags) = match self.fixed_file {
            true => (types::Fd(0), Flags::FIXED_FILE),
            false => (types::Fd(self.file.as_raw_fd()), Flags::empty()),
        };
        let (data, len) = (self.buffers.get(slot).as_ptr(), self.len);
        let entry = match (op, self.fixed_buffers) {
            (Op::Read, false) => opcode::Read::new(fd, data, len).offset(at).build(),
            (Op::Write, false) => opcode::Write::new(fd, data, len).offset(at).build(),
            (Op::Read, true) => opcode::ReadFixed::new(fd, data, len, slot)
                .offset(at)
                .build(),
            (Op::Write, true) => opcode::WriteFixed::new(fd, data, len, slot)
                .offset(at)
                .build(),
            (Op::Flush, _) => opcode::Fsync::new(fd)
                .flags(types::FsyncFlags::DATASYNC)
                .build(),
            (Op::Discard | Op::WriteZeroes, _) => opcode::Fallocate::new(fd, u64::from(len))
                .offset(at)
                .mode(fallocate_mode(op))
                .build(),
        };
        entry.flags(flags).user_data(u64::from(slot))
    }

    fn enter(&mut self) -> io::Result<()> {
        self.enters += 1;
        match self.wait {
            Wait::Interrupt => self.ring.submit_and_wait(1).map(drop),
            Wait::Poll => {
                let queued = self.ring.submission().len() as u32;
                // SAFETY: no argument contains a pointer to memory.
                unsafe {
                    let none: Option<&libc::sigset_t> = None;
                    self.ring
                        .submitter()
                        .enter(queued, 0, ENTER_GETEVENTS, none)
                        .map(drop)
                }
            }
        }
    }
}

impl Port for Uring {
    fn buffer(&self, slot: u16) -> Buffer {
        self.buffers.get(slot)
    }

    fn queue(&mut self, slot: u16, op: Op, offset: u64) {
        self.ops[usize::from(slot)] = op;
        let entry = self.entry(slot, op, offset);
        // SAFETY: `self` owns the buffer and the file while the ring exists, and the worker does
        // not access the buffer until completion.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.expect("the ring has an entry for every slot");
    }

    fn submit(&mut self) -> Result<()> {
        // `wait` also submits, so that a batch costs one system call.
        Ok(())
    }

    fn submit_now(&mut self) -> Result<()> {
        let submitted = self.ring.submit().map(drop);
        submitted.map_err(|e| Error::os("io_uring_enter", e))
    }

    fn reap(&mut self, done: &mut Vec<Done>) -> Result<()> {
        for entry in self.ring.completion() {
            let slot = entry.user_data() as u16;
            let op = self.ops[usize::from(slot)];
            done.push(Done {
                slot,
                status: status(op, self.len, entry.result()),
            });
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        match self.enter() {
            Ok(()) => Ok(()),
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EBUSY)) => Ok(()),
            Err(e) => Err(Error::os("io_uring_enter", e)),
        }
    }

    fn counters(&mut self) -> Counters {
        Counters {
            kicks: self.enters,
            calls: 0,
        }
    }

    fn describe_status(&self, status: i32) -> String {
        describe_status(status)
    }

    fn drop_cache(&mut self, offset: u64, len: u64) -> Result<()> {
        page_cache::drop_range(&self.file, offset, len)
    }
}
