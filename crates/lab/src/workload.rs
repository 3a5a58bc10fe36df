//! The benchmark that runs in the guest and on the host, and its event file. The requests are those
//! of `crates/load`, with a timestamp at the start and end of each.
//!
//! ```no_run
//! use fathom_lab::workload::{self, Limit, Options};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let options = Options::new("/dev/vda").with_limit(Limit::Operations(10_000));
//! let outcome = workload::run(&options)?;
//! println!("{} ns", outcome.benchmark.mean_ns);
//! outcome.write("bench.events".as_ref())?;
//! # Ok(())
//! # }
//! ```

use std::path::Path;

use fathom_load::stamped::{self, Injection, Record};
pub use fathom_load::stamped::{Limit, Options};
pub use fathom_load::{Engine, Rw};
use fathom_run::{Benchmark, Clock, Event, Kind, Pair, StreamInfo, StreamWriter, flags};

use crate::error::Result;

/// Result of a benchmark.
#[derive(Debug)]
pub struct Outcome {
    /// Overall figures, computed as the wiki defines them.
    pub benchmark: Benchmark,
    /// Readings of both clocks before and after the benchmark, for `Clocks::guest` or
    /// `Clocks::host`.
    pub pairs: [Pair; 2],
    /// Whether the timestamps are TSC ticks. Otherwise they are nanoseconds of CLOCK_MONOTONIC.
    pub is_tsc: bool,
    /// Id of the thread that issued the requests.
    pub tid: u32,
    records: Vec<Record>,
    injections: Vec<Injection>,
    block_size: u64,
    write: bool,
}

/// Place of an injected delay, an entry in the file's string table.
const PLACE: &str = "guest";
/// Number of arguments of [`Kind::BenchOperation`], the widest event in the file.
const WIDTH: usize = 5;

/// Runs the benchmark to its end.
///
/// # Errors
/// Those of [`stamped::run`]. Failed operations are counted in [`fathom_run::Benchmark::errors`].
pub fn run(options: &Options) -> Result<Outcome> {
    let measured = stamped::run(options)?;
    let operations = measured.records.len() as u64;
    let wanted = options.block_size.cast_signed();
    let failed = |record: &&Record| record.result != wanted;
    Ok(Outcome {
        benchmark: Benchmark {
            operations,
            mean_ns: measured.wall_ns as f64 / operations as f64,
            wall_ns: measured.wall_ns,
            errors: measured.records.iter().filter(failed).count() as u64,
            call: measured.call.to_owned(),
        },
        pairs: measured.pairs.map(|pair| Pair {
            tsc: pair.ticks,
            monotonic_ns: pair.monotonic_ns,
        }),
        is_tsc: fathom_trace::Clock::get().is_tsc(),
        tid: measured.tid,
        records: measured.records,
        injections: measured.injections,
        block_size: options.block_size,
        write: !options.rw.is_read_only(),
    })
}

impl Outcome {
    /// Returns the measured operations and the injected delays as events, in order of time.
    pub fn events(&self) -> impl Iterator<Item = Event> {
        let mut operations = self.records.iter().peekable();
        let mut delays = self.injections.iter().peekable();
        std::iter::from_fn(move || {
            let delay_first = match (operations.peek(), delays.peek()) {
                (Some(operation), Some(delay)) => delay.end < operation.start,
                (None, Some(_)) => true,
                _ => false,
            };
            if delay_first {
                delays.next().map(|delay| self.injected(delay))
            } else {
                operations.next().map(|record| self.operation(record))
            }
        })
    }

    fn operation(&self, record: &Record) -> Event {
        let flags = if self.write { flags::WRITE } else { 0 };
        let args = [
            record.end,
            record.offset,
            self.block_size,
            record.result.cast_unsigned(),
            flags,
        ];
        Event::new(record.start, Kind::BenchOperation, 0, self.tid, &args)
    }

    fn injected(&self, delay: &Injection) -> Event {
        let args = [0, delay.ticks, delay.number];
        Event::new(delay.end, Kind::Injected, 0, self.tid, &args)
    }

    /// Writes the events to a file and returns their number.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, path: &Path) -> fathom_run::Result<u64> {
        let mut writer = StreamWriter::create(path, WIDTH, vec![PLACE.to_owned()])?;
        for event in self.events() {
            writer.push(&event)?;
        }
        writer.finish()
    }

    /// Returns the clock of the events, for a benchmark in the guest or on the host.
    pub fn clock(&self, on_host: bool) -> Clock {
        match (on_host, self.is_tsc) {
            (true, true) => Clock::HostTsc,
            (true, false) => Clock::HostMonotonic,
            (false, true) => Clock::GuestTsc,
            (false, false) => Clock::GuestMonotonic,
        }
    }

    /// Writes `NAME.events` into a round's folder and returns its description for `run.json`.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, round: &Path, name: &str, on_host: bool) -> fathom_run::Result<StreamInfo> {
        let events = self.write(&round.join(format!("{name}.events")))?;
        Ok(StreamInfo {
            name: name.to_owned(),
            clock: self.clock(on_host),
            events,
            lost: Some(0),
        })
    }
}
