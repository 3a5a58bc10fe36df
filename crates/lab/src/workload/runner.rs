//! The loops that measure.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use fathom_trace::Clock;
use fathom_trace::clock::monotonic_ns;

use super::engine::{self, Done, Flight};
use super::offsets::Offsets;
use super::options::{Limit, Options};
use super::outcome::{Outcome, Window};
use super::records::{Buffer, Injection, Record};
use super::target::{Memory, Target, describe};
use crate::error::{Context, Result};

pub(super) fn run(options: &Options) -> Result<Outcome> {
    options.check()?;
    let target = Target::open(options)?;
    let memory = Memory::new(options.iodepth, options.block_size)?;
    let mut stamps = Stamps::new(options);
    let before = pair();
    let (window, call) = if options.iodepth == 1 {
        one_at_a_time(options, &target.file, target.offsets, &memory, &mut stamps)?
    } else {
        let mut flight = engine::start(options, target.file.as_fd(), &memory)?;
        let window = several(options, flight.as_mut(), target.offsets, &mut stamps)?;
        (window, flight.name())
    };
    let clocks = [before, pair()];
    let outcome = Outcome::new(
        options,
        stamps.records,
        stamps.injections,
        window,
        clocks,
        call,
    );
    let benchmark = &outcome.benchmark;
    if benchmark.errors == benchmark.operations
        && let Some(error) = outcome.first_error()
    {
        return options.bad(describe(error, options));
    }
    Ok(outcome)
}

fn pair() -> fathom_run::Pair {
    let pair = Clock::get().pair();
    fathom_run::Pair {
        tsc: pair.ticks,
        monotonic_ns: pair.monotonic_ns,
    }
}

/// Where stamps go, and when there are enough of them.
struct Stamps {
    clock: &'static Clock,
    records: Buffer<Record>,
    injections: Buffer<Injection>,
    delay: Option<Duration>,
    /// Length of the run, in ticks.
    time: Option<u64>,
    /// Where the time is up, in ticks.
    stop: u64,
}

impl Stamps {
    fn new(options: &Options) -> Stamps {
        let clock = Clock::get();
        let room = usize::try_from(options.room()).unwrap_or(usize::MAX);
        let delays = options.inject.map_or(0, |_| room / 2);
        Stamps {
            clock,
            records: Buffer::new(room, Record::BLANK),
            injections: Buffer::new(delays, Injection::BLANK),
            delay: options.inject,
            time: match options.limit {
                Limit::Operations(_) => None,
                Limit::Time(time) => Some(clock.ticks(time)),
            },
            stop: u64::MAX,
        }
    }

    /// The first of the two stamps around the whole run, in ns.
    fn begin(&mut self) -> u64 {
        if let Some(time) = self.time {
            self.stop = self.clock.now().saturating_add(time);
        }
        monotonic_ns()
    }

    fn is_over(&self, now: u64) -> bool {
        self.records.is_full() || now >= self.stop
    }

    /// Opens an operation's record, stamped.
    #[inline]
    fn start(&mut self, offset: u64) -> usize {
        self.records.push(Record {
            start: self.clock.now(),
            end: 0,
            offset,
            result: 0,
        })
    }

    /// Whether operation `number` is to be delayed.
    #[inline]
    fn is_delayed(&self, number: usize) -> bool {
        self.delay.is_some() && number % 2 == 1
    }

    /// Spends the delay and notes what it was.
    #[cold]
    fn inject(&mut self, number: usize) {
        let Some(delay) = self.delay else { return };
        let start = self.clock.now();
        std::thread::sleep(delay);
        let end = self.clock.now();
        self.injections.push(Injection {
            end,
            ticks: end - start,
            number: number as u64,
        });
    }

    #[inline]
    fn end(&mut self, number: usize, now: u64, result: i64) {
        let record = self.records.get_mut(number);
        record.end = now;
        record.result = result;
    }
}

