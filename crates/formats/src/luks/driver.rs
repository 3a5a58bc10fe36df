//! The driver of LUKS images.

use super::image::LuksImage;
use super::{create, resize};
use crate::driver::Driver;
use crate::image::Image;
use crate::offline::create::{LUKS_NAMES, NewImage, Options};
use crate::offline::measure::{Measure, Source};
use crate::offline::resize::Resize;
use crate::{Error, Result};
use fathom_files::ImageFile;

pub(crate) struct LuksDriver;

impl Driver for LuksDriver {
    fn read(&self, file: &dyn ImageFile) -> Result<Image> {
        Ok(Image::Luks(Box::new(LuksImage::read(file)?)))
    }

    fn option_names(&self) -> &'static [&'static str] {
        &LUKS_NAMES
    }

    fn printed_options(&self) -> &'static [&'static str] {
        &["size"]
    }

    fn validate(&self, options: &Options) -> Result<()> {
        let checked = options.encryption.luks.check();
        checked.map_err(|error| Error::usage(error.to_string()))
    }

    fn create(&self, new: &NewImage<'_>) -> Result<()> {
        create::create(new)
    }

    /// Returns false: sectors that were never written decrypt to arbitrary bytes.
    fn reads_as_zeroes(&self, _options: &Options, _data_grows: bool) -> bool {
        false
    }

    fn measure(&self, options: &Options, size: u64, _: Option<&Source>) -> Result<Measure> {
        let bytes = size.saturating_add(options.encryption.header_len());
        Ok(Measure::of_bytes(bytes))
    }

    fn resize(&self, file: &dyn ImageFile, to: &Resize<'_>) -> Result<()> {
        resize::resize(file, &LuksImage::read(file)?.header, to)
    }
}
