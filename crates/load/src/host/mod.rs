//! Load on a file or block device of this host.

pub mod aio;
mod open;
pub mod uring;

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use crate::control::Control;
use crate::cpu::ProcessCpu;
use crate::error::{Error, Result};
use crate::memory::{Buffer, Mapping, PAGE};
use crate::options::{Engine, File as FileOptions, Load, Options, SECTOR};
use crate::port::{Counters, Done, Op, Port};
use crate::report::{Outcome, Report};
use crate::run::{self, Geometry, Progress, Supervisor};
use crate::workload::Rng;
use aio::Aio;
use uring::Uring;

/// Added to the bytes done of a request that was cut short, and negated.
const SHORT: i32 = 1;

/// Runs the load.
pub fn run(
    options: &Options,
    target: &FileOptions,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Report> {
    let load = &options.load;
    let file = Arc::new(open::open(target, load)?);
    let mut end = &*file;
    let size = end.seek(SeekFrom::End(0)).map_err(|e| {
        Error::os(
            format!("asking for the size of {}", target.path.display()),
            e,
        )
    })?;
    let geometry = Geometry::new(load, size, SECTOR)?;
    open::refuse_data(&file, target, load, geometry)?;
    let outcome = match target.engine {
        Engine::IoUring => {
            let make = move || Uring::new(file, target, load);
            run_each(load, geometry, make, progress)
        }
        Engine::Aio => run_each(load, geometry, move || Aio::new(file, load), progress),
        Engine::Psync => run_each(load, geometry, move || Psync::new(file, load), progress),
    }?;
    Ok(Report::new(options, &outcome, None))
}

/// One worker per queue, each with a port of its own.
fn run_each<P: Port>(
    load: &Load,
    geometry: Geometry,
    make: impl FnOnce() -> Result<P> + Send + Clone,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Outcome> {
    let ports = vec![make; load.queues.into()];
    run::run(load, geometry, ports, &mut Nobody, progress)
}

/// On a file there is nobody to supervise: the kernel answers.
struct Nobody;

impl Supervisor for Nobody {
    fn wait(&mut self, time: Duration, control: &Control) -> Result<bool> {
        let end = std::time::Instant::now() + time;
        while !control.all_finished() && std::time::Instant::now() < end {
            std::thread::sleep(time.min(Duration::from_millis(10)));
        }
        Ok(false)
    }

    fn wake(&self) {}

    fn backend_cpu(&self) -> Option<ProcessCpu> {
        None
    }

    fn diagnose(&self, _queue: usize, _completed: u64, _in_flight: u32) -> String {
        "the kernel has not answered".into()
    }
}

/// The data buffers of one worker, whole pages each.
pub struct Buffers {
    map: Mapping,
    stride: usize,
    len: usize,
}

impl Buffers {
    /// One per slot, filled with random data that no storage compresses.
    pub fn new(load: &Load) -> Result<Buffers> {
        let len = load.bs as usize;
        let stride = len.next_multiple_of(PAGE);
        let map = Mapping::anonymous(stride * usize::from(load.iodepth))?;
        let buffers = Buffers { map, stride, len };
        let mut rng = Rng::new(load.seed);
        for slot in 0..load.iodepth {
            scribble(buffers.get(slot), &mut rng);
        }
        Ok(buffers)
    }

    /// A slot's buffer.
    pub fn get(&self, slot: u16) -> Buffer {
        let at = self.map.at(usize::from(slot) * self.stride, self.len);
        // SAFETY: page-aligned and inside the mapping; users of the buffer
        // are the port that owns `self` and its worker.
        unsafe { Buffer::new(at, self.len) }
    }

    /// A slot's data, to be sent.
    pub fn bytes(&self, slot: u16) -> &[u8] {
        let at = self.map.at(usize::from(slot) * self.stride, self.len);
        // SAFETY: inside the mapping; the port that owns `self` changes a slot's
        // buffer by `&mut` of itself only, and its worker while the slot is free.
        unsafe { std::slice::from_raw_parts(at, self.len) }
    }

    /// Copies `data` to a slot's buffer, from byte `at` on.
    pub fn copy_in(&self, slot: u16, at: usize, data: &[u8]) {
        let to = self.part(slot, at, data.len());
        // SAFETY: `part` has checked the range; nobody has a reference to the
        // buffer of a slot that is in flight.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) }
    }

    /// Fills a part of a slot's buffer with zeroes.
    pub fn zero(&self, slot: u16, at: usize, len: usize) {
        let to = self.part(slot, at, len);
        // SAFETY: as in `copy_in`.
        unsafe { to.write_bytes(0, len) }
    }

    fn part(&self, slot: u16, at: usize, len: usize) -> *mut u8 {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len));
        self.map.at(usize::from(slot) * self.stride + at, len)
    }
}

/// Fills a buffer with random words.
pub fn scribble(buffer: Buffer, rng: &mut Rng) {
    for i in 0..buffer.words() {
        buffer.store(i, rng.next());
    }
}

/// A request's status from a system call's result: 0, an errno, or the
/// negative of bytes done plus one for a request that was cut short.
pub fn status(op: Op, len: u32, result: i32) -> i32 {
    match op {
        _ if result < 0 => -result,
        Op::Read | Op::Write if result as u32 != len => -(result + SHORT),
        _ => 0,
    }
}

/// What the system call returned, again: bytes, or a negative errno.
pub fn result(len: u32, status: i32) -> i64 {
    match status {
        0 => len.into(),
        short if short < 0 => i64::from(-short - SHORT),
        errno => -i64::from(errno),
    }
}

/// The status in words.
pub fn describe_status(status: i32) -> String {
    if status < 0 {
        return format!("only {} bytes were done", -status - SHORT);
    }
    io::Error::from_raw_os_error(status).to_string()
}

/// fallocate's mode of a discard or a write of zeroes.
pub fn fallocate_mode(op: Op) -> i32 {
    match op {
        Op::Discard => libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
        _ => libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
    }
}

/// One request at a time by pread, pwrite, fdatasync and fallocate.
pub struct Psync {
    file: Arc<File>,
    /// Where the file's own position is: then `read` and `write` are called, which go on from
    /// there; else `pread` and `pwrite`.
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

    /// Calls `read` and `write`, which know no offset.
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

    /// Back to the start of the range, or on after a short request.
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
}
