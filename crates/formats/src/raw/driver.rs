//! The driver of raw images.

use super::image::RawImage;
use super::{create, resize};
use crate::driver::Driver;
use crate::image::Image;
use crate::offline::create::{NewImage, Options, Preallocation};
use crate::offline::measure::{Measure, Source};
use crate::offline::resize::Resize;
use crate::{Error, Result};
use fathom_files::ImageFile;

pub(crate) struct RawDriver;

impl Driver for RawDriver {
    fn read(&self, file: &dyn ImageFile) -> Result<Image> {
        let size = file.len().map_err(Error::io("cannot read its size"))?;
        Ok(Image::Raw(RawImage { size }))
    }

    fn option_names(&self) -> &'static [&'static str] {
        &["preallocation", "size"]
    }

    fn printed_options(&self) -> &'static [&'static str] {
        &["size", "preallocation"]
    }

    fn validate(&self, options: &Options) -> Result<()> {
        match options.preallocation {
            Preallocation::Metadata => Err(Error::usage(
                "preallocation=metadata: applies only to qcow2, because raw has no metadata",
            )),
            _ => Ok(()),
        }
    }

    fn create(&self, new: &NewImage<'_>) -> Result<()> {
        create::create(new.file, new.options.preallocation, new.size)
    }

    fn reads_as_zeroes(&self, options: &Options, data_grows: bool) -> bool {
        options.preallocation == Preallocation::Full || data_grows
    }

    fn measure(&self, _: &Options, size: u64, _: Option<&Source>) -> Result<Measure> {
        Ok(Measure::of_bytes(size))
    }

    fn resize(&self, file: &dyn ImageFile, to: &Resize<'_>) -> Result<()> {
        resize::resize(file, to)
    }
}
