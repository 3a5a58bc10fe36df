//! The driver of foreign images, which only reads them.

use super::part::describe;
use crate::driver::Driver;
use crate::image::Image;
use crate::offline::check::Checker;
use crate::offline::create::{NewImage, Options};
use crate::offline::measure::{Measure, Source};
use crate::offline::resize::Resize;
use crate::{Error, Format, Result};
use fathom_files::ImageFile;
use fathom_foreign::Kind;

pub(crate) struct ForeignDriver(pub(crate) Kind);

impl ForeignDriver {
    fn refuse<T>(&self) -> Result<T> {
        Err(Error::only_read(Format::Foreign(self.0)))
    }
}

impl Driver for ForeignDriver {
    fn read(&self, file: &dyn ImageFile) -> Result<Image> {
        Ok(Image::Foreign(Box::new(describe(file, self.0)?)))
    }

    fn option_names(&self) -> &'static [&'static str] {
        &[]
    }

    fn printed_options(&self) -> &'static [&'static str] {
        &["size"]
    }

    fn validate(&self, _: &Options) -> Result<()> {
        self.refuse()
    }

    fn create(&self, _: &NewImage<'_>) -> Result<()> {
        self.refuse()
    }

    fn reads_as_zeroes(&self, _options: &Options, _data_grows: bool) -> bool {
        false
    }

    fn measure(&self, _: &Options, _: u64, _: Option<&Source>) -> Result<Measure> {
        self.refuse()
    }

    fn resize(&self, _: &dyn ImageFile, _: &Resize<'_>) -> Result<()> {
        self.refuse()
    }

    fn checker(&self) -> Result<&'static Checker> {
        self.refuse()
    }
}
