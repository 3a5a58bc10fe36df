//! Records one tracefs instance into one event file. All collectors over tracefs use this module.

use std::ops::RangeInclusive;
use std::path::Path;

use fathom_run::{Clock, Kind, Pair, StreamInfo};

use super::drain::{Buffers, Drain};
use super::format::{Format, Layout};
use super::pages::{self, CpuPages, Selection, Written};
use super::plan::{Plan, Source, Symbols};
use super::text::{TextReader, events as text_events};
use crate::error::{Context, Result};
use crate::tracers::Collected;
use crate::tracers::tracefs::{Instance, TraceClock, Tracefs};

/// When the kernel's buffers are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// After the window, so that reading costs nothing during it. Events beyond the buffer's size
    /// are dropped.
    Buffered {
        /// Size of the kernel's buffer in KiB per CPU.
        kib_per_cpu: u32,
    },
    /// Continuously, by a thread, for windows of any length. Events that the thread reads too late
    /// are overwritten.
    Live {
        /// Size of the kernel's buffer in KiB per CPU.
        kib_per_cpu: u32,
    },
}

/// The side of the machine that is recorded. The side determines the name of the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Host's kernel.
    Host,
    /// Guest's kernel, recorded from inside the guest.
    Guest,
}

impl Side {
    /// Returns the clock of this side's events.
    pub fn clock(self, clock: TraceClock) -> Clock {
        match (self, clock) {
            (Side::Host, TraceClock::Tsc) => Clock::HostTsc,
            (Side::Host, TraceClock::Monotonic) => Clock::HostMonotonic,
            (Side::Guest, TraceClock::Tsc) => Clock::GuestTsc,
            (Side::Guest, TraceClock::Monotonic) => Clock::GuestMonotonic,
        }
    }
}

/// A recording of one tracefs instance.
#[derive(Debug)]
pub struct Recorder {
    // Fields are dropped in order: the thread must close its files before the instance is removed.
    drain: Option<Drain>,
    name: &'static str,
    instance: Instance,
    layout: Layout,
    plan: Plan,
    /// Text reader for a kernel whose pages cannot be read.
    text: TextReader,
    functions: Vec<(String, Kind)>,
    /// Reasons why the text of an event is not sufficient.
    untold: Vec<String>,
    mode: Mode,
    clock: TraceClock,
    events: usize,
    /// Time range of the events to keep.
    kept: RangeInclusive<u64>,
    problems: Vec<String>,
}

impl Recorder {
    /// Creates an instance for the file `NAME.events`. Tracing stays off.
    ///
    /// # Errors
    /// When the kernel creates no instance or has no memory for its buffers.
    pub fn new(tracefs: &Tracefs, name: &'static str, mode: Mode) -> Result<Recorder> {
        let instance = tracefs.instance(name)?;
        let clock = instance.set_clock()?;
        let (kib, overwrite) = match mode {
            Mode::Buffered { kib_per_cpu } => (kib_per_cpu, false),
            Mode::Live { kib_per_cpu } => (kib_per_cpu, true),
        };
        instance.set_buffer(kib)?;
        instance.set_option("overwrite", overwrite)?;
        Ok(Recorder {
            drain: None,
            name,
            layout: tracefs.layout()?,
            instance,
            plan: Plan::default(),
            text: TextReader::default(),
            functions: Vec::new(),
            untold: Vec::new(),
            mode,
            clock,
            events: 0,
            kept: 0..=u64::MAX,
            problems: Vec::new(),
        })
    }

    /// Returns the instance, for a collector's own settings.
    pub fn instance(&mut self) -> &mut Instance {
        &mut self.instance
    }

    /// Returns the clock of the recorded events.
    pub fn clock(&self) -> TraceClock {
        self.clock
    }

    /// Records an event and returns whether that succeeded. If this kernel lacks the event or the
    /// event is not usable, the reason is added to the report.
    pub fn event(
        &mut self,
        event: &str,
        filter: Option<&str>,
        kind: Kind,
        args: &[Source],
    ) -> bool {
        let format = self.instance.enable(event, filter);
        self.record_fields(format, kind, args)
    }

    /// Records an event if the kernel has it; otherwise nothing is reported.
    pub fn optional(
        &mut self,
        event: &str,
        filter: Option<&str>,
        kind: Kind,
        args: &[Source],
    ) -> bool {
        self.instance.tracefs().has_event(event) && self.event(event, filter, kind, args)
    }

    /// Records calls of a kernel function with a probe on its entry. `fetch` names the arguments in
    /// the syntax of kprobe_events.
    ///
    /// # Errors
    /// When the function cannot be probed.
    pub fn probe(
        &mut self,
        function: &str,
        fetch: &str,
        kind: Kind,
        args: &[Source],
    ) -> Result<()> {
        let format = self.instance.kprobe(function, fetch)?;
        self.record_fields(Ok(format), kind, args);
        Ok(())
    }

    /// Records calls of kernel functions with the function tracer. The events have no arguments.
    ///
    /// # Errors
    /// When /proc/kallsyms cannot be read, or the function tracer does not support the functions.
    pub fn functions(&mut self, functions: &[(&str, Kind)]) -> Result<()> {
        let names: Vec<&str> = functions.iter().map(|&(name, _)| name).collect();
        let kallsyms = std::fs::read_to_string("/proc/kallsyms")
            .context(|| "cannot read /proc/kallsyms".into())?;
        let kind_of = |name: &str| functions.iter().find(|one| one.0 == name).map(|one| one.1);
        let symbols = Symbols::parse(&kallsyms, kind_of);
        let format = self.instance.trace_functions(&names)?;
        let named = functions
            .iter()
            .map(|&(name, kind)| (name.to_owned(), kind));
        self.functions.extend(named);
        if symbols.is_empty() {
            self.problem("/proc/kallsyms hides addresses: set kernel.kptr_restrict to 1 or 0");
        }
        self.record(Ok(format), |plan, format| {
            plan.add_functions(format, symbols)
        });
        Ok(())
    }

