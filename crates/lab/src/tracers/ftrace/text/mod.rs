//! Parses the kernel's trace as text (`trace`), if its pages cannot be read. Each event's `print
//! fmt` says how the line was printed. The parser inverts it into a record, which is then decoded
//! like one from a page.

mod events;
mod expr;

use std::collections::HashMap;

use super::format::{Field, Format, Shape};
use expr::Expr;

pub use events::{TextEvents, events};

/// A line of the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line<'a> {
    pub cpu: u16,
    pub tid: u32,
    /// The time as printed: ticks, or seconds with six decimal digits, converted to nanoseconds.
    pub time: u64,
    /// Name of the event, or of the function for the function tracer.
    pub event: &'a str,
    /// Text that the event printed, or `None` for a function.
    pub body: Option<&'a str>,
}

impl<'a> Line<'a> {
    /// Parses `COMM-TID [CPU] FLAGS TIME: EVENT: BODY`. COMM may hold any text, including digits
    /// and brackets, so every ` [` is tried in order until the rest of the line parses.
    pub fn parse(text: &'a str) -> Option<Line<'a>> {
        let mut from = 0;
        while let Some(at) = text[from..].find(" [") {
            let at = from + at;
            from = at + 2;
            if let Some(line) = Line::parse_at(&text[..at], &text[from..]) {
                return Some(line);
            }
        }
        None
    }

    fn parse_at(task: &str, rest: &'a str) -> Option<Line<'a>> {
        let (cpu, rest) = rest.split_once("] ")?;
        // With the option record-tgid, `(  161)` follows the thread id.
        let task = task
            .split_once(" (")
            .map_or(task, |(task, _)| task)
            .trim_end();
        let (_, tid) = task.rsplit_once('-')?;
        let (stamp, rest) = rest.split_once(": ")?;
        let time = parse_time(stamp.split_whitespace().next_back()?)?;
        let (event, body) = match (rest.split_once(": "), rest.split_once(" <-")) {
            (Some((event, body)), _) if !event.contains(' ') => (event, Some(body)),
            (_, Some((function, _))) => (function, None),
            _ => (rest.strip_suffix(':')?, Some("")),
        };
        Some(Line {
            cpu: cpu.trim().parse().ok()?,
            tid: tid.parse().ok()?,
            time,
            event,
            body,
        })
    }
}

fn parse_time(text: &str) -> Option<u64> {
    match text.split_once('.') {
        None => text.parse().ok(),
        Some((seconds, fraction)) if fraction.len() == 6 => {
            let seconds: u64 = seconds.parse().ok()?;
            let micros: u64 = fraction.parse().ok()?;
            seconds
                .checked_mul(1_000_000_000)?
                .checked_add(micros * 1000)
        }
        Some(_) => None,
    }
}

/// How an event is printed.
#[derive(Clone, Debug)]
struct Printed {
    format: Format,
    pieces: Vec<Piece>,
    /// Size of a record in bytes.
    size: usize,
}

#[derive(Clone, Debug)]
enum Piece {
    Literal(String),
    Conversion { is_hex: bool, expr: Expr },
}

/// Converts lines to records.
#[derive(Clone, Debug, Default)]
pub struct TextReader {
    events: HashMap<String, Printed>,
}

impl TextReader {
    /// Parses how an event is printed. `needed` are the fields that the text must determine.
    ///
    /// # Errors
    /// The name of a needed field that the text does not determine.
    pub fn add(&mut self, format: &Format, needed: &[&str]) -> Result<(), String> {
        let pieces = pieces_of(&format.print)
            .ok_or_else(|| format!("how {} is printed cannot be understood", format.name))?;
        let mut told = Vec::new();
        for piece in &pieces {
            if let Piece::Conversion { expr, .. } = piece {
                expr.fields(&mut told);
            }
        }
        if let Some(field) = needed
            .iter()
            .find(|name| told.iter().all(|one| one != *name))
        {
            return Err(format!(
                "the text of {} does not tell its field {field}",
                format.name
            ));
        }
        let size = format
            .fields
            .iter()
            .map(|field| field.offset + field.size)
            .max();
        let printed = Printed {
            format: format.clone(),
            pieces,
            size: size.unwrap_or(0),
        };
        self.events.insert(format.name.clone(), printed);
        Ok(())
    }

    /// Returns the record from which a line was printed, as far as the text determines its fields.
    pub fn record(&self, line: &Line) -> Option<Vec<u8>> {
        let printed = self.events.get(line.event)?;
        let mut record = vec![0; printed.size];
        let tid = u64::from(line.tid);
        put(
            &mut record,
            printed.format.field("common_type")?,
            0,
            u64::from(printed.format.id),
        );
        put(&mut record, printed.format.field("common_pid")?, 0, tid);
        printed.scan(line.body?, &mut record)?;
        Some(record)
    }
}

impl Printed {
    fn scan(&self, mut text: &str, record: &mut [u8]) -> Option<()> {
        for (index, piece) in self.pieces.iter().enumerate() {
            match piece {
                Piece::Literal(literal) => text = text.strip_prefix(literal.as_str())?,
                Piece::Conversion { is_hex, expr } => {
                    let length = match self.pieces.get(index + 1) {
                        None => text.len(),
                        Some(Piece::Literal(next)) => text.find(next.as_str())?,
                        // Without a literal in between, the length follows from the expression:
                        // words and numbers differ.
                        Some(Piece::Conversion { .. }) => length_of(expr, text, *is_hex),
                    };
                    let (word, rest) = text.split_at(length);
                    text = rest;
                    self.store(expr, word, *is_hex, record);
                }
            }
        }
        text.trim_end().is_empty().then_some(())
    }

    /// Stores a printed value. Returns false if the expression cannot have printed the text.
    fn store(&self, expr: &Expr, text: &str, is_hex: bool, record: &mut [u8]) -> bool {
        match expr {
            Expr::Number {
                field,
                element,
                shift,
            } => {
                let Some(field) = self.format.field(field) else {
                    return false;
                };
                if is_text(field) {
                    return put_text(record, field, text);
                }
                let Some(value) = parse_number(text, is_hex) else {
                    return false;
                };
                put(record, field, *element, value << shift)
            }
            Expr::Words {
                field,
                shift,
                words,
            } => {
                let found = words.iter().find(|(_, word)| word == text);
                // A value without a word is printed in hexadecimal.
                let value = found
                    .map(|(value, _)| *value)
                    .or_else(|| parse_number(text.strip_prefix("0x")?, true));
                match (self.format.field(field), value) {
                    (Some(field), Some(value)) => put(record, field, 0, value << shift),
                    _ => false,
                }
            }
            Expr::Choice {
                field,
                value,
                yes,
                no,
            } => {
                let Some(field) = self.format.field(field) else {
                    return false;
                };
                if self.store(yes, text, is_hex, record) {
                    return put(record, field, 0, *value);
                }
                // The other value is not printed. As the field has two values, it is taken to be
                // the next one.
                self.store(no, text, is_hex, record) && put(record, field, 0, value.wrapping_add(1))
            }
            Expr::Unknown => true,
        }
    }
}

/// Returns the length of the text that an expression can have printed.
fn length_of(expr: &Expr, text: &str, is_hex: bool) -> usize {
    match expr {
        Expr::Number { .. } => {
            let is_digit = |c: char| c.is_ascii_digit() || (is_hex && c.is_ascii_hexdigit());
            text.find(|c| !is_digit(c)).unwrap_or(text.len())
        }
        Expr::Words { words, .. } => {
            let fitting = words
                .iter()
                .filter(|(_, word)| text.starts_with(word.as_str()));
            fitting.map(|(_, word)| word.len()).max().unwrap_or(0)
        }
        Expr::Choice { yes, no, .. } => {
            length_of(yes, text, is_hex).max(length_of(no, text, is_hex))
        }
        Expr::Unknown => 0,
    }
}

fn is_text(field: &Field) -> bool {
    field.elements > 1 && field.elements == field.size
}

fn parse_number(text: &str, is_hex: bool) -> Option<u64> {
    let text = text.trim();
    let text = text.strip_prefix("0x").unwrap_or(text);
    if is_hex {
        return u64::from_str_radix(text, 16).ok();
    }
    match text.strip_prefix('-') {
        Some(digits) => digits.parse::<u64>().ok().map(u64::wrapping_neg),
        None => text.parse().ok(),
    }
}

/// Adds the bits of a number to a field, because a field may be printed in two parts.
fn put(record: &mut [u8], field: &Field, element: usize, value: u64) -> bool {
    if field.shape != Shape::Plain || element >= field.elements {
        return false;
    }
    let size = field.size / field.elements;
    let at = field.offset + element * size;
    let Some(place) = record.get_mut(at..at + size) else {
        return false;
    };
    for (byte, new) in place.iter_mut().zip(value.to_le_bytes()) {
        *byte |= new;
    }
    true
}

fn put_text(record: &mut [u8], field: &Field, text: &str) -> bool {
    let place = record.get_mut(field.offset..field.offset + field.size);
    match place {
        Some(place) if text.len() < place.len() => {
            place[..text.len()].copy_from_slice(text.as_bytes());
            true
        }
        _ => false,
    }
}

/// Parses `"(%lx) vq=0x%Lx", REC->__probe_ip, REC->vq` into literals and conversions.
fn pieces_of(print: &str) -> Option<Vec<Piece>> {
    let (text, rest) = expr::first_literal(print)?;
    let rest = rest.trim_start().strip_prefix(',').unwrap_or(rest);
    let mut arguments = expr::split(rest).into_iter();
    let (mut pieces, mut literal) = (Vec::new(), String::new());
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            literal.push(letter);
            continue;
        }
        let is_modifier = |c: &char| "-+ #0123456789.lLhzq".contains(*c);
        while letters.next_if(is_modifier).is_some() {}
        let is_hex = match letters.next()? {
            '%' => {
                literal.push('%');
                continue;
            }
            'x' | 'X' | 'p' => true,
            'd' | 'i' | 'u' | 's' | 'c' => false,
            _ => return None,
        };
        if !literal.is_empty() {
            pieces.push(Piece::Literal(std::mem::take(&mut literal)));
        }
        let expr = Expr::parse(arguments.next()?);
        pieces.push(Piece::Conversion { is_hex, expr });
    }
    if !literal.is_empty() {
        pieces.push(Piece::Literal(literal));
    }
    Some(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lines_are_taken_apart_whatever_the_command_is() {
        let line =
            Line::parse("  CPU 0/KVM-159     [001] d..2. 114687353036: kvm_entry: vcpu 0, rip 0x1");
        let wanted = Line {
            cpu: 1,
            tid: 159,
            time: 114_687_353_036,
            event: "kvm_entry",
            body: Some("vcpu 0, rip 0x1"),
        };
        assert_eq!(line, Some(wanted));
        let odd = "  a [0] b: c-7 [000] d.h1.  12.000345: vring_interrupt <-handle_irq: x";
        let wanted = Line {
            cpu: 0,
            tid: 7,
            time: 12_000_345_000,
            event: "vring_interrupt",
            body: None,
        };
        assert_eq!(Line::parse(odd), Some(wanted));
        let with_tgid = "  sh-7   (   99) [000] .....  12: sys_exit: NR 1 = 2";
        assert_eq!(Line::parse(with_tgid).map(|line| line.tid), Some(7));
        for none in [
            "",
            "# tracer: nop",
            "CPU:0 [LOST 12 EVENTS]",
            "x [y] z: a: b",
        ] {
            assert_eq!(Line::parse(none), None, "{none}");
        }
    }

    proptest! {
        #[test]
        fn no_line_and_no_print_format_is_too_strange(line in ".{0,80}", print in ".{0,80}") {
            let _ = Line::parse(&line);
            let _ = pieces_of(&print);
            let _ = pieces_of(&format!("\"%d {print}\", {line}"));
            let _ = Line::parse(&format!("a-1 [000] 5: {line}"));
        }
    }
}
