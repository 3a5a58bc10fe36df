//! Records a running QEMU from the host alone: `fathom breakdown --pid`.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fathom_run::{Environment, Kind, Round, Run, RunKind, Stream};

use super::window::{refuse_to_overwrite, take, trace_clock};
use super::{Qemu, guest_offset, tsc_offsets};
use crate::environment;
use crate::error::{Error, Result};
use crate::tracers::ftrace::Mode;
use crate::tracers::on_host::{self, Start};
use crate::tracers::scene::Scene;
use crate::tracers::{Collector, Tracefs, io_calls, kvm, symbols, syscalls};

/// Options of the recording.
#[derive(Clone, Debug)]
pub struct Options<'a> {
    /// Process id of the QEMU to record.
    pub pid: u32,
    /// A monitor socket of QEMU that no other program uses.
    pub qmp: Option<&'a Path>,
    /// Name of the disk to record; required if there are several.
    pub disk: Option<&'a str>,
    /// Length of each of the two windows.
    pub window: Duration,
    /// The run directory to create.
    pub output: &'a Path,
    /// The caller sets this flag to end the recording early. The events until then stay usable.
    pub stop: &'a AtomicBool,
}

/// Names of the rounds: requests through the layers, then the threads' system calls, which cost
/// more.
const LAYERS: &str = "layers";
const SYSCALLS: &str = "syscalls";
const KIB_PER_CPU: u32 = 16 << 10;

/// Records both windows into a new run directory. Collectors that cannot run are listed in the
/// run's problems.
///
/// # Errors
/// When the process is not QEMU, the disk cannot be chosen, no collector can record, or the
/// directory cannot be written.
pub fn record(options: &Options, say: &mut dyn FnMut(&str)) -> Result<Run> {
    let tracefs = Tracefs::open()?;
    let mut qemu = Qemu::inspect(options.pid, options.qmp)?;
    let chosen = qemu.choose(options.disk)?;
    qemu.disks[chosen].disk.under_test = true;
    refuse_to_overwrite(options.output)?;
    let mut problems = std::mem::take(&mut qemu.problems);
    let mut rounds = Vec::new();
    for (name, which) in [(LAYERS, on_host::LAYERS), (SYSCALLS, on_host::CALLS)] {
        say(&format!("{name}: {} s", options.window.as_secs_f32()));
        let mut window = Window::new(&qemu, chosen, name);
        window.watch(&tracefs, which);
        problems.append(&mut window.problems);
        if let Some(round) = window.run(options, &mut problems)? {
            rounds.push(round);
        }
        qemu.look_at_threads();
        if options.stop.load(Ordering::Relaxed) {
            break;
        }
    }
    if rounds.is_empty() {
        return Err(Error::Protocol(format!(
            "no collector can record: {}",
            problems.join("; ")
        )));
    }
    problems.extend(qemu.disks[chosen].look_at_extents());
    identify(&mut qemu, chosen, options.output, &mut problems);
    let run = run_of(qemu, chosen, rounds, problems);
    run.save(options.output)?;
    Ok(run)
}

/// A window and its collectors.
struct Window<'a> {
    qemu: &'a Qemu,
    chosen: usize,
    name: &'static str,
    collectors: Vec<Box<dyn Collector>>,
    problems: Vec<String>,
}

