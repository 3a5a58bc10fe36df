//! A round: the same work each time, traced in one way.

use fathom_units::cause;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fathom_run::evidence::Load;
use fathom_run::{Clocks, Kind, Pair, Round, Run, StreamInfo};

use super::bed::Bed;
use super::in_guest::{DONE, GO, READY, ROUND};
use super::options::{Options, Place};
use crate::attach::{self, Located, TscOffset};
use crate::bed::{Job, Seen};
use crate::error::{Context, Error, Result};
use crate::guest::Guest;
use crate::host::Accelerator;
use crate::tracers::ftrace::Mode;
use crate::tracers::on_host::{self, Start};
use crate::tracers::qemu::{self, collector};
use crate::tracers::scene::Scene;
use crate::tracers::{self, Collected, Collector, Tracefs, io_calls, kvm, symbols, syscalls};
use crate::work::Worked;
use crate::workload::Limit;

/// The subject of a round's trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Watch {
    /// Nothing: a control round.
    Nothing,
    /// Every request, through all layers.
    Requests,
    /// The system calls of QEMU and the server.
    Syscalls,
    /// QEMU's own events.
    Qemu,
    /// The locks that QEMU takes.
    QemuLocks,
}

/// A round in the guest.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    /// Name of the round's folder.
    pub name: String,
    pub watch: Watch,
}

/// Results of a round.
pub(super) struct Outcome {
    pub round: Round,
    /// The guest's own results.
    pub guest: Run,
    pub problems: Vec<String>,
}

/// Size of the host's trace buffers: about twenty events of KVM per request, of about 48 bytes.
const BYTES_AN_OPERATION: u64 = 2048;
const LEAST_KIB: u64 = 8 << 10;
const MOST_KIB: u64 = 256 << 10;
/// The run directory in the guest.
const RECORD: &str = "/tmp/fathom-round";
/// Time limit of a round, in addition to the time of its operations.
const PATIENCE: Duration = Duration::from_secs(300);
/// Maximum time of an operation, without an injected delay.
const SLOWEST: Duration = Duration::from_millis(100);

/// Runs a round in the guest; its files are written to a folder in `dir`.
pub(super) fn in_guest(
    bed: &mut Bed,
    options: &Options,
    plan: &Plan,
    dir: &Path,
) -> Result<Outcome> {
    let folder = dir.join(&plan.name);
    fs::create_dir_all(&folder).context(|| format!("cannot create {}", folder.display()))?;
    bed.attached.look_at_threads();
    let mut window = Window::new(bed, options, plan.watch)?;
    let qemu = qemu(bed, options, plan.watch, &folder)?;
    let guest = &mut bed.vm.guest;
    if let Some(qemu) = &qemu {
        qemu.switch_log(&mut |command, arguments| guest.qmp(command, arguments))?;
        let missing = qemu.start(&mut |command, arguments| guest.qmp(command, arguments))?;
        window.problems.extend(missing);
    }
    let script = guest_command(options, &bed.vm.device, plan.watch == Watch::Requests);
    let script = format!("rm -rf {RECORD}; {script}");
    let output = guest.converse(&script, timeout(options), &mut |line| match line {
        READY => window.open().map(|()| Some(GO.to_owned())),
        DONE => {
            window.close();
            Ok(None)
        }
        _ => Ok(None),
    })?;
    if output.status != 0 {
        return Err(guest.agent().failed(&script, &output));
    }
    let mut outcome = window.finish(fetch(guest, &folder)?, &plan.name, &folder)?;
    if let Some(qemu) = qemu {
        qemu.stop(&mut |command, arguments| guest.qmp(command, arguments))?;
        outcome.add(qemu.collect(&folder)?);
        outcome.round.traced.push(match plan.watch {
            Watch::QemuLocks => "qemu-locks".into(),
            _ => collector::NAME.into(),
        });
    }
    bed.attached.look_at_threads();
    if plan.watch == Watch::Syscalls {
        // Processes must still run: symbols are found by their mapped files.
        let threads = &bed.attached.threads;
        outcome.add(symbols::collect(&folder, &[syscalls::NAME], threads)?);
    }
    if plan.watch == Watch::Requests {
        tell_eventfds(bed, &outcome.round, dir)?;
    }
    tell_roles(bed, &outcome.round, dir)?;
    Ok(outcome)
}

/// Runs the same work again without tracing, and observes it like a cell of any other experiment.
pub(super) fn observed(bed: &mut Bed, options: &Options) -> Result<Seen> {
    let command = guest_command(options, &bed.vm.device, false);
    let script =
        format!("rm -rf {RECORD}; echo {GO} | {command} >/dev/null && cat {RECORD}/run.json");
    bed.vm.measure(&Job {
        script: &script,
        timeout: timeout(options),
        parse: &|text| worked(text, options),
    })
}

