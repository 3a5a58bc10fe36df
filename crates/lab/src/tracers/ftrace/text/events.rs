//! Converts the text of a trace to events.

use fathom_run::{Event, Kind};

use super::{Line, TextReader};
use crate::tracers::ftrace::page::Record;
use crate::tracers::ftrace::plan::Plan;

/// Result of parsing a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextEvents {
    /// Events in order of time.
    pub events: Vec<Event>,
    /// Number of lines with wanted events that could not be parsed.
    pub damaged: u64,
}

/// Parses the text of `trace`. `functions` are the functions of the function tracer to keep.
pub fn events(
    reader: &TextReader,
    plan: &Plan,
    functions: &[(String, Kind)],
    text: &str,
) -> TextEvents {
    let mut found = TextEvents::default();
    let mut lost = None;
    for text in text.lines().filter(|line| !line.starts_with('#')) {
        if let Some(count) = lost_events(text) {
            lost = Some(lost.unwrap_or(0) + count);
            continue;
        }
        let Some(line) = Line::parse(text) else {
            found.damaged += u64::from(!text.trim().is_empty());
            continue;
        };
        if let Some(count) = lost.take() {
            let event = Event::new(line.time, Kind::Lost, line.cpu, 0, &[count]);
            found.events.push(event);
        }
        match event(reader, plan, functions, &line) {
            Ok(event) => found.events.extend(event),
            Err(()) => found.damaged += 1,
        }
    }
    found.events.sort_by_key(|event| event.time);
    found
}

/// Converts a line. Returns `None` for an event that is not wanted.
fn event(
    reader: &TextReader,
    plan: &Plan,
    functions: &[(String, Kind)],
    line: &Line,
) -> Result<Option<Event>, ()> {
    if line.body.is_none() {
        let function = functions.iter().find(|(name, _)| name == line.event);
        return Ok(function.map(|&(_, kind)| Event::new(line.time, kind, line.cpu, line.tid, &[])));
    }
    if !reader.events.contains_key(line.event) {
        return Ok(None);
    }
    let data = reader.record(line).ok_or(())?;
    let time = line.time;
    plan.event(line.cpu, &Record { time, data: &data })
        .map(Some)
        .ok_or(())
}

/// Parses `CPU:1 [LOST 12 EVENTS]`. The count is 0 if the kernel does not know it.
fn lost_events(text: &str) -> Option<u64> {
    let (_, rest) = text.strip_prefix("CPU:")?.split_once("[LOST ")?;
    let count = rest.split_whitespace().next()?;
    Some(count.parse().unwrap_or(0))
}
