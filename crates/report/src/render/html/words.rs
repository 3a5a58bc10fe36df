//! Names and sentences of HTML reports.

use fathom_run::{Machine, Role, Scenario, Thread};
use serde::Serialize;

use crate::analysis::{Group, Layer, Point};
use crate::render::text;

/// A layer's name in JSON and in the palette.
pub(super) fn layer_key(layer: Layer) -> String {
    key(layer)
}

pub(super) fn group_key(group: Group) -> String {
    key(group)
}

/// A layer's variable in palette.css.
pub(super) fn layer_colour(layer: Layer) -> String {
    format!("--l-{}", key(layer))
}

pub(super) fn group_colour(group: Group) -> String {
    format!("--g-{}", key(group))
}

/// `host issue`.
pub(super) fn point_name(point: Point) -> String {
    key(point).replace('_', " ")
}

fn key<T: Serialize>(value: T) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(name)) => name,
        _ => String::new(),
    }
}

/// A time with its unit; the terminal has only ASCII, a page has the micro sign.
pub(super) fn duration(ns: f64) -> String {
    text::duration(ns).replace(" us", " \u{b5}s")
}

/// Digits in groups of three.
pub(super) fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// `1 request`, `4,500 requests`.
pub(super) fn plural(count: u64, one: &str) -> String {
    let s = if count == 1 { "" } else { "s" };
    format!("{} {one}{s}", grouped(count))
}

fn role(thread: &Thread) -> String {
    match (thread.role, thread.vcpu) {
        (Role::Vcpu, Some(number)) => format!("vCPU {number}"),
        (Role::Vcpu, None) => "vCPU".to_owned(),
        (Role::Main, _) => "main loop".to_owned(),
        (Role::Io, _) => "I/O thread".to_owned(),
        (Role::Pool, _) => "thread of the pool".to_owned(),
        (Role::Other, _) => "other thread".to_owned(),
    }
}

/// A thread beside a time line or in a row.
pub(super) fn thread_short(thread: &Thread) -> String {
    format!("{} {}", thread.name, thread.tid)
}

/// A thread above its table.
pub(super) fn thread(thread: &Thread) -> String {
    let Thread { pid, tid, name, .. } = thread;
    format!("{name} ({}, thread {tid} of process {pid})", role(thread))
}

pub(super) fn collectors(traced: &[String]) -> String {
    match traced {
        [] => "nothing".to_owned(),
        traced => traced.join(", "),
    }
}

/// A kernel and its machine.
pub(super) fn machine(machine: &Machine) -> String {
    let cpus = match machine.cpus {
        0 => String::new(),
        count => plural(count.into(), "CPU"),
    };
    let parts = [
        after("Linux ", &machine.kernel),
        machine.cpu.clone(),
        cpus,
        after("clock source ", &machine.clock_source),
        after("traced by ", &machine.trace_clock),
    ];
    listed(parts)
}

pub(super) fn workload(scenario: &Scenario) -> String {
    listed([
        scenario.rw.clone(),
        format!("{} blocks", text::size(scenario.block_size)),
        format!("depth {}", scenario.iodepth),
        plural(scenario.queues.into(), "queue"),
    ])
}

pub(super) fn server(scenario: &Scenario) -> String {
    let polls = if scenario.polling {
        "polls"
    } else {
        "does not poll"
    };
    listed([
        scenario.server.clone(),
        after("aio=", &scenario.aio),
        after("cache=", &scenario.cache),
        polls.to_owned(),
    ])
}

/// `word` after `before`; nothing where there is no word.
fn after(before: &str, word: &str) -> String {
    if word.is_empty() {
        String::new()
    } else {
        format!("{before}{word}")
    }
}

/// Words with commas between them; those that are missing are left out.
pub(super) fn listed<const N: usize>(parts: [String; N]) -> String {
    let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    if parts.is_empty() {
        "unknown".to_owned()
    } else {
        parts.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_grouped_by_three() {
        let cases = [
            (0, "0"),
            (999, "999"),
            (1000, "1,000"),
            (1_234_567, "1,234,567"),
        ];
        for (count, told) in cases {
            assert_eq!(grouped(count), told);
        }
    }

    #[test]
    fn every_layer_has_a_colour_in_both_themes() {
        let palette = include_str!("page/palette.css");
        for &layer in Layer::ALL {
            let variable = format!("{}:", layer_colour(layer));
            assert_eq!(palette.matches(&variable).count(), 2, "{variable}");
            let variable = format!("{}:", group_colour(layer.describe().1));
            assert_eq!(palette.matches(&variable).count(), 2, "{variable}");
        }
    }
}
