//! `fathom img check`: checks the consistency of an image's metadata, and repairs it.

mod counters;
mod qcow2;
mod qed;
mod report;

pub use report::Report;

use crate::{Error, Format, Result};
use fathom_files::ImageFile;

/// The changes that a check may make.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Repair {
    /// Nothing: the file is only read.
    #[default]
    Nothing,
    /// Leaked clusters are freed. This never changes the disk's contents.
    Leaks,
    /// Everything. Data that cannot be reached any more reads as zeroes (or as the backing file)
    /// after the repair, and its space is freed.
    All,
}

/// Options of a check.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The changes that the check may make.
    pub repair: Repair,
    /// Maximum memory in bytes for the reference counters, which take two bytes per cluster of the
    /// file.
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

/// Maximum number of repair passes. A repair can reveal further problems, but rarely does.
const MAX_PASSES: usize = 8;
/// Maximum number of lines about single problems. Further problems are only counted.
const MAX_LINES: u64 = 1000;

/// The output of lines about single problems.
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

/// Checks an image, and repairs it as far as the options allow. `say` receives one line per
/// problem.
///
/// A crash during a repair leaves an image that can be repaired. Each structure is written before
/// the references to it, with a flush in between, and refcounts can be rebuilt at any time.
///
/// # Errors
///
/// Fails if the image cannot be checked: its format has no check, its header is invalid, or its
/// file fails.
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
        // If this fails, the mark that remains causes only an unnecessary repair.
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

/// Checks the whole image once.
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
