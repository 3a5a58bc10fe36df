//! The driver of qcow2 images.

use super::check::CHECKER;
use super::image::first_cluster;
use super::{Header, backing, create, measure, resize};
use crate::Result;
use crate::driver::Driver;
use crate::image::Image;
use crate::offline::check::Checker;
use crate::offline::create::{NewImage, Options};
use crate::offline::measure::{Measure, Source};
use crate::offline::new_backing::NewBacking;
use crate::offline::resize::Resize;
use fathom_files::ImageFile;

pub(crate) struct Qcow2Driver;

impl Driver for Qcow2Driver {
    fn read(&self, file: &dyn ImageFile) -> Result<Image> {
        let header = Header::parse(&first_cluster(file)?)?;
        Ok(Image::Qcow2(Box::new(header)))
    }

    fn option_names(&self) -> &'static [&'static str] {
        &[
            "backing_file",
            "backing_fmt",
            "cluster_size",
            "compat",
            "compression_type",
            "data_file",
            "data_file_raw",
            "encrypt.cipher-alg",
            "encrypt.cipher-mode",
            "encrypt.format",
            "encrypt.hash-alg",
            "encrypt.iter-time",
            "encrypt.ivgen-alg",
            "extended_l2",
            "lazy_refcounts",
            "preallocation",
            "refcount_bits",
            "size",
        ]
    }

    fn printed_options(&self) -> &'static [&'static str] {
        &[
            "cluster_size",
            "extended_l2",
            "preallocation",
            "compression_type",
            "encrypt.format",
            "size",
            "compat",
            "backing_file",
            "backing_fmt",
            "data_file",
            "data_file_raw",
            "lazy_refcounts",
            "refcount_bits",
        ]
    }

    fn validate(&self, options: &Options) -> Result<()> {
        create::validate(options)
    }

    fn create(&self, new: &NewImage<'_>) -> Result<()> {
        create::create(new)
    }

    fn reads_as_zeroes(&self, options: &Options, data_grows: bool) -> bool {
        create::has_no_contents(options) || data_grows
    }

    fn measure(&self, options: &Options, size: u64, source: Option<&Source>) -> Result<Measure> {
        measure::measure(options, size, source)
    }

    fn resize(&self, file: &dyn ImageFile, to: &Resize<'_>) -> Result<()> {
        resize::resize(file, to)
    }

    fn checker(&self) -> Result<&'static Checker> {
        Ok(&CHECKER)
    }

    fn set_backing(&self, file: &dyn ImageFile, backing: Option<NewBacking<'_>>) -> Result<()> {
        backing::set(file, backing)
    }

    fn set_backing_in_use(
        &self,
        file: &dyn ImageFile,
        backing: Option<NewBacking<'_>>,
    ) -> Result<()> {
        backing::set_in_use(file, backing)
    }

    fn check_backing_in_use(
        &self,
        file: &dyn ImageFile,
        backing: Option<NewBacking<'_>>,
    ) -> Result<()> {
        backing::check_in_use(file, backing)
    }

    fn make_empty(&self, file: &dyn ImageFile) -> Result<bool> {
        backing::make_empty(file)?;
        Ok(true)
    }
}
