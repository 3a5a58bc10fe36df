//! An image of any format, by its header.

use crate::image_header::ImageHeader;
use crate::luks::LuksImage;
use crate::offline::SnapshotName;
use crate::offline::info::read_snapshots;
use crate::qed::QedImage;
use crate::raw::RawImage;
use crate::{Error, Result, qcow2};
use fathom_files::ImageFile;
use std::ops::Deref;

/// An image's header, with the properties of [`ImageHeader`].
///
/// Headers are boxed where they are large.
#[derive(Clone, Debug)]
pub enum Image {
    /// A raw image, which has no header.
    Raw(RawImage),
    /// A qcow2 image.
    Qcow2(Box<qcow2::Header>),
    /// A QED image.
    Qed(QedImage),
    /// A LUKS image.
    Luks(Box<LuksImage>),
    /// A foreign image, with its description.
    Foreign(Box<fathom_foreign::Description>),
}

impl Deref for Image {
    type Target = dyn ImageHeader;

    fn deref(&self) -> &(dyn ImageHeader + 'static) {
        match self {
            Image::Raw(image) => image,
            Image::Qcow2(header) => &**header,
            Image::Qed(image) => image,
            Image::Luks(image) => &**image,
            Image::Foreign(description) => &**description,
        }
    }
}

impl Image {
    /// Returns the header of the image as it was when this internal snapshot was taken.
    pub fn at_snapshot(self, file: &dyn ImageFile, name: &SnapshotName) -> Result<Image> {
        let Image::Qcow2(mut header) = self else {
            let format = self.format();
            return Err(Error::unsupported(format!(
                "{format} images have no internal snapshots"
            )));
        };
        let snapshots = read_snapshots(file, &header)?;
        let snapshot = name.find(&snapshots)?;
        header.size = snapshot.disk_size().unwrap_or(header.size);
        header.l1_offset = snapshot.l1_offset;
        header.l1_entries = snapshot.l1_entries;
        header.validate_tables()?;
        Ok(Image::Qcow2(header))
    }
}