/// Returns the load that the guest has recorded. The measures come from other rounds.
fn worked(text: &str, options: &Options) -> Result<Worked> {
    let bad = |what: &str| Error::Protocol(format!("the guest's record {what}: {text}"));
    let run: Run = serde_json::from_str(text).map_err(|error| bad(&error.to_string()))?;
    let benchmark = run
        .rounds
        .first()
        .and_then(|round| round.benchmark.as_ref());
    let benchmark = benchmark.ok_or_else(|| bad("has no round"))?;
    let load = Load {
        threads: 1,
        depth: options.iodepth,
        requests: benchmark.operations,
        bytes: benchmark.operations * options.block_size,
        seconds: benchmark.wall_ns as f64 / 1e9,
        mean_ns: benchmark.mean_ns * f64::from(options.iodepth),
        ..Load::default()
    };
    Ok(Worked {
        load,
        ..Worked::default()
    })
}

/// Returns the collector of QEMU's own events, which writes a log into the round's folder.
fn qemu(
    bed: &Bed,
    options: &Options,
    watch: Watch,
    folder: &Path,
) -> Result<Option<qemu::Collector>> {
    let what = || format!("cannot find {}", folder.display());
    let log = folder.canonicalize().context(what)?.join("qemu.log");
    match watch {
        Watch::Qemu => {
            let version = bed.qemu_version;
            qemu::Collector::new(&log, version, options.aio, false).map(Some)
        }
        Watch::QemuLocks => qemu::Collector::locks(&log).map(Some),
        Watch::Nothing | Watch::Requests | Watch::Syscalls => Ok(None),
    }
}

/// Distinguishes the disk's kicks from its calls, by the threads that signalled them.
fn tell_eventfds(bed: &mut Bed, round: &Round, dir: &Path) -> Result<()> {
    let Some(stream) = round.streams.iter().find(|stream| stream.name == kvm::NAME) else {
        return Ok(());
    };
    let mut signals = Vec::new();
    for event in round.open(dir, stream)? {
        let event = event?;
        if event.kind == Kind::EventfdSignal {
            signals.push((event.args[0], event.tid));
        }
    }
    signals.sort_unstable();
    signals.dedup();
    let threads = bed.attached.threads.clone();
    bed.found()?.classify(&threads, signals.into_iter());
    Ok(())
}

/// Determines the roles of threads without names from what they did.
fn tell_roles(bed: &mut Bed, round: &Round, dir: &Path) -> Result<()> {
    let server = bed.server_pid()?;
    let telling = [io_calls::NAME, syscalls::NAME, kvm::NAME];
    let told = |stream: &&StreamInfo| telling.contains(&stream.name.as_str());
    let mut deeds = io_calls::Deeds::default();
    for stream in round.streams.iter().filter(told) {
        for event in round.open(dir, stream)? {
            deeds.add(&event?);
        }
    }
    deeds.tell_roles(&mut bed.attached.threads, server);
    Ok(())
}

/// Returns the command for the guest. The arguments are numbers and a device, and need no quoting.
fn guest_command(options: &Options, device: &str, traced: bool) -> String {
    let mut command = format!(
        "fathom guest run --record={RECORD} --rw={} --bs={} --iodepth={}",
        options.rw, options.block_size, options.iodepth
    );
    match options.limit() {
        Limit::Operations(count) => command += &format!(" --count={count}"),
        Limit::Time(time) => command += &format!(" --seconds={}", time.as_secs()),
    }
    if let Some(injection) = options.inject
        && injection.place == Place::Guest
    {
        command += &format!(" --inject={}us", injection.delay.as_micros());
    }
    if traced {
        command += " --trace";
    }
    format!("{command} {device}")
}

fn timeout(options: &Options) -> Duration {
    let delay = options.inject.map_or(Duration::ZERO, |one| one.delay) + SLOWEST;
    PATIENCE
        + match options.limit() {
            Limit::Operations(count) => delay * u32::try_from(count).unwrap_or(u32::MAX),
            Limit::Time(time) => time,
        }
}

/// Copies the guest's files into the round's folder, and returns the content of its run.json.
fn fetch(guest: &mut Guest, folder: &Path) -> Result<Run> {
    let inside = folder.join("guest");
    guest.fetch(RECORD, &inside, PATIENCE)?;
    let run = Run::load(&inside)?;
    let what = || format!("cannot move the guest's files within {}", folder.display());
    for entry in fs::read_dir(inside.join(ROUND)).context(what)? {
        let entry = entry.context(what)?;
        fs::rename(entry.path(), folder.join(entry.file_name())).context(what)?;
    }
    fs::remove_dir_all(&inside).context(what)?;
    Ok(run)
}

