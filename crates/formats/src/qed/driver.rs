//! The driver of QED images.

use super::check::CHECKER;
use super::image::QedImage;
use super::{backing, create, resize};
use crate::driver::Driver;
use crate::image::Image;
use crate::offline::check::Checker;
use crate::offline::create::{NewImage, Options};
use crate::offline::measure::{Measure, Source};
use crate::offline::new_backing::NewBacking;
use crate::offline::resize::Resize;
use crate::{Error, Result};
use fathom_files::ImageFile;

pub(crate) struct QedDriver;

impl Driver for QedDriver {
    fn read(&self, file: &dyn ImageFile) -> Result<Image> {
        Ok(Image::Qed(QedImage::read(file)?))
    }

    fn option_names(&self) -> &'static [&'static str] {
        &[
            "backing_file",
            "backing_fmt",
            "cluster_size",
            "size",
            "table_size",
        ]
    }

    fn printed_options(&self) -> &'static [&'static str] {
        &[
            "size",
            "backing_file",
            "backing_fmt",
            "cluster_size",
            "table_size",
        ]
    }

    fn validate(&self, options: &Options) -> Result<()> {
        let (cluster, table) = (options.cluster_size, options.table_size);
        if !cluster.is_power_of_two() || !(4 << 10..=64 << 20).contains(&cluster) {
            return Err(Error::usage(
                "cluster_size: not a power of two from 4k to 64M",
            ));
        }
        if !table.is_power_of_two() || table > 16 {
            return Err(Error::usage("table_size: not 1, 2, 4, 8 or 16 clusters"));
        }
        Ok(())
    }

    fn create(&self, new: &NewImage<'_>) -> Result<()> {
        create::create(new.file, new.options, new.size)
    }

    fn reads_as_zeroes(&self, _options: &Options, _data_grows: bool) -> bool {
        true
    }

    fn measure(&self, _: &Options, _: u64, _: Option<&Source>) -> Result<Measure> {
        Err(Error::unsupported(
            "qed images cannot be measured, only raw, qcow2 and luks images",
        ))
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

    fn check_backing_in_use(
        &self,
        file: &dyn ImageFile,
        backing: Option<NewBacking<'_>>,
    ) -> Result<()> {
        backing::check(file, backing)
    }
}
