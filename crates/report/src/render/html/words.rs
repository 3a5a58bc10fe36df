//! Names and texts of HTML reports.

use fathom_run::Thread;
use serde::Serialize;

use crate::analysis::{Group, Layer, Point};
use crate::render::text;

/// Returns a layer's name in JSON and in the palette.
pub(super) fn layer_key(layer: Layer) -> String {
    key(layer)
}

pub(super) fn group_key(group: Group) -> String {
    key(group)
}

/// Returns a layer's variable in palette.css.
pub(super) fn layer_colour(layer: Layer) -> String {
    format!("--l-{}", key(layer))
}

pub(super) fn group_colour(group: Group) -> String {
    format!("--g-{}", key(group))
}

/// Returns a point's name, such as `host issue`.
pub(super) fn point_name(point: Point) -> String {
    key(point).replace('_', " ")
}

fn key<T: Serialize>(value: T) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(name)) => name,
        _ => String::new(),
    }
}

/// Writes a time with its unit. A page has the micro sign, unlike the ASCII terminal.
pub(super) fn duration(ns: f64) -> String {
    text::duration(ns).replace(" us", " \u{b5}s")
}

/// Writes a count with its digits in groups of three.
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

/// Writes a count with its noun: `1 request`, `4,500 requests`.
pub(super) fn plural(count: u64, one: &str) -> String {
    let s = if count == 1 { "" } else { "s" };
    format!("{} {one}{s}", grouped(count))
}

/// Describes a thread next to a time line or in a row.
pub(super) fn thread_short(thread: &Thread) -> String {
    format!("{} {}", thread.name, thread.tid)
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
}