    /// Reports events of the device `from` as events of the device `to`.
    pub fn alias_device(&mut self, from: u64, to: u64) {
        self.plan.alias_device(from, to);
    }

    /// Adds a line to the report.
    pub fn problem(&mut self, line: impl Into<String>) {
        let line: String = line.into();
        self.problems.push(format!("{}: {line}", self.name));
    }

    fn record_fields(&mut self, format: Result<Format>, kind: Kind, args: &[Source]) -> bool {
        if let Ok(format) = &format {
            let needed: Vec<&str> = args.iter().filter_map(|arg| arg.needed(format)).collect();
            if let Err(reason) = self.text.add(format, &needed) {
                self.untold.push(reason);
            }
        }
        self.record(format, |plan, format| plan.add(format, kind, args))
    }

    fn record(
        &mut self,
        format: Result<Format>,
        add: impl FnOnce(&mut Plan, &Format) -> std::result::Result<(), String>,
    ) -> bool {
        let added = match format {
            Ok(format) => add(&mut self.plan, &format),
            Err(error) => Err(error.to_string()),
        };
        match added {
            Ok(()) => self.events += 1,
            Err(problem) => {
                self.problem(problem);
                return false;
            }
        }
        true
    }

    /// Returns whether no event is recorded.
    pub fn is_empty(&self) -> bool {
        self.events == 0
    }

    /// Starts tracing.
    ///
    /// # Errors
    /// When the drain thread or tracing cannot be started.
    pub fn start(&mut self) -> Result<()> {
        if let Mode::Live { kib_per_cpu } = self.mode {
            match Buffers::open(&self.instance, self.layout) {
                Ok(buffers) => self.drain = Some(Drain::start(buffers, kib_per_cpu)?),
                Err(error) => self.problem(format!("{error}; its text is read at the end")),
            }
        }
        self.instance.on()
    }

    /// Stops tracing and nothing else. The call is quick, so that the windows of several recordings
    /// end together.
    ///
    /// # Errors
    /// When the kernel rejects it.
    pub fn halt(&mut self) -> Result<()> {
        self.instance.off()
    }

    /// Restricts the recording to the time between two instants.
    pub fn keep(&mut self, since: Pair, until: Pair) {
        self.kept = match self.clock {
            TraceClock::Tsc => since.tsc..=until.tsc,
            TraceClock::Monotonic => since.monotonic_ns..=until.monotonic_ns,
        };
    }

    /// Writes the recorded events to `NAME.events` in the folder `round`, and removes the instance.
    ///
    /// # Errors
    /// When the buffers cannot be read or the file cannot be written.
    pub fn finish(mut self, round: &Path, side: Side) -> Result<Collected> {
        self.halt()?;
        let path = round.join(format!("{}.events", self.name));
        let buffers = match self.drain.take() {
            Some(drain) => Ok(drain.finish()?),
            None => Buffers::open(&self.instance, self.layout).and_then(|mut buffers| {
                buffers.read()?;
                Ok(buffers)
            }),
        };
        let (written, lost) = match buffers {
            Ok(buffers) => self.write_pages(&buffers.into_pages(), &path)?,
            Err(_) => self.write_text(&path)?,
        };
        Ok(Collected {
            streams: vec![StreamInfo {
                name: self.name.to_owned(),
                clock: side.clock(self.clock),
                events: written.events,
                lost: Some(lost),
            }],
            problems: std::mem::take(&mut self.problems),
        })
    }

    /// Writes the events that are still in the buffers, from the text of the trace.
    fn write_text(&mut self, path: &Path) -> Result<(Written, u64)> {
        let text = self.instance.text()?;
        let found = text_events(&self.text, &self.plan, &self.functions, &text);
        for reason in std::mem::take(&mut self.untold) {
            self.problem(reason);
        }
        if found.damaged > 0 {
            let count = found.damaged;
            self.problem(format!("{count} lines of the kernel's trace make no sense"));
        }
        let lost = self.instance.stats().lost();
        let what = Selection {
            kept: self.kept.clone(),
            dropped: lost,
        };
        let written = pages::write_sorted(&found.events, self.plan.width(), &what, path)?;
        Ok((written, lost))
    }

    fn write_pages(&mut self, pages: &[CpuPages], path: &Path) -> Result<(Written, u64)> {
        let stats = self.instance.stats();
        // Pages mark where events were overwritten. For the other lost events only the number is
        // known.
        let unplaced = match self.mode {
            Mode::Buffered { .. } => stats.lost(),
            Mode::Live { .. } => stats.dropped + stats.entries,
        };
        let what = Selection {
            kept: self.kept.clone(),
            dropped: unplaced,
        };
        let written = pages::write(pages, &self.plan, &self.layout, &what, path)?;
        if written.damaged > 0 {
            let count = written.damaged;
            self.problem(format!("{count} pages of the kernel's trace were damaged"));
        }
        if written.disorder > 0 {
            let count = written.disorder;
            self.problem(format!(
                "{count} events were out of order and have been sorted"
            ));
        }
        let lost = (stats.lost() + stats.entries).max(written.missed + unplaced);
        Ok((written, lost))
    }
}
