//! Parses a QEMU build's `trace-events-all`, which lists the arguments of its events. QEMU's
//! docs/devel/tracing.rst describes the syntax.

use std::collections::HashMap;
use std::path::Path;

use super::unusable;
use crate::error::{Context, Result};

/// Encoding of an argument in the simple backend's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arg {
    /// A value of 64 bits.
    Number,
    /// A string: its length and its bytes.
    Text,
}

/// An event and its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventSchema {
    /// Name of the event.
    pub name: String,
    /// Encodings of the event's arguments, in order.
    pub args: Vec<Arg>,
}

/// The events of a build in the order of its file. Before format 4, an event's number is its
/// position there.
#[derive(Clone, Debug, Default)]
pub struct Schema {
    events: Vec<EventSchema>,
    by_name: HashMap<String, usize>,
}

impl Schema {
    /// Reads a `trace-events-all` (or `trace-events`) file.
    ///
    /// # Errors
    /// When the file cannot be read or a line is not an event.
    pub fn load(path: &Path) -> Result<Schema> {
        let text = std::fs::read_to_string(path)
            .context(|| format!("cannot read QEMU's trace events from {}", path.display()))?;
        Schema::parse(&text).map_err(|reason| unusable(path, reason))
    }

    /// Parses the text of such a file. The error names the wrong line.
    ///
    /// # Errors
    /// When a line is not an event, or the text has no events.
    pub fn parse(text: &str) -> std::result::Result<Schema, String> {
        let mut schema = Schema::default();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let event = event(line).ok_or_else(|| {
                format!("line {} is no trace event: {}", number + 1, excerpt(line))
            })?;
            let index = schema.events.len();
            schema.by_name.insert(event.name.clone(), index);
            schema.events.push(event);
        }
        if schema.events.is_empty() {
            return Err("no trace events".into());
        }
        Ok(schema)
    }

    /// Returns the event at this position in the file.
    pub fn by_number(&self, number: u64) -> Option<&EventSchema> {
        self.events.get(usize::try_from(number).ok()?)
    }

    /// Returns the event with this name.
    pub fn by_name(&self, name: &str) -> Option<&EventSchema> {
        self.by_name.get(name).map(|&index| &self.events[index])
    }
}

fn excerpt(line: &str) -> String {
    line.chars().take(60).collect()
}

/// Parses `[PROPERTY]... NAME(TYPE ARG, ...) "FORMAT"`.
fn event(line: &str) -> Option<EventSchema> {
    let (head, rest) = line.split_once('(')?;
    let (args, _format) = rest.split_once(')')?;
    let name = head.split_whitespace().next_back()?;
    let good = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if !name.chars().all(good) {
        return None;
    }
    let args = args.split(',').map(str::trim);
    let args = args.filter(|&arg| arg != "void" && !arg.is_empty());
    Some(EventSchema {
        name: name.to_owned(),
        args: args.map(arg).collect(),
    })
}

/// Classifies an argument. The simple backend treats these spellings as strings, and any other
/// pointer as a number.
fn arg(declaration: &str) -> Arg {
    const TEXT: [&str; 4] = ["const char*", "char*", "const char *", "char *"];
    if TEXT.iter().any(|text| declaration.starts_with(text)) {
        Arg::Text
    } else {
        Arg::Number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_syntax_of_tracing_rst_is_read() {
        let schema = Schema::parse(
            "# a comment\n\n\
             plain(void) \"\"\n\
             disable vcpu two(const char *name, void *p, uint64_t n) \"%s (%p) \" PRIu64\n\
             old(char*s, int8_t i) \"x\"\n",
        )
        .unwrap();
        assert!(schema.by_number(0).unwrap().args.is_empty());
        let two = schema.by_name("two").unwrap();
        assert_eq!(two.args, [Arg::Text, Arg::Number, Arg::Number]);
        assert_eq!(schema.by_number(1), Some(two));
        assert_eq!(schema.by_number(2).unwrap().args, [Arg::Text, Arg::Number]);
        assert_eq!(schema.by_number(3), None);
        assert_eq!(schema.by_number(u64::MAX), None);
    }

    #[test]
    fn another_file_is_told_from_it() {
        assert!(
            Schema::parse("root:x:0:0:root")
                .unwrap_err()
                .contains("line 1")
        );
        assert!(
            Schema::parse("# nothing\n")
                .unwrap_err()
                .contains("no trace events")
        );
        assert!(Schema::parse("a b-c(int x) \"\"").is_err());
    }
}
