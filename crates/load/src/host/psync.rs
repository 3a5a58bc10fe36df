//! A port with one system call per request.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use super::buffers::Buffers;
use super::page_cache;
use super::status::{describe_status, fallocate_mode, status};
use crate::error::Result;
use crate::memory::Buffer;
use crate::options::Load;
use crate::port::{Counters, Done, Op, Port};

/// Executes one request at a time with pread, pwrite, fdatasync and fallocate.
pub struct Psync {
    file: Arc<File>,
    /// The file's current position. If set, requests use `read` and `write`, which continue from
    /// this position. Otherwise they use `pread` and `pwrite`.
    position: Option<u64>,
    buffers: Buffers,
    len: u32,
    queued: Option<(u16, Op, u64)>,
    done: Option<Done>,
    calls: u64,
}

impl Psync {
    pub fn new(file: Arc<File>, load: &Load) -> Result<Psync> {
        Ok(Psync {
            file,
            position: None,
            buffers: Buffers::new(load)?,
            len: load.bs,
            queued: None,
            done: None,
            calls: 0,
        })
    }

    /// Uses `read` and `write`, which take no offset.
    pub fn at_position(self) -> Psync {
        Psync {
            position: Some(u64::MAX),
            ..self
        }
    }

    fn call(&mut self, slot: u16, op: Op, offset: u64) -> i32 {
        if let Err(e) = self.go_to(offset) {
            return -e.raw_os_error().unwrap_or(libc::EIO);
        }
        let fd: RawFd = self.file.as_raw_fd();
        let (data, len) = (self.buffers.get(slot).as_ptr(), self.len as usize);
        let at = offset as i64;
        // SAFETY: the buffer has `len` bytes of a live mapping; the file is
        // open; the other calls touch no memory.
        let result = unsafe {
            match op {
                Op::Read if self.position.is_some() => libc::read(fd, data.cast(), len),
                Op::Write if self.position.is_some() => libc::write(fd, data.cast(), len),
                Op::Read => libc::pread64(fd, data.cast(), len, at),
                Op::Write => libc::pwrite64(fd, data.cast(), len, at),
                Op::Flush => libc::fdatasync(fd) as isize,
                Op::Discard | Op::WriteZeroes => {
                    libc::fallocate64(fd, fallocate_mode(op), at, len as i64) as isize
                }
            }
        };
        if let Some(position) = &mut self.position {
            *position = offset + result.max(0) as u64;
        }
        match result {
            -1 => -io::Error::last_os_error()
                .raw_os_error()
                .unwrap_or(libc::EIO),
            n => n as i32,
        }
    }

    /// Moves the file's position to `offset` if it differs: at the first request, after the
    /// end of the range, or after a short request.
    #[inline]
    fn go_to(&mut self, offset: u64) -> io::Result<()> {
        match self.position {
            Some(position) if position != offset => {
                let mut file = &*self.file;
                file.seek(SeekFrom::Start(offset)).map(drop)
            }
            _ => Ok(()),
        }
    }
}

impl Port for Psync {
    fn buffer(&self, slot: u16) -> Buffer {
        self.buffers.get(slot)
    }

    fn queue(&mut self, slot: u16, op: Op, offset: u64) {
        self.queued = Some((slot, op, offset));
    }

    fn submit(&mut self) -> Result<()> {
        if let Some((slot, op, offset)) = self.queued.take() {
            let result = self.call(slot, op, offset);
            self.calls += 1;
            self.done = Some(Done {
                slot,
                status: status(op, self.len, result),
            });
        }
        Ok(())
    }

    fn reap(&mut self, done: &mut Vec<Done>) -> Result<()> {
        done.extend(self.done.take());
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        Ok(())
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

    fn drop_cache(&mut self, offset: u64, len: u64) -> Result<()> {
        page_cache::drop_range(&self.file, offset, len)
    }
}
