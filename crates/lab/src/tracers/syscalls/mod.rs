//! Records the system calls of threads and their scheduling, like strace but without stopping them.

use std::path::Path;

use fathom_run::{Kind, Pair};

use super::ftrace::{Mode, Recorder, Side, Source};
use super::scene::Scene;
use super::{Collected, Collector, Tracefs, boxed};
use crate::error::{Error, Result};

/// Name of the event file and of the collector in a round's list.
pub const NAME: &str = "syscalls";

pub(super) const ENTER: &[Source] = &[
    Source::Field("id"),
    Source::Element("args", 0),
    Source::Element("args", 1),
    Source::Element("args", 2),
    Source::Element("args", 3),
];
pub(super) const EXIT: &[Source] = &[Source::Field("id"), Source::Field("ret")];
pub(super) const SWITCH: &[Source] = &[
    Source::Field("prev_pid"),
    Source::Field("prev_state"),
    Source::Field("next_pid"),
];
const WAKEUP: &[Source] = &[Source::Field("pid"), Source::Field("target_cpu")];

/// Options of the recording.
#[derive(Clone, Debug)]
pub struct Options<'a> {
    /// Threads to record, and those that they start later. Threads of this process are not allowed:
    /// reading the trace would cause new events endlessly.
    pub threads: &'a [u32],
    /// When the kernel's buffers are read, and their size.
    pub mode: Mode,
}

/// A running recording of system calls.
#[derive(Debug)]
pub struct Syscalls {
    recorder: Recorder,
    name: &'static str,
}

/// Records the calls of the scene's QEMU and disk server.
pub(super) fn in_scene(scene: &Scene) -> Option<Result<Box<dyn Collector>>> {
    let options = Options {
        threads: scene.threads,
        mode: scene.mode,
    };
    Some(boxed(start(scene.tracefs, &options)))
}

/// Starts to record all system calls of the threads, and their scheduling.
///
/// # Errors
/// When the kernel cannot trace system calls, or a thread belongs to this process.
pub fn start(tracefs: &Tracefs, options: &Options) -> Result<Syscalls> {
    let mut recorder = begin(tracefs, NAME, options, None)?;
    recorder.event("sched/sched_switch", None, Kind::SchedSwitch, SWITCH);
    recorder.event("sched/sched_wakeup", None, Kind::SchedWakeup, WAKEUP);
    recorder.start()?;
    Ok(Syscalls {
        recorder,
        name: NAME,
    })
}

/// Starts to record only the system calls with these numbers, without scheduling.
pub(super) fn start_some(
    tracefs: &Tracefs,
    name: &'static str,
    options: &Options,
    numbers: &[u64],
) -> Result<Syscalls> {
    let terms: Vec<String> = numbers.iter().map(|nr| format!("id == {nr}")).collect();
    let mut recorder = begin(tracefs, name, options, Some(&terms.join(" || ")))?;
    recorder.start()?;
    Ok(Syscalls { recorder, name })
}

fn begin(
    tracefs: &Tracefs,
    name: &'static str,
    options: &Options,
    filter: Option<&str>,
) -> Result<Recorder> {
    let own = format!("/proc/{}/task", std::process::id());
    let is_own = |tid: &&u32| Path::new(&own).join(tid.to_string()).exists();
    if let Some(tid) = options.threads.iter().find(is_own) {
        return Err(Error::Protocol(format!(
            "thread {tid} is the tracer's own; its system calls cannot be traced"
        )));
    }
    let mut recorder = Recorder::new(tracefs, name, options.mode)?;
    recorder.instance().only_threads(options.threads)?;
    recorder.event("raw_syscalls/sys_enter", filter, Kind::SysEnter, ENTER);
    recorder.event("raw_syscalls/sys_exit", filter, Kind::SysExit, EXIT);
    if recorder.is_empty() {
        return Err(Error::Missing {
            what: "the kernel's trace of system calls".into(),
            hint: "the kernel needs CONFIG_FTRACE_SYSCALLS",
        });
    }
    Ok(recorder)
}

impl Collector for Syscalls {
    fn name(&self) -> &'static str {
        self.name
    }

    fn halt(&mut self) -> Result<()> {
        self.recorder.halt()
    }

    fn keep(&mut self, since: Pair, until: Pair) {
        self.recorder.keep(since, until);
    }

    fn stop(self: Box<Self>, round: &Path) -> Result<Collected> {
        self.recorder.finish(round, Side::Host)
    }
}
