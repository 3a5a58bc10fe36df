//! The progress of a load on the terminal.

use fathom_load::{Phase, Progress};
use std::io::{IsTerminal, Write};

/// A progress line on stderr that overwrites itself, if stderr is a terminal.
pub struct ProgressLine {
    enabled: bool,
}

impl ProgressLine {
    pub fn new() -> ProgressLine {
        ProgressLine {
            enabled: std::io::stderr().is_terminal(),
        }
    }

    pub fn show(&mut self, p: &Progress) {
        if !self.enabled {
            return;
        }
        let phase = match p.phase {
            Phase::Ramp => "ramping up",
            Phase::Measure => "measuring",
            Phase::Stop | Phase::Abort => "finishing",
        };
        let total = p
            .total
            .map_or(String::new(), |t| format!("/{}", t.as_secs()));
        let mut err = std::io::stderr().lock();
        let _ = write!(
            err,
            "\r\x1b[K{phase} {}{total} s, {:.0} IOPS, {} requests",
            p.elapsed.as_secs(),
            p.iops,
            p.completed
        );
        let _ = err.flush();
    }

    pub fn clear(&self) {
        if self.enabled {
            eprint!("\r\x1b[K");
        }
    }
}
