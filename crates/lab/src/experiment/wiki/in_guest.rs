//! The part of a round that runs in the guest: `fathom guest run`.

use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};

use fathom_run::{Clocks, Environment, Round, Run, RunKind};

use crate::environment;
use crate::error::{Context, Error, Result};
use crate::tracers::ftrace::Mode;
use crate::tracers::guest::{self, Guest, GuestDisk};
use crate::tracers::{self, Tracefs};
use crate::workload::{self, Limit};

/// Printed when the guest is ready to start. The guest then waits for [`GO`].
pub(super) const READY: &str = "fathom-guest: ready";
pub(super) const GO: &str = "go";
/// Printed when the benchmark has ended and tracing has stopped.
pub(super) const DONE: &str = "fathom-guest: done";
/// Folder of the only round.
pub(super) const ROUND: &str = "round";
/// Name of the stream with the benchmark's own events.
pub(super) const BENCHMARK: &str = "benchmark";

/// Trace data per operation: nine events of about 40 bytes, and the kernel's time stamps.
const BYTES_AN_OPERATION: u64 = 640;
/// Size of the trace buffer per CPU, which stays in the guest's memory until the window has ended.
const LEAST_KIB: u64 = 2 << 10;
const MOST_KIB: u64 = 128 << 10;
/// Number of operations assumed for a window that is limited by time.
const MOST_OPERATIONS: u64 = MOST_KIB * 1024 / BYTES_AN_OPERATION;

/// Options of `fathom guest run`.
#[derive(Clone, Debug)]
pub struct GuestRun {
    /// Requests of the benchmark.
    pub workload: workload::Options,
    /// Whether to trace the guest's layers as well.
    pub trace: bool,
    /// The run directory to create, which has one round, of the guest alone.
    pub record: PathBuf,
}

/// Runs the benchmark, and writes the results to a run directory.
///
/// Prints `READY`, waits for `GO`, and prints `DONE` when the benchmark has ended. All data
/// stays in memory until then.
///
/// # Errors
/// If the benchmark cannot run, the kernel cannot trace, or there is no space for the files.
pub fn run(options: &GuestRun, input: &mut dyn BufRead, output: &mut dyn Write) -> Result<()> {
    let folder = options.record.join(ROUND);
    std::fs::create_dir_all(&folder).context(|| format!("cannot create {}", folder.display()))?;
    let mut tracer = options
        .trace
        .then(|| start(&options.workload))
        .transpose()?;
    let trace_clock = tracer.as_ref().map_or("", Guest::clock);
    say(output, READY)?;
    wait_for_go(input)?;
    let before = tracers::pair();
    let outcome = workload::run(&options.workload)?;
    if let Some(tracer) = &mut tracer {
        tracer.halt()?;
    }
    say(output, DONE)?;
    let pairs = vec![before, tracers::pair()];
    let (mut streams, mut problems, mut traced) = (Vec::new(), Vec::new(), Vec::new());
    let mut disks = guest::disks();
    if let Some(tracer) = tracer {
        let (collected, seen) = tracer.stop(&folder)?;
        (streams, problems, disks) = (collected.streams, collected.problems, seen);
        traced.push(guest::NAME.to_owned());
    }
    streams.push(outcome.save(&folder, BENCHMARK, false)?);
    let round = Round {
        name: ROUND.into(),
        traced,
        on_host: false,
        benchmark: Some(outcome.benchmark.clone()),
        clocks: Clocks {
            guest: pairs,
            ..Clocks::default()
        },
        streams,
    };
    let run = Run {
        environment: Environment {
            guest: Some(environment::machine(trace_clock)),
            fathom: env!("CARGO_PKG_VERSION").into(),
            ..Environment::default()
        },
        disks: disks
            .iter()
            .map(|disk| disk.to_disk(is_device(disk, &options.workload.path)))
            .collect(),
        rounds: vec![round],
        problems,
        ..Run::new(RunKind::Guest, "guest")
    };
    Ok(run.save(&options.record)?)
}

fn start(workload: &workload::Options) -> Result<Guest> {
    let device = workload.path.file_name().map(|name| name.to_string_lossy());
    let operations = match workload.limit {
        Limit::Operations(count) => count,
        Limit::Time(_) => MOST_OPERATIONS,
    };
    let kib = operations * BYTES_AN_OPERATION / 1024;
    let kib = u32::try_from(kib.clamp(LEAST_KIB, MOST_KIB)).unwrap_or(u32::MAX);
    let options = guest::Options {
        device: device.as_deref(),
        mode: Mode::Buffered { kib_per_cpu: kib },
    };
    guest::start(&Tracefs::open()?, &options)
}

fn is_device(disk: &GuestDisk, path: &Path) -> bool {
    path.file_name()
        .is_some_and(|name| name == disk.name.as_str())
}

fn say(output: &mut dyn Write, words: &str) -> Result<()> {
    let what = || "cannot write to the host".to_owned();
    writeln!(output, "{words}").context(what)?;
    output.flush().context(what)
}

fn wait_for_go(input: &mut dyn BufRead) -> Result<()> {
    let mut line = String::new();
    input
        .read_line(&mut line)
        .context(|| "cannot read from the host".into())?;
    if line.trim() == GO {
        return Ok(());
    }
    Err(Error::Protocol(format!(
        "the host sent '{}' instead of '{GO}'",
        line.trim()
    )))
}
