//! The tools for images that are not in use, as far as they differ between formats.
//!
//! Each format has a folder with its driver. [`crate::drivers`] lists them.

use crate::image::Image;
use crate::offline::check::Checker;
use crate::offline::create::{NewImage, Options};
use crate::offline::measure::{Measure, Source};
use crate::offline::new_backing::NewBacking;
use crate::offline::resize::Resize;
use crate::{Error, Result};
use fathom_files::ImageFile;

/// The tools for images of one format. `file` is always an image that is not in use,
/// unless the method says otherwise.
pub(crate) trait Driver {
    /// Reads and checks the header of the image in `file`, which may be in use.
    fn read(&self, file: &dyn ImageFile) -> Result<Image>;

    /// Returns the names of the options of new images, sorted.
    fn option_names(&self) -> &'static [&'static str];

    /// Returns the names of the options that `qemu-img create` prints, in its order.
    fn printed_options(&self) -> &'static [&'static str];

    /// Validates those options of a new image that do not depend on the disk's size.
    fn validate(&self, options: &Options) -> Result<()>;

    /// Creates an image. The options are valid.
    fn create(&self, new: &NewImage<'_>) -> Result<()>;

    /// Returns whether the disk of a new image reads as zeroes, apart from its backing file.
    /// `data_grows`: whether the file with its data is one that grows.
    fn reads_as_zeroes(&self, options: &Options, data_grows: bool) -> bool;

    /// Computes the file size of a new image for a disk of `size` bytes. See
    /// [`measure`](crate::offline::measure::measure).
    fn measure(&self, options: &Options, size: u64, source: Option<&Source>) -> Result<Measure>;

    /// Changes the size of the disk.
    fn resize(&self, file: &dyn ImageFile, to: &Resize<'_>) -> Result<()>;

    /// Returns the check of the images' metadata.
    fn checker(&self) -> Result<&'static Checker> {
        Err(Error::unsupported(
            "only the metadata of qcow2 and qed images can be checked",
        ))
    }

    /// Sets or removes the name of the backing file, as
    /// [`set_backing`](crate::offline::backing::set_backing) does.
    fn set_backing(&self, _file: &dyn ImageFile, _backing: Option<NewBacking<'_>>) -> Result<()> {
        Err(has_no_backing())
    }

    /// Sets or removes the name of the backing file of an image that this process is using. Changes
    /// nothing else.
    fn set_backing_in_use(
        &self,
        file: &dyn ImageFile,
        backing: Option<NewBacking<'_>>,
    ) -> Result<()> {
        self.set_backing(file, backing)
    }

    /// Checks whether [`Driver::set_backing_in_use`] could store `backing`.
    fn check_backing_in_use(
        &self,
        _file: &dyn ImageFile,
        _backing: Option<NewBacking<'_>>,
    ) -> Result<()> {
        Err(has_no_backing())
    }

    /// Removes all data from the image. Returns false, without any change, if the format does not
    /// support this.
    fn make_empty(&self, _file: &dyn ImageFile) -> Result<bool> {
        Ok(false)
    }
}

fn has_no_backing() -> Error {
    Error::usage("only qcow2 and qed images have backing files")
}
