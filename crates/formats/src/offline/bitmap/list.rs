//! The bitmaps that there are.

use super::Bits;
use crate::offline::Image;
use crate::offline::info::{flag_names, read_bitmaps};
use crate::qcow2::Header;
use crate::qcow2::bitmap::Bitmap;
use crate::{Error, Format, Result};
use fathom_files::ImageFile;
use serde_json::{Value, json};

/// A bitmap of an image.
#[derive(Clone, Debug)]
pub struct Listed {
    /// Its entry in the directory.
    pub bitmap: Bitmap,
    /// Bytes of the disk that are dirty, where that is known.
    pub dirty: Option<u64>,
}

/// All bitmaps of a qcow2 image.
pub fn list(file: &dyn ImageFile) -> Result<Vec<Listed>> {
    let header = header_of(file)?;
    let bitmaps = read_bitmaps(file, &header)?;
    let believed = bitmaps.iter().filter(|bitmap| super::is_believed(bitmap));
    super::check_tables(file, &header.geometry(), believed)?;
    let listed = bitmaps.into_iter().map(|bitmap| {
        let dirty = match super::is_believed(&bitmap) {
            true => Some(Bits::read(file, &header, &bitmap)?.count()?),
            false => None,
        };
        Ok(Listed { bitmap, dirty })
    });
    listed.collect()
}

/// Those that are wanted: of the others nothing is looked at, however many an image says it has. Of one that cannot be
/// read it is not known what is dirty.
pub fn list_some(
    file: &dyn ImageFile,
    is_wanted: &mut dyn FnMut(&Bitmap) -> bool,
) -> Result<Vec<Listed>> {
    let header = header_of(file)?;
    let bitmaps = read_bitmaps(file, &header)?.into_iter();
    let listed = bitmaps.filter(|bitmap| is_wanted(bitmap)).map(|bitmap| {
        let bits = Bits::read(file, &header, &bitmap);
        let dirty = bits.and_then(|bits| bits.count()).ok();
        Listed { bitmap, dirty }
    });
    Ok(listed.collect())
}

fn header_of(file: &dyn ImageFile) -> Result<Header> {
    match Image::read(file, Format::Qcow2)? {
        Image::Qcow2(header) => Ok(*header),
        _ => Err(Error::invalid("not a qcow2 image")),
    }
}

impl Listed {
    /// Its name, for people.
    pub fn name(&self) -> String {
        super::printable(&self.bitmap.name)
    }

    /// Whether it is to know of what is written, and can.
    pub fn records(&self) -> bool {
        super::records(&self.bitmap)
    }

    /// `in-use` and `auto`, as `qemu-img info` has them.
    pub fn flags(&self) -> Vec<&'static str> {
        flag_names(&self.bitmap)
    }

    /// The fields that `qemu-img info --output=json` has of a bitmap, by its names, and `count`, as
    /// QEMU names the bytes that are dirty.
    pub fn to_json(&self) -> Value {
        let mut value = json!({
            "name": String::from_utf8_lossy(&self.bitmap.name),
            "granularity": self.bitmap.granularity(),
            "flags": self.flags(),
        });
        if let Some(dirty) = self.dirty {
            value["count"] = dirty.into();
        }
        value
    }
}
