//! An image of any format, by its header.

use crate::image_header::ImageHeader;
use crate::luks::LuksImage;
use crate::qcow2;
use crate::qed::QedImage;
use crate::raw::RawImage;
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
