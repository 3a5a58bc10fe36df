//! Lists bitmaps.

use super::Bits;
use crate::Image;
use crate::offline::info::{flag_names, read_bitmaps};
use crate::qcow2::Header;
use crate::qcow2::bitmap::Bitmap;
use crate::{Error, Format, Result};
use fathom_files::ImageFile;
use serde_json::{Value, json};

/// A bitmap of an image.
#[derive(Clone, Debug)]
pub struct Listed {
    /// The bitmap's directory entry.
    pub bitmap: Bitmap,
    /// Number of dirty bytes of the disk, if known.
    pub dirty: Option<u64>,
}

/// Lists all bitmaps of a qcow2 image.
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

/// Lists the bitmaps that `is_wanted` selects. Other bitmaps are not read, however many the image
/// has. If a bitmap cannot be read, its number of dirty bytes is unknown.
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
    /// The bitmap's name, printable.
    pub fn name(&self) -> String {
        super::printable(&self.bitmap.name)
    }

    /// Whether the bitmap is enabled and can record writes.
    pub fn records(&self) -> bool {
        super::records(&self.bitmap)
    }

    /// The flags `in-use` and `auto`, as `qemu-img info` shows them.
    pub fn flags(&self) -> Vec<&'static str> {
        flag_names(&self.bitmap)
    }

    /// Returns the bitmap's fields in `qemu-img info --output=json`, by QEMU's names, and `count`,
    /// QEMU's name for the number of dirty bytes.
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
