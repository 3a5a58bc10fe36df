//! A load in a single thread that timestamps each request. The load reads or writes blocks of one
//! size, with one or more requests in flight.
//!
//! The load runs on the caller's thread. During the measurement it does not print, save results or
//! allocate memory. Timestamps are stored in memory that was touched and, where permitted, locked
//! before the first request.
//!
//! ```no_run
//! use fathom_load::stamped::{self, Limit, Options};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let options = Options::new("/dev/vda").with_limit(Limit::Operations(10_000));
//! let outcome = stamped::run(&options)?;
//! println!("{} ns", outcome.wall_ns);
//! # Ok(())
//! # }
//! ```

mod options;
mod records;

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::time::Duration;

use fathom_trace::Clock;
use fathom_trace::clock::{Pair, monotonic_ns};
use rustix::io::Errno;

pub use options::{Limit, Options};
pub use records::{Injection, Record};

use crate::control::{Control, Phase};
use crate::error::{Error, Result};
use crate::host::aio::Aio;
use crate::host::psync::Psync;
use crate::host::status::result;
use crate::host::uring::Uring;
use crate::load::{Observer, Worker};
use crate::options::{Engine, File as FileOptions, Load};
use crate::port::{Done, Port};
use crate::workload::Range;
use records::Buffer;

/// Result of a measurement.
#[derive(Debug)]
pub struct Outcome {
    /// Records of the requests, in the order in which they were started.
    pub records: Vec<Record>,
    /// Records of the injected delays; empty without [`Options::inject`].
    pub injections: Vec<Injection>,
    /// Wall time in ns from before the first request until after the last one.
    pub wall_ns: u64,
    /// Readings of both clocks, before and after the load.
    pub pairs: [Pair; 2],
    /// Thread ID of the thread that made the system calls.
    pub tid: u32,
    /// Name of the system call.
    pub call: &'static str,
}

/// Runs the load to its end.
///
/// # Errors
/// If the options contradict each other or the file, the file cannot be opened with them, no
/// suitable engine is permitted, or every request failed. Failures of single requests are recorded
/// in the [`Outcome`].
pub fn run(options: &Options) -> Result<Outcome> {
    options.check()?;
    let mut file = open(options)?;
    let blocks = blocks(options, &mut file)?;
    let (file, load) = (Arc::new(file), options.load());
    if options.iodepth == 1 {
        let port = Psync::new(file, &load)?;
        return match (options.is_positional(), load.rw.is_read_only()) {
            (false, true) => measure(options, &load, blocks, port.at_position(), "read"),
            (false, false) => measure(options, &load, blocks, port.at_position(), "write"),
            (true, true) => measure(options, &load, blocks, port, "pread"),
            (true, false) => measure(options, &load, blocks, port, "pwrite"),
        };
    }
    let uring = || Uring::new(file.clone(), &FileOptions::new(&options.path), &load);
    let aio = |load| Aio::new(file.clone(), load);
    let uring = match options.engine {
        Some(Engine::IoUring) => Some(uring()?),
        Some(Engine::Aio | Engine::Psync) => None,
        // With the page cache, Linux AIO would execute one request at a time.
        None if !options.direct => Some(uring()?),
        None => uring().ok(),
    };
    match uring {
        Some(uring) => measure(options, &load, blocks, uring, "io_uring"),
        None => measure(options, &load, blocks, aio(&load)?, "io_submit"),
    }
}

fn open(options: &Options) -> Result<File> {
    let path = options.path.display();
    let direct = if options.direct { libc::O_DIRECT } else { 0 };
    OpenOptions::new()
        .read(true)
        .write(options.load().writes())
        .custom_flags(direct)
        .open(&options.path)
        .or_else(|error| match error.raw_os_error() {
            Some(code) if options.direct && code == Errno::INVAL.raw_os_error() => options.bad(
                "its file system has no direct I/O; use another file system, or the page \
                 cache"
                    .into(),
            ),
            _ => Err(Error::os(format!("cannot open {path}"), error)),
        })
}

