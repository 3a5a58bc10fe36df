//! The passes of a check.

use super::lines::Lines;
use super::options::{Options, Repair};
use super::report::Report;
use crate::{Error, Result};
use fathom_files::ImageFile;

/// Maximum number of repair passes. A repair can reveal further problems, but rarely does.
const MAX_PASSES: usize = 8;

/// The check of one format.
pub(crate) struct Checker {
    /// Checks the whole image once, and repairs it as far as the options allow.
    pub(crate) pass: fn(&dyn ImageFile, &Options, &mut Lines) -> Result<Report>,
    /// Notes in the header that the image is consistent. The caller has flushed the repairs.
    pub(crate) mark_clean: fn(&dyn ImageFile) -> Result<()>,
}

impl Checker {
    /// See [`check`](super::check).
    pub(crate) fn run(
        &self,
        file: &dyn ImageFile,
        options: &Options,
        say: &mut dyn FnMut(&str),
    ) -> Result<Report> {
        let mut lines = Lines::new(say);
        let (mut leaks_fixed, mut corruptions_fixed, mut check_errors) = (0, 0, 0);
        if options.repair != Repair::Nothing {
            for _ in 0..MAX_PASSES {
                let report = (self.pass)(file, options, &mut lines)?;
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
        let mut report = (self.pass)(file, &last, &mut lines)?;
        report.check_errors += check_errors;
        if options.repair != Repair::Nothing && report.check_errors == 0 && report.leaks == 0 {
            // If this fails, the mark that remains causes only an unnecessary repair.
            let _ = file.mark_open(false);
        }
        if options.repair != Repair::Nothing && report.check_errors == 0 && report.corruptions == 0
        {
            (self.mark_clean)(file)?;
        }
        Ok(Report {
            leaks_fixed,
            corruptions_fixed,
            ..report
        })
    }

    /// Fails unless the metadata is consistent. An image that was not closed properly is repaired
    /// first, as QEMU does.
    pub(crate) fn ensure_sound(&self, file: &dyn ImageFile, needs_check: bool) -> Result<()> {
        let options = Options {
            repair: match needs_check {
                true => Repair::All,
                false => Repair::Nothing,
            },
            ..Options::default()
        };
        let report = self.run(file, &options, &mut |_| {})?;
        match report.corruptions + report.check_errors {
            0 => Ok(()),
            errors => Err(Error::invalid(format!(
                "its metadata has {errors} errors; repair the image with 'fathom img check \
                 --repair all'"
            ))),
        }
    }
}
