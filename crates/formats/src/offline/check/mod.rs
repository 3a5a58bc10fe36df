//! `fathom img check`: is an image's metadata consistent, and can it be made so?

mod counters;
mod qcow2;
mod qed;
mod report;

pub use report::Report;

use crate::{Error, Format, Result};
use fathom_files::ImageFile;

/// What may be changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Repair {
    /// Nothing; the file is only read.
    #[default]
    Nothing,
    /// Space that nothing uses is given back. Never changes what a guest reads.
    Leaks,
    /// Everything. What cannot be reached any more reads as zeroes (or the
    /// backing file) afterwards, and its space is given back.
    All,
}

/// How to check.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// What may be changed.
    pub repair: Repair,
    /// Bytes of memory for counters, of which there are two bytes for each
    /// cluster of the file.
    pub max_memory: u64,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            repair: Repair::Nothing,
            max_memory: 2 << 30,
        }
    }
}

/// A repair can bring further problems to light, but not often.
const MAX_PASSES: usize = 8;
/// Lines about single problems; more than these are only counted.
const MAX_LINES: u64 = 1000;

/// Where lines about single problems go.
struct Lines<'a> {
    say: &'a mut dyn FnMut(&str),
    said: u64,
}

impl Lines<'_> {
    fn say(&mut self, text: &str) {
        self.said += 1;
        if self.said < MAX_LINES {
            (self.say)(text);
        } else if self.said == MAX_LINES {
            (self.say)("There are more problems than are listed here.");
        }
    }
}

/// Checks an image, and repairs it as far as the options allow. `say` gets one
/// line for each problem.
///
/// A crash during a repair leaves an image that can be repaired: what refers
/// to something is written after what it refers to, with a flush between, and
/// refcounts can be counted anew at any time.
///
/// Fails when the image cannot be checked: it is raw, its header is broken, or
/// its file fails.
pub fn check(
    file: &dyn ImageFile,
    format: Format,
    options: &Options,
    say: &mut dyn FnMut(&str),
) -> Result<Report> {
    let mut lines = Lines { say, said: 0 };
    let (mut leaks_fixed, mut corruptions_fixed, mut check_errors) = (0, 0, 0);
    if options.repair != Repair::Nothing {
        for _ in 0..MAX_PASSES {
            let report = pass(file, format, options, &mut lines)?;
            leaks_fixed += report.leaks_fixed;
            corruptions_fixed += report.corruptions_fixed;
            check_errors = report.check_errors;
            if !report.repaired() {
                break;
            }
            file.sync().map_err(Error::io("cannot flush"))?;
        }
    }
    let last = Options {
        repair: Repair::Nothing,
        ..*options
    };
    let mut report = pass(file, format, &last, &mut lines)?;
    report.check_errors += check_errors;
    if options.repair != Repair::Nothing && report.check_errors == 0 && report.leaks == 0 {
        // (A mark that stays costs a needless repair.)
        let _ = file.mark_open(false);
    }
    if options.repair != Repair::Nothing && report.check_errors == 0 && report.corruptions == 0 {
        match format {
            Format::Qcow2 => qcow2::mark_clean(file)?,
            Format::Qed => qed::mark_clean(file)?,
            Format::Raw | Format::Luks | Format::Foreign(_) => {}
        }
    }
    Ok(Report {
        leaks_fixed,
        corruptions_fixed,
        ..report
    })
}

/// One look at everything.
fn pass(
    file: &dyn ImageFile,
    format: Format,
    options: &Options,
    lines: &mut Lines,
) -> Result<Report> {
    match format {
        Format::Raw | Format::Luks => Err(Error::unsupported(
            "only the metadata of qcow2 and qed images can be checked",
        )),
        Format::Foreign(_) => Err(Error::only_read(format)),
        Format::Qcow2 => qcow2::pass(file, options, lines),
        Format::Qed => qed::pass(file, options, lines),
    }
}
