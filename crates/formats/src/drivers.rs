//! The drivers of all formats.

use crate::driver::Driver;
use crate::foreign::ForeignDriver;
use crate::image::Image;
use crate::luks::LuksDriver;
use crate::qcow2::Qcow2Driver;
use crate::qed::QedDriver;
use crate::raw::RawDriver;
use crate::{Format, Result};
use fathom_files::ImageFile;

/// Returns the driver of a format.
pub(crate) fn driver(format: Format) -> Box<dyn Driver> {
    match format {
        Format::Raw => Box::new(RawDriver),
        Format::Qcow2 => Box::new(Qcow2Driver),
        Format::Qed => Box::new(QedDriver),
        Format::Luks => Box::new(LuksDriver),
        Format::Foreign(kind) => Box::new(ForeignDriver(kind)),
    }
}

impl Image {
    /// Reads the header of an image in this format.
    pub fn read(file: &dyn ImageFile, format: Format) -> Result<Image> {
        driver(format).read(file)
    }
}
