//! Pages that were read from an instance's ring buffers, per CPU, and their conversion to an event
//! file.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::RangeInclusive;
use std::path::Path;

use fathom_run::{Event, Kind, StreamWriter};

use super::format::Layout;
use super::page::Page;
use super::plan::Plan;
use crate::error::{Error, Result};

/// Pages of one CPU in the order in which they were filled, without their unused ends.
#[derive(Clone, Debug, Default)]
pub struct CpuPages {
    /// Number of the CPU.
    pub cpu: u16,
    /// The concatenated pages, and the end offset of each page.
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl CpuPages {
    /// Creates an empty list of pages.
    pub fn new(cpu: u16) -> CpuPages {
        CpuPages {
            cpu,
            ..CpuPages::default()
        }
    }

    /// Appends the used part of a page. Empty pages are skipped.
    pub fn push(&mut self, page: &[u8], layout: &Layout) {
        let used = Page::used(page, layout);
        if used > layout.data {
            self.bytes.extend_from_slice(&page[..used]);
            self.ends.push(self.bytes.len());
        }
    }

    /// Returns the memory in use, in bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns whether there are no pages.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    fn page(&self, index: usize) -> Option<&[u8]> {
        let end = *self.ends.get(index)?;
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        self.bytes.get(start..end)
    }

    fn events<'a>(&'a self, plan: &'a Plan, layout: &'a Layout) -> CpuEvents<'a> {
        CpuEvents {
            pages: self,
            plan,
            layout,
            next: 0,
            page: None,
            missed: 0,
            damaged: 0,
        }
    }
}

/// Iterator over the events of one CPU.
struct CpuEvents<'a> {
    pages: &'a CpuPages,
    plan: &'a Plan,
    layout: &'a Layout,
    next: usize,
    page: Option<Page<'a>>,
    missed: u64,
    damaged: u64,
}

impl Iterator for CpuEvents<'_> {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        loop {
            let cpu = self.pages.cpu;
            if let Some(page) = &mut self.page {
                for record in page.by_ref() {
                    if let Some(event) = self.plan.event(cpu, &record) {
                        return Some(event);
                    }
                }
                self.damaged += u64::from(page.is_damaged());
            }
            let bytes = self.pages.page(self.next)?;
            self.next += 1;
            self.page = Page::parse(bytes, self.layout);
            match &self.page {
                None => self.damaged += 1,
                Some(page) => {
                    if let Some(count) = page.missed() {
                        self.missed += count;
                        return Some(Event::new(page.time(), Kind::Lost, cpu, 0, &[count]));
                    }
                }
            }
        }
    }
}

/// Result of writing events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Number of written events.
    pub events: u64,
    /// Number of missing events that page headers report.
    pub missed: u64,
    /// Number of pages that ended within a record.
    pub damaged: u64,
    /// Number of events older than their predecessor on the same CPU. The written events are
    /// sorted.
    pub disorder: u64,
}

/// Selects the events to write.
#[derive(Clone, Debug)]
pub struct Selection {
    /// Time range of the events to keep.
    pub kept: RangeInclusive<u64>,
    /// Number of events that are known to be missing at the end.
    pub dropped: u64,
}

/// Writes the events of all CPUs in order of time.
///
/// # Errors
/// When the file cannot be written.
pub fn write(
    cpus: &[CpuPages],
    plan: &Plan,
    layout: &Layout,
    what: &Selection,
    path: &Path,
) -> Result<Written> {
    let mut sink = Sink::create(path, plan.width(), what)?;
    let written = merge(cpus, plan, layout, &mut |event| sink.push(event))?;
    if written.disorder == 0 {
        return sink.finish(written);
    }
    // The first writer must be dropped before the file is recreated, or it would flush into the new
    // file.
    drop(sink);
    // A clock that stepped back, or damage, has caused the disorder. Both are rare, so sorting in
    // memory is acceptable.
    let mut events = Vec::new();
    for cpu in cpus {
        events.extend(cpu.events(plan, layout));
    }
    events.sort_by_key(|event| event.time);
    let sorted = write_sorted(&events, plan.width(), what, path)?;
    Ok(Written {
        events: sorted.events,
        ..written
    })
}

/// Writes events that are already in order of time.
pub(super) fn write_sorted(
    events: &[Event],
    width: usize,
    what: &Selection,
    path: &Path,
) -> Result<Written> {
    let mut sink = Sink::create(path, width, what)?;
    for event in events {
        sink.push(event)?;
    }
    sink.finish(Written::default())
}

/// Passes the events of all CPUs to `sink` in order of time. After the first event that is out of
/// order on its CPU, events are only counted.
fn merge(
    cpus: &[CpuPages],
    plan: &Plan,
    layout: &Layout,
    sink: &mut dyn FnMut(&Event) -> Result<()>,
) -> Result<Written> {
    let mut sources: Vec<CpuEvents> = cpus.iter().map(|cpu| cpu.events(plan, layout)).collect();
    let mut heads: Vec<Option<Event>> = sources.iter_mut().map(Iterator::next).collect();
    let mut heap: BinaryHeap<Reverse<(u64, usize)>> = heads
        .iter()
        .enumerate()
        .filter_map(|(cpu, head)| Some(Reverse((head.as_ref()?.time, cpu))))
        .collect();
    let mut written = Written::default();
    while let Some(Reverse((time, cpu))) = heap.pop() {
        if let Some(event) = heads[cpu].take().filter(|_| written.disorder == 0) {
            sink(&event)?;
        }
        if let Some(next) = sources[cpu].next() {
            written.disorder += u64::from(next.time < time);
            heap.push(Reverse((next.time, cpu)));
            heads[cpu] = Some(next);
        }
    }
    for source in &sources {
        written.missed += source.missed;
        written.damaged += source.damaged;
    }
    Ok(written)
}

/// Writes an event file, and appends a [`Kind::Lost`] event for the events missing at the end.
struct Sink<'a> {
    writer: StreamWriter,
    what: &'a Selection,
    last: u64,
}

impl Sink<'_> {
    fn create<'a>(path: &Path, width: usize, what: &'a Selection) -> Result<Sink<'a>> {
        let writer = StreamWriter::create(path, width, Vec::new());
        Ok(Sink {
            writer: writer.map_err(unwritten)?,
            what,
            last: 0,
        })
    }

    fn push(&mut self, event: &Event) -> Result<()> {
        if !self.what.kept.contains(&event.time) {
            return Ok(());
        }
        self.last = event.time;
        self.writer.push(event).map_err(unwritten)
    }

    fn finish(mut self, written: Written) -> Result<Written> {
        let dropped = self.what.dropped;
        if dropped > 0 {
            let lost = Event::new(self.last, Kind::Lost, 0, 0, &[dropped]);
            self.writer.push(&lost).map_err(unwritten)?;
        }
        let events = self.writer.finish().map_err(unwritten)?;
        Ok(Written { events, ..written })
    }
}

/// Converts an error of the run directory, which already names the file and the reason.
pub(crate) fn unwritten(error: fathom_run::Error) -> Error {
    Error::Protocol(error.to_string())
}
