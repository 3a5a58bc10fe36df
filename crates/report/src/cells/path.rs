//! The path of a point's requests as stacks, from the point's first cell that recorded it.

pub(super) mod html;
pub(super) mod terminal;

use std::path::Path;

use fathom_run::folded::{is_kernel, parts};
use fathom_run::{Crossing, Handed, Planned, RequestPath, Side, Stack};

use super::cell::{Problems, name};
use crate::render::text::{duration, plural};

/// Maximum number of devices of a path.
const MOST_DEVICES: usize = 8;
/// Maximum number of stacks of a device.
const MOST_STACKS: usize = 3;
/// Maximum number of frames of a stack.
const MOST_FRAMES: usize = 128;
/// The row about copies in the table of crossings.
const COPIES: [&str; 3] = ["copies", "not measured", "not measured"];

/// Reads the first path that a point's cells have.
pub(super) fn load(
    run: &Path,
    planned: &[&Planned],
    problems: &mut Problems,
) -> Option<RequestPath> {
    for planned in planned {
        match RequestPath::load(run, planned) {
            Ok(Some(read)) => return Some(bounded(read)),
            Ok(None) => {}
            Err(_) => {
                let id = name(&planned.id);
                problems.say(format!(
                    "cell {id}: the path of its requests cannot be read"
                ));
            }
        }
    }
    None
}

fn bounded(mut read: RequestPath) -> RequestPath {
    read.devices.truncate(MOST_DEVICES);
    read.between.truncate(Side::ALL.len() * Crossing::ALL.len());
    for one in &mut read.devices {
        one.device = name(&one.device);
        one.stacks.truncate(MOST_STACKS);
        for stack in &mut one.stacks {
            stack.thread = name(&stack.thread);
            stack.frames.truncate(MOST_FRAMES);
            stack
                .frames
                .iter_mut()
                .for_each(|frame| *frame = name(frame));
        }
    }
    read
}

/// A device on the path, with its texts.
struct Step<'a> {
    side: Side,
    title: String,
    /// The stack that most of the device's requests have.
    stack: &'a Stack,
    /// The time to the device and back, if the times are known.
    before: Option<String>,
    /// The stack's thread and depth, and, for the last device, the time in the device.
    notes: Vec<String>,
}

impl<'a> Step<'a> {
    /// Returns the steps in the order in which a request passes them.
    fn all(of: &'a RequestPath) -> Vec<Step<'a>> {
        let mut outer = of.total_ns;
        let mut steps = Vec::new();
        for (number, one) in (1..).zip(&of.devices) {
            let Some(stack) = one.stacks.first() else {
                continue;
            };
            let between = outer.zip(one.device_ns).map(|(outer, inner)| outer - inner);
            let before = between.filter(|ns| *ns >= 0.0);
            let mut notes = vec![whose(one, stack), depth(stack)];
            if number == of.devices.len() {
                let device = one.device_ns.map(duration);
                notes.extend(device.map(|time| format!("{time} in the device")));
            }
            steps.push(Step {
                side: one.side,
                title: format!("{}: {}", one.side.name(), one.device),
                stack,
                before: before.map(|ns| format!("{} until here and back", duration(ns))),
                notes,
            });
            outer = one.device_ns.or(outer);
        }
        steps
    }
}

fn whose(one: &Handed, stack: &Stack) -> String {
    let requests = plural(one.requests, "request");
    match one.requests == stack.requests {
        true => format!("{}, all of {requests}", stack.thread),
        false => format!("{}, {} of {requests}", stack.thread, stack.requests),
    }
}

fn depth(stack: &Stack) -> String {
    let frames = stack.frames.iter();
    let kernel = frames.filter(|frame| is_kernel(parts(frame).1)).count();
    let all = plural(stack.frames.len() as u64, "function");
    format!("{all}, {kernel} of the kernel")
}

/// Returns a frame's text; the kernel's own functions appear without their module.
fn said(frame: &str) -> &str {
    match parts(frame) {
        (symbol, "kernel") => symbol,
        _ => frame,
    }
}

/// Returns the table of crossings per request: its headings, and a row for each kind.
fn between(of: &RequestPath) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let sides: Vec<Side> = { Side::ALL.into_iter() }
        .filter(|side| of.devices.iter().any(|one| one.side == *side))
        .collect();
    let figure = |what: Crossing, side: &Side| {
        let mut all = of.between.iter();
        let found = all.find(|one| one.what == what && one.side == *side);
        found.map_or("-".to_owned(), |one| format!("{:.2}", one.per_request))
    };
    let is_counted = |what: &Crossing| of.between.iter().any(|one| one.what == *what);
    let mut rows: Vec<Vec<String>> = { Crossing::ALL.into_iter() }
        .filter(is_counted)
        .map(|what| {
            let figures = sides.iter().map(|side| figure(what, side));
            std::iter::once(words(what).to_owned())
                .chain(figures)
                .collect()
        })
        .collect();
    let copies = COPIES.iter().take(sides.len() + 1);
    rows.push(copies.map(|&word| word.to_owned()).collect());
    let headings = sides.iter().map(|side| side.name());
    (
        std::iter::once("for each request")
            .chain(headings)
            .collect(),
        rows,
    )
}

fn words(what: Crossing) -> &'static str {
    match what {
        Crossing::Exits => "VM exits",
        Crossing::Switches => "context switches",
        Crossing::WakeUps => "wake-ups",
        Crossing::Calls => "system calls",
    }
}