/// One operation after another, each a call that returns when it is done.
fn one_at_a_time(
    options: &Options,
    file: &File,
    mut offsets: Offsets,
    memory: &Memory,
    stamps: &mut Stamps,
) -> Result<(Window, &'static str)> {
    let call = Call::of(options);
    let mut position = options.offset;
    seek(file, position).context(|| format!("cannot seek in {}", options.path.display()))?;
    let start = stamps.begin();
    loop {
        let offset = offsets.next_offset();
        if call.moves() && offset != position {
            // Back to the start of the range, or on after a short operation.
            seek(file, offset).context(|| format!("cannot seek in {}", options.path.display()))?;
        }
        let number = stamps.start(offset);
        if stamps.is_delayed(number) {
            stamps.inject(number);
        }
        let result = call.make(file, memory, offset);
        let now = stamps.clock.now();
        stamps.end(number, now, result);
        position = offset + result.max(0).cast_unsigned();
        if stamps.is_over(now) {
            break;
        }
    }
    let end = monotonic_ns();
    Ok((Window { start, end }, call.name()))
}

fn seek(mut file: &File, offset: u64) -> io::Result<()> {
    io::Seek::seek(&mut file, io::SeekFrom::Start(offset)).map(drop)
}

/// The system call of depth 1.
#[derive(Clone, Copy, Debug)]
enum Call {
    Read,
    Write,
    Pread,
    Pwrite,
}

impl Call {
    fn of(options: &Options) -> Call {
        match (options.is_positional(), options.rw.is_write()) {
            (false, false) => Call::Read,
            (false, true) => Call::Write,
            (true, false) => Call::Pread,
            (true, true) => Call::Pwrite,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Call::Read => "read",
            Call::Write => "write",
            Call::Pread => "pread",
            Call::Pwrite => "pwrite",
        }
    }

    /// Whether it goes where the file's position is.
    fn moves(self) -> bool {
        matches!(self, Call::Read | Call::Write)
    }

    /// Makes the call; its result, or the negative errno.
    #[inline]
    fn make(self, file: &File, memory: &Memory, offset: u64) -> i64 {
        let fd = file.as_raw_fd();
        let (buffer, length) = memory.slot(0);
        let offset = offset.cast_signed();
        // SAFETY: the slot is `length` bytes of mapped memory that nobody else uses; a call that
        // fails or is short leaves the rest alone.
        let result = unsafe {
            match self {
                Call::Read => libc::read(fd, buffer.cast(), length),
                Call::Write => libc::write(fd, buffer.cast(), length),
                Call::Pread => libc::pread64(fd, buffer.cast(), length, offset),
                Call::Pwrite => libc::pwrite64(fd, buffer.cast(), length, offset),
            }
        };
        if result >= 0 {
            return result as i64;
        }
        -i64::from(io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }
}

/// `iodepth` operations in flight: each that ends makes room for the next.
fn several(
    options: &Options,
    flight: &mut dyn Flight,
    mut offsets: Offsets,
    stamps: &mut Stamps,
) -> Result<Window> {
    let what = || format!("cannot submit to {}", options.path.display());
    // By slot: the operation in it.
    let mut numbers = vec![usize::MAX; options.iodepth as usize];
    let mut free: Vec<u32> = (0..options.iodepth).rev().collect();
    let mut in_flight = 0u32;
    let start = stamps.begin();
    let mut now = stamps.clock.now();
    loop {
        while !stamps.is_over(now) {
            let Some(slot) = free.pop() else { break };
            let offset = offsets.next_offset();
            let number = stamps.start(offset);
            numbers[slot as usize] = number;
            if stamps.is_delayed(number) {
                // Those queued before it are not to wait for it.
                flight.submit(0).context(what)?;
                stamps.inject(number);
            }
            flight.queue(slot, offset);
            in_flight += 1;
        }
        if in_flight == 0 {
            break;
        }
        flight.submit(1).context(what)?;
        while let Some(Done { slot, result }) = flight.reap() {
            now = stamps.clock.now();
            stamps.end(numbers[slot as usize], now, result);
            free.push(slot);
            in_flight -= 1;
        }
    }
    let end = monotonic_ns();
    Ok(Window { start, end })
}
