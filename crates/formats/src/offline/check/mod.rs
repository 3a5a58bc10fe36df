//! `fathom img check`: checks the consistency of an image's metadata, and repairs it.

mod checker;
mod counters;
mod lines;
mod options;
mod report;

pub(crate) use checker::Checker;
pub(crate) use counters::{Bits, Counters};
pub(crate) use lines::Lines;
pub use options::{Options, Repair};
pub use report::Report;

use crate::drivers::driver;
use crate::{Format, Result};
use fathom_files::ImageFile;

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
    driver(format).checker()?.run(file, options, say)
}