impl<'a> Window<'a> {
    fn new(qemu: &'a Qemu, chosen: usize, name: &'static str) -> Window<'a> {
        Window {
            qemu,
            chosen,
            name,
            collectors: Vec::new(),
            problems: Vec::new(),
        }
    }

    /// Returns the threads on the chosen disk's path: QEMU's and its server's.
    fn threads(&self) -> Vec<u32> {
        let server = self.qemu.disks[self.chosen].disk.server_pid;
        let is_ours = |pid: u32| pid == self.qemu.pid || Some(pid) == server;
        let threads = self.qemu.threads.iter();
        threads
            .filter(|one| is_ours(one.pid))
            .map(|one| one.tid)
            .collect()
    }

    fn watch(&mut self, tracefs: &Tracefs, which: &[(&str, Start)]) {
        let found = &self.qemu.disks[self.chosen];
        let device = found.located.device.as_ref();
        let server = found.disk.server_pid.unwrap_or(self.qemu.pid);
        let scene = Scene {
            tracefs,
            mode: Mode::Live {
                kib_per_cpu: KIB_PER_CPU,
            },
            threads: &self.threads(),
            serving: &io_calls::threads_of(&self.qemu.threads, server),
            device: device.map(|device| (device.dev, &*found.located.partitions)),
            api: found.api.as_deref(),
            accelerator: &self.qemu.accelerator,
        };
        self.collectors = on_host::start(which, &scene, &mut self.problems);
    }

    /// Returns `None` if there is no collector.
    fn run(self, options: &Options, problems: &mut Vec<String>) -> Result<Option<Round>> {
        if self.collectors.is_empty() {
            return Ok(None);
        }
        let folder = options.output.join(self.name);
        let process = format!("/proc/{}/task", options.pid);
        let before = tsc_offsets(options.pid);
        let mut taken = take(self.collectors, &folder, options.window, || {
            options.stop.load(Ordering::Relaxed) || !Path::new(&process).exists()
        })?;
        let after = tsc_offsets(options.pid);
        taken.round.name = self.name.to_owned();
        match guest_offset(&before, &after) {
            Ok(offset) => taken.round.clocks.guest_offset = offset,
            Err(why) => problems.push(format!("{}: {why}", self.name)),
        }
        problems.append(&mut taken.problems);
        if self.name == SYSCALLS {
            match symbols::collect(&folder, &[syscalls::NAME], &self.qemu.threads) {
                Ok(named) => {
                    taken.round.streams.extend(named.streams);
                    problems.extend(named.problems);
                }
                Err(error) => problems.push(error.to_string()),
            }
        }
        Ok(Some(taken.round))
    }
}

/// Determines the disk's kicks and calls by the threads that used its eventfds.
fn identify(qemu: &mut Qemu, chosen: usize, output: &Path, problems: &mut Vec<String>) {
    const WRITE: u64 = 1;
    let open = |round: &str, name: &str| Stream::open(&output.join(round).join(name));
    let found = &mut qemu.disks[chosen];
    if let Ok(stream) = open(LAYERS, &format!("{}.events", kvm::NAME)) {
        let signals = stream
            .flatten()
            .filter(|event| event.kind == Kind::EventfdSignal);
        let signals = signals.map(|event| (event.args[0], event.tid));
        found.classify(&qemu.threads, signals);
        problems.extend(found.queue_problem());
    }
    let mut deeds = io_calls::Deeds::default();
    for (round, name) in [
        (LAYERS, io_calls::NAME),
        (LAYERS, kvm::NAME),
        (SYSCALLS, syscalls::NAME),
    ] {
        let stream = open(round, &format!("{name}.events"));
        let events = stream.into_iter().flatten().flatten();
        events.for_each(|event| deeds.add(&event));
    }
    deeds.tell_roles(&mut qemu.threads, found.disk.server_pid.unwrap_or(qemu.pid));
    if let Ok(stream) = open(SYSCALLS, &format!("{}.events", syscalls::NAME)) {
        let writes = stream
            .flatten()
            .filter(|event| event.kind == Kind::SysEnter && event.args[0] == WRITE);
        let writes = writes.map(|event| (event.args[1], event.tid));
        found.called(&qemu.threads, writes);
    }
    if found.disk.identified_by.is_some() || qemu.accelerator != "kvm" {
        return;
    }
    let why = if found.eventfds.is_empty() {
        "QEMU and the server share no eventfd"
    } else {
        "no signal of its eventfds was recorded: no I/O, or no kprobe on eventfd_signal"
    };
    problems.push(format!(
        "{} is unidentified ({why}): its kicks and interrupts cannot be distinguished from those of \
         other devices; --qmp SOCKET identifies them by address",
        found.disk.name
    ));
}

fn run_of(qemu: Qemu, chosen: usize, rounds: Vec<Round>, problems: Vec<String>) -> Run {
    let found = &qemu.disks[chosen];
    let known = |what: &str, value: &Option<String>| {
        value
            .as_ref()
            .map_or(String::new(), |value| format!(", {what}={value}"))
    };
    let title = format!(
        "QEMU {}, disk {} ({}{}{})",
        qemu.pid,
        found.disk.name,
        found.disk.device,
        known("aio", &found.aio),
        known("cache", &found.cache),
    );
    Run {
        environment: Environment {
            accelerator: qemu.accelerator.clone(),
            qemu: qemu.version.clone(),
            ..environment::here(trace_clock(&rounds))
        },
        disks: qemu.disks.into_iter().map(|one| one.disk).collect(),
        threads: qemu.threads,
        rounds,
        problems,
        ..Run::new(RunKind::Host, title)
    }
}
