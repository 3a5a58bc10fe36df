//! Formats a request as a line.

use fathom_core::{Clock, Op, Request, Stage, Stamps};
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Line,
    Json,
}

impl Format {
    pub(super) fn parse(text: &str) -> Result<Format, String> {
        match text {
            "line" => Ok(Format::Line),
            "json" => Ok(Format::Json),
            _ => Err(format!("'{text}' is not line or json")),
        }
    }
}

/// Data of a request, kept until it is written.
#[derive(Clone, Copy)]
pub(super) struct Record {
    op: Op,
    queue: u16,
    error: i32,
    offset: u64,
    len: u64,
    stamps: Stamps,
}

impl Record {
    pub(super) fn of(request: &Request) -> Record {
        Record {
            op: request.op,
            queue: request.queue,
            error: request.error,
            offset: request.offset,
            len: request.len,
            stamps: request.stamps,
        }
    }

    /// Appends the request and a line end.
    pub(super) fn write(&self, format: Format, out: &mut String) {
        match format {
            Format::Line => self.write_line(out),
            Format::Json => out.push_str(&self.to_json().to_string()),
        }
        out.push('\n');
    }

    fn write_line(&self, out: &mut String) {
        let seconds = self.start_ns() / 1_000_000_000;
        // Writing to a string cannot fail.
        let _ = write!(
            out,
            "{:02}:{:02}:{:02}.{:06} {} queue {} offset {} len {}:",
            seconds / 3600 % 24,
            seconds / 60 % 60,
            seconds % 60,
            self.start_ns() / 1000 % 1_000_000,
            self.op.name(),
            self.queue,
            self.offset,
            self.len
        );
        for (stage, ns) in self.stages() {
            let _ = write!(out, " {stage} {:.2}", ns as f64 / 1000.0);
        }
        let _ = match self.error {
            0 => write!(out, " us, ok"),
            errno => write!(
                out,
                " us, {}",
                fathom_units::cause(std::io::Error::from_raw_os_error(errno))
            ),
        };
    }

    /// Uses the format in which `fathom trace --json` writes requests.
    fn to_json(self) -> Value {
        let stages = self.stages();
        let stages: Map<_, _> = stages
            .map(|(s, ns)| (format!("{s}_ns"), json!(ns)))
            .collect();
        json!({
            "time_ns": self.start_ns(),
            "queue": self.queue,
            "op": self.op.name(),
            "offset": self.offset,
            "len": self.len,
            "stages": stages,
            "errno": self.error,
        })
    }

    /// Returns the time of each stage, and the total, in nanoseconds.
    fn stages(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let clock = Clock::get();
        let ns = move |ticks| clock.ns(ticks);
        let (spent, total) = (*self.stamps.spent(), self.stamps.total());
        let stages = Stage::ALL
            .into_iter()
            .map(move |s| (s.name(), ns(spent[s as usize])));
        stages.chain([("total", ns(total))])
    }

    /// Returns the time at which the request was noticed, in nanoseconds since the epoch.
    fn start_ns(&self) -> u64 {
        let clock = Clock::get();
        let start = self.stamps.last() - self.stamps.total();
        let ago = clock.duration(clock.now().saturating_sub(start));
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        now.saturating_sub(ago).as_nanos() as u64
    }
}
