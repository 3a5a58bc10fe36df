//! `fathom img check`: checks the consistency of an image's metadata, and repairs it.

mod counters;
mod lines;
mod options;
mod report;

pub(crate) use counters::{Bits, Counters};
pub(crate) use lines::Lines;
pub use options::{Options, Repair};
pub use report::Report;

use crate::drivers::driver;
use crate::{Error, Format, Result};
use fathom_files::ImageFile;

/// Maximum number of repair passes. A repair can reveal further problems, but rarely does.
const MAX_PASSES: usize = 8;

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
    let driver = driver(format);
    let mut lines = Lines::new(say);
    let (mut leaks_fixed, mut corruptions_fixed, mut check_errors) = (0, 0, 0);
    if options.repair != Repair::Nothing {
        for _ in 0..MAX_PASSES {
            let report = driver.check(file, options, &mut lines)?;
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
    let mut report = driver.check(file, &last, &mut lines)?;
    report.check_errors += check_errors;
    if options.repair != Repair::Nothing && report.check_errors == 0 && report.leaks == 0 {
        // If this fails, the mark that remains causes only an unnecessary repair.
        let _ = file.mark_open(false);
    }
    if options.repair != Repair::Nothing && report.check_errors == 0 && report.corruptions == 0 {
        driver.mark_clean(file)?;
    }
    Ok(Report {
        leaks_fixed,
        corruptions_fixed,
        ..report
    })
}
