//! The activity of the host's threads: vCPUs in and out of the guest, system calls, interrupts
//! sent.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use fathom_run::{Event, Kind, Run};

use super::source::Watched;
use super::trace::{Flow, Trace, Track, Value};
use crate::calls::Call;

/// The open slice of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Open {
    Nothing,
    Guest,
    Exit,
    Call,
}

struct Line {
    track: u64,
    open: Open,
}

/// The tracks of all threads.
pub(super) struct Threads<'a> {
    run: &'a Run,
    lines: BTreeMap<u32, Line>,
    processes: BTreeSet<u32>,
    /// Number of events that may still be shown.
    left: usize,
    names: HashMap<u32, (u32, String)>,
}

impl<'a> Threads<'a> {
    /// Creates the tracks for at most `most` events.
    pub(super) fn new(run: &'a Run, most: usize) -> Threads<'a> {
        let threads = run.threads.iter();
        Threads {
            run,
            lines: BTreeMap::new(),
            processes: BTreeSet::new(),
            left: most,
            names: threads
                .map(|thread| (thread.tid, (thread.pid, thread.name.clone())))
                .collect(),
        }
    }

    /// Adds the events of a round's window. Returns true if there were too many events.
    pub(super) fn round(&mut self, trace: &mut Trace, round: &Watched, window: (i64, i64)) -> bool {
        let (mut full, mut last) = (false, window.0);
        round.events(window, |seen| {
            if !is_shown(seen.event.kind) {
                return true;
            }
            if self.left == 0 {
                full = true;
                return false;
            }
            self.left -= 1;
            last = seen.at;
            self.event(trace, seen.at, &seen.event);
            true
        });
        for line in self
            .lines
            .values_mut()
            .filter(|line| line.open != Open::Nothing)
        {
            trace.end(line.track, last);
            line.open = Open::Nothing;
        }
        full
    }

    fn event(&mut self, trace: &mut Trace, at: i64, event: &Event) {
        let line = self.line(trace, event.tid);
        match event.kind {
            Kind::KvmEntry => line.switch(trace, at, Open::Guest, "in the guest", &[]),
            Kind::KvmExit => {
                let said = [("reason", Value::Uint(event.args[0]))];
                line.switch(trace, at, Open::Exit, "exit", &said);
            }
            Kind::SysEnter => {
                let call = Call::new(event.args[0], event.args[2]);
                line.call(trace, at, &call.name());
            }
            Kind::SysExit => line.returned(trace, at),
            kind => {
                let args = kind.args().iter().zip(event.args);
                let said: Vec<(&str, Value)> =
                    args.map(|(name, arg)| (*name, Value::Uint(arg))).collect();
                trace.instant(line.track, at, kind.name(), &said);
            }
        }
    }

    fn line(&mut self, trace: &mut Trace, tid: u32) -> &mut Line {
        let known = self.names.get(&tid).cloned();
        let (pid, name) = known.unwrap_or_else(|| (tid, format!("thread {tid}")));
        if self.processes.insert(pid) {
            let main = self.run.threads.iter().find(|thread| thread.tid == pid);
            let main = main.map_or_else(|| format!("process {pid}"), |main| main.name.clone());
            trace.track(Track::Process(pid, &main));
        }
        self.lines.entry(tid).or_insert_with(|| Line {
            track: trace.track(Track::Thread(pid, tid, &name)),
            open: Open::Nothing,
        })
    }
}

/// Returns whether events of this kind are actions of their thread.
fn is_shown(kind: Kind) -> bool {
    use Kind::*;
    matches!(
        kind,
        KvmEntry
            | KvmExit
            | SysEnter
            | SysExit
            | KvmMmio
            | KvmFastMmio
            | KvmPio
            | KvmUserspaceExit
            | KvmMsiSetIrq
            | KvmSetIrq
            | KvmVcpuWakeup
            | EventfdSignal
    )
}

impl Line {
    /// A vCPU enters or leaves the guest: ends the open slice and begins the next.
    fn switch(&mut self, trace: &mut Trace, at: i64, to: Open, name: &str, said: &[(&str, Value)]) {
        if matches!(self.open, Open::Guest | Open::Exit) {
            trace.end(self.track, at);
        }
        // The call KVM_RUN contains the vCPU's entries and exits, which show more detail.
        if self.open == Open::Call {
            trace.end(self.track, at);
        }
        trace.slice(self.track, at, name, Flow::None, said);
        self.open = to;
    }

    fn call(&mut self, trace: &mut Trace, at: i64, name: &str) {
        if self.open != Open::Nothing {
            trace.end(self.track, at); // the end of the open slice was lost
        }
        trace.slice(self.track, at, name, Flow::None, &[]);
        self.open = Open::Call;
    }

    fn returned(&mut self, trace: &mut Trace, at: i64) {
        if self.open != Open::Nothing {
            trace.end(self.track, at);
            self.open = Open::Nothing;
        }
    }
}