/// Returns the blocks in the range given by the options.
fn blocks(options: &Options, file: &mut File) -> Result<Range> {
    let path = options.path.display();
    let end = file
        .seek(SeekFrom::End(0))
        .map_err(|e| Error::os(format!("cannot ask for the size of {path}"), e))?;
    let rest = end.saturating_sub(options.offset);
    let length = options.length.unwrap_or(rest);
    if length > rest {
        let from = options.offset;
        return options.bad(format!(
            "has {end} bytes; {length} from {from} are requested"
        ));
    }
    let (first, count) = (0, length / options.block_size);
    if count == 0 {
        return options.bad(format!(
            "the range of {length} bytes does not hold one block of {}",
            options.block_size
        ));
    }
    Ok(Range { first, count })
}

fn measure<P: Port>(
    options: &Options,
    load: &Load,
    blocks: Range,
    port: P,
    call: &'static str,
) -> Result<Outcome> {
    let clock = Clock::get();
    let control = Control::new(1);
    control.set_phase(Phase::Measure);
    let mut worker = Worker::new(port, Stamps::new(options), 0, blocks, load, &control, None);
    let before = clock.pair();
    worker.observer().begin(clock);
    let start = monotonic_ns();
    worker.run()?;
    let end = monotonic_ns();
    let pairs = [before, clock.pair()];
    let stamps = worker.into_observer();
    let outcome = Outcome {
        records: stamps.records.into_vec(),
        injections: stamps.injections.into_vec(),
        wall_ns: end - start,
        pairs,
        tid: rustix::thread::gettid()
            .as_raw_nonzero()
            .get()
            .cast_unsigned(),
        call,
    };
    outcome.refuse_nothing_but_errors(options)?;
    Ok(outcome)
}

impl Outcome {
    fn refuse_nothing_but_errors(&self, options: &Options) -> Result<()> {
        let results = || self.records.iter().map(|record| record.result);
        let block = options.block_size.cast_signed();
        let Some(errno) = results().find(|result| *result < 0) else {
            return Ok(());
        };
        if results().any(|result| result == block) {
            return Ok(());
        }
        let einval = i64::from(Errno::INVAL.raw_os_error());
        let hint = match errno == -einval && options.direct && options.block_size < 4096 {
            true => "; the device's sectors may be larger than 512 bytes: try a block size of 4k",
            false => "",
        };
        let error = fathom_units::cause(std::io::Error::from_raw_os_error(
            i32::try_from(-errno).unwrap_or(0),
        ));
        options.bad(format!("every {} failed: {error}{hint}", options.rw))
    }
}

/// Collects timestamps, and determines when the load ends.
struct Stamps {
    records: Buffer<Record>,
    injections: Buffer<Injection>,
    /// Index in `records` of the request in each slot.
    numbers: Vec<usize>,
    len: u32,
    delay: Option<Duration>,
    time: Option<Duration>,
    /// Time at which the load ends, in ticks.
    stop: u64,
}

impl Stamps {
    fn new(options: &Options) -> Stamps {
        let room = usize::try_from(options.room()).unwrap_or(usize::MAX);
        let delays = options.inject.map_or(0, |_| room / 2);
        Stamps {
            records: Buffer::new(room, Record::BLANK),
            injections: Buffer::new(delays, Injection::BLANK),
            numbers: vec![usize::MAX; options.iodepth as usize],
            len: options.block_size as u32,
            delay: options.inject,
            time: match options.limit {
                Limit::Operations(_) => None,
                Limit::Time(time) => Some(time),
            },
            stop: u64::MAX,
        }
    }

    fn begin(&mut self, clock: &Clock) {
        if let Some(time) = self.time {
            self.stop = clock.now().saturating_add(clock.ticks(time));
        }
    }
}

impl Observer for Stamps {
    #[inline]
    fn is_over(&self, now: u64) -> bool {
        now >= self.stop
    }

    #[inline]
    fn starts(&mut self, slot: u16, offset: u64, clock: &Clock) -> Option<Duration> {
        let number = self.records.push(Record {
            start: clock.now(),
            end: 0,
            offset,
            result: 0,
        });
        self.numbers[usize::from(slot)] = number;
        self.delay.filter(|_| number % 2 == 1)
    }

    #[cold]
    fn waited(&mut self, slot: u16, ticks: u64, end: u64) {
        let number = self.numbers[usize::from(slot)] as u64;
        self.injections.push(Injection { end, ticks, number });
    }

    #[inline]
    fn ended(&mut self, done: Done, now: u64) {
        let record = self.records.get_mut(self.numbers[usize::from(done.slot)]);
        record.end = now;
        record.result = result(self.len, done.status);
    }
}