/// The measured window, on the host.
struct Window<'a> {
    watch: Watch,
    options: &'a Options,
    qemu: u32,
    /// IDs of the threads of QEMU and the disk's server.
    threads: Vec<u32>,
    /// IDs of the threads of the disk's server only.
    serving: Vec<u32>,
    located: Located,
    /// Path of Fathom's API, from which its trace is read.
    api: Option<PathBuf>,
    collectors: Vec<Box<dyn Collector>>,
    pairs: Vec<Pair>,
    offsets: Vec<Vec<TscOffset>>,
    problems: Vec<String>,
}

impl<'a> Window<'a> {
    fn new(bed: &mut Bed, options: &'a Options, watch: Watch) -> Result<Window<'a>> {
        let server = bed.server_pid()?;
        let threads = bed.attached.threads.iter().map(|thread| thread.tid);
        let api = bed.vm.server.as_ref().and_then(|server| server.api());
        Ok(Window {
            watch,
            options,
            qemu: bed.attached.pid,
            threads: threads.collect(),
            serving: io_calls::threads_of(&bed.attached.threads, server),
            api: api.map(Path::to_owned),
            located: bed.found()?.located.clone(),
            collectors: Vec::new(),
            pairs: Vec::new(),
            offsets: Vec::new(),
            problems: Vec::new(),
        })
    }

    fn open(&mut self) -> Result<()> {
        match self.watch {
            Watch::Nothing | Watch::Qemu | Watch::QemuLocks => {}
            Watch::Requests => self.start(on_host::LAYERS)?,
            Watch::Syscalls => self.start(on_host::CALLS)?,
        }
        self.look_at_clocks();
        Ok(())
    }

    fn start(&mut self, which: &[(&str, Start)]) -> Result<()> {
        let device = self.located.device.as_ref();
        let scene = Scene {
            tracefs: &Tracefs::open()?,
            mode: Mode::Buffered {
                kib_per_cpu: self.buffer(),
            },
            threads: &self.threads,
            serving: &self.serving,
            device: device.map(|device| (device.dev, &*self.located.partitions)),
            api: self.api.as_deref(),
            accelerator: Accelerator::Kvm.name(),
        };
        let collectors = on_host::start(which, &scene, &mut self.problems);
        // An untraced round would be mistaken for a control round.
        if collectors.is_empty() {
            return Err(Error::Protocol(self.problems.join("; ")));
        }
        self.collectors = collectors;
        Ok(())
    }

    fn close(&mut self) {
        for collector in &mut self.collectors {
            if let Err(error) = collector.halt() {
                self.problems
                    .push(format!("{}: {}", collector.name(), cause(error)));
            }
        }
        self.look_at_clocks();
    }

    fn look_at_clocks(&mut self) {
        self.pairs.push(tracers::pair());
        self.offsets.push(attach::tsc_offsets(self.qemu));
    }

    /// Returns the size of a trace buffer, in KiB per CPU.
    fn buffer(&self) -> u32 {
        let operations = match self.options.limit() {
            Limit::Operations(count) => count,
            Limit::Time(_) => MOST_KIB * 1024 / BYTES_AN_OPERATION,
        };
        let kib = (operations * BYTES_AN_OPERATION / 1024).clamp(LEAST_KIB, MOST_KIB);
        u32::try_from(kib).unwrap_or(u32::MAX)
    }

    fn finish(mut self, mut guest: Run, name: &str, folder: &Path) -> Result<Outcome> {
        let Some(mut round) = guest.rounds.pop() else {
            return Err(Error::Protocol("the guest has recorded no round".into()));
        };
        let traced = self.collectors.iter().map(|one| one.name().to_owned());
        round.traced.extend(traced);
        round.name = name.to_owned();
        let offset = match self.offsets.as_slice() {
            [before, after] => attach::guest_offset(before, after),
            _ => Ok(None),
        };
        let offset = offset.unwrap_or_else(|why| {
            self.problems.push(why.to_owned());
            None
        });
        round.clocks = Clocks {
            host: self.pairs,
            realtime_minus_monotonic_ns: tracers::realtime_minus_monotonic_ns(),
            guest_offset: offset,
            ..round.clocks
        };
        let mut outcome = Outcome {
            round,
            problems: self.problems,
            guest,
        };
        outcome.problems.append(&mut outcome.guest.problems);
        outcome.add(tracers::stop_all(self.collectors, folder));
        Ok(outcome)
    }
}

impl Outcome {
    fn add(&mut self, collected: Collected) {
        self.round.streams.extend(collected.streams);
        self.problems.extend(collected.problems);
    }
}
