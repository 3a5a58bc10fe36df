//! One instance that records into one file of events: what every collector over tracefs is made
//! of.

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
    /// After the window: costs nothing during it. What does not fit any more is dropped.
    Buffered { kib_per_cpu: u32 },
    /// All the time, by a thread: for windows of any length. What the thread is too slow for is
    /// overwritten.
    Live { kib_per_cpu: u32 },
}

/// Which side of the machine is being recorded: it names the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Host,
    Guest,
}

impl Side {
    /// The clock of this side's events.
    pub fn clock(self, clock: TraceClock) -> Clock {
        match (self, clock) {
            (Side::Host, TraceClock::Tsc) => Clock::HostTsc,
            (Side::Host, TraceClock::Monotonic) => Clock::HostMonotonic,
            (Side::Guest, TraceClock::Tsc) => Clock::GuestTsc,
            (Side::Guest, TraceClock::Monotonic) => Clock::GuestMonotonic,
        }
    }
}

/// A recording of one instance.
#[derive(Debug)]
pub struct Recorder {
    // Fields are dropped in order: the thread's files are closed before the instance goes.
    drain: Option<Drain>,
    name: &'static str,
    instance: Instance,
    layout: Layout,
    plan: Plan,
    /// For a kernel whose pages cannot be read.
    text: TextReader,
    functions: Vec<(String, Kind)>,
    /// Events that its text does not tell.
    untold: Vec<String>,
    mode: Mode,
    clock: TraceClock,
    events: usize,
    /// Times of events that are kept.
    kept: RangeInclusive<u64>,
    problems: Vec<String>,
}

impl Recorder {
    /// Makes an instance for the file `NAME.events`; nothing is traced yet.
    ///
    /// # Errors
    /// When the kernel makes no instance or has no memory for its buffers.
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

    /// The instance, for settings of a collector's own.
    pub fn instance(&mut self) -> &mut Instance {
        &mut self.instance
    }

    /// The clock of its events.
    pub fn clock(&self) -> TraceClock {
        self.clock
    }

    /// Records an event. One that this kernel does not have, or that cannot be used, becomes a
    /// line for the report; returns whether it is recorded.
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

    /// Records the same if the kernel has it; no word if not.
    pub fn optional(
        &mut self,
        event: &str,
        filter: Option<&str>,
        kind: Kind,
        args: &[Source],
    ) -> bool {
        self.instance.tracefs().has_event(event) && self.event(event, filter, kind, args)
    }

    /// Records calls of a kernel function by a probe on its entry; `fetch` names the arguments as
    /// kprobe_events takes them.
    ///
    /// # Errors
    /// When it cannot be probed.
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

    /// Records calls of kernel functions by the function tracer; they have no arguments.
    ///
    /// # Errors
    /// When there is no function tracer for them, or no addresses to tell them by.
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

    /// Tells events of one device as another's.
    pub fn alias_device(&mut self, from: u64, to: u64) {
        self.plan.alias_device(from, to);
    }

    /// A line for the report's reader.
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

    /// Whether there is anything to record.
    pub fn is_empty(&self) -> bool {
        self.events == 0
    }

    /// Begins to trace.
    ///
    /// # Errors
    /// When the buffers cannot be opened.
    pub fn start(&mut self) -> Result<()> {
        if let Mode::Live { kib_per_cpu } = self.mode {
            match Buffers::open(&self.instance, self.layout) {
                Ok(buffers) => self.drain = Some(Drain::start(buffers, kib_per_cpu)?),
                Err(error) => self.problem(format!("{error}; its text is read at the end")),
            }
        }
        self.instance.on()
    }

    /// Stops tracing, and nothing else: quick, so that the windows of several recordings end
    /// together.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn halt(&mut self) -> Result<()> {
        self.instance.off()
    }

    /// Keeps only what happened between two instants.
    pub fn keep(&mut self, since: Pair, until: Pair) {
        self.kept = match self.clock {
            TraceClock::Tsc => since.tsc..=until.tsc,
            TraceClock::Monotonic => since.monotonic_ns..=until.monotonic_ns,
        };
    }

    /// Writes what was recorded into `NAME.events` in the folder `round`, and removes the
    /// instance.
    ///
    /// # Errors
    /// When the buffers cannot be read or the file not be written.
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

    /// What is still in the buffers, as text.
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
        // Of what is overwritten the pages tell the place; of the rest only the number is known.
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
