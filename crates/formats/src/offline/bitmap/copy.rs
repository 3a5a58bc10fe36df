//! Copies bitmaps to another image.

use super::{Bitmaps, Bits, Change, check_tables, check_usable, printable};
use crate::Image;
use crate::offline::info::read_bitmaps;
use crate::qcow2::bitmap::{FLAG_AUTO, FLAG_IN_USE};
use crate::{Error, Format, Result};
use fathom_files::ImageFile;

/// Handling of bitmaps that were not closed cleanly and miss writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// The copy fails, and nothing is copied.
    Refuse,
    /// These bitmaps are skipped.
    Skip,
}

/// Copies all bitmaps of one qcow2 image to another in one commit: names, granularities, flags and
/// contents. The target image must have a disk of the same size, and no bitmaps with these names.
/// Neither image may be in use. Returns the names of the skipped bitmaps.
pub fn copy(from: &dyn ImageFile, to: &dyn ImageFile, broken: Broken) -> Result<Vec<String>> {
    let Image::Qcow2(header) = Image::read(from, Format::Qcow2)? else {
        return Err(Error::invalid("not a qcow2 image"));
    };
    let mut skipped = Vec::new();
    let (mut bitmaps, mut is_changed) = (Bitmaps::open(to)?, false);
    let copied = read_bitmaps(from, &header)?;
    check_tables(from, &header.geometry(), copied.iter())?;
    for bitmap in copied {
        let name = printable(&bitmap.name);
        if bitmap.flags & FLAG_IN_USE != 0 && broken == Broken::Skip {
            skipped.push(name);
            continue;
        }
        check_usable(&bitmap)?;
        let Ok(own) = std::str::from_utf8(&bitmap.name) else {
            return Err(Error::unsupported(format!(
                "the name of bitmap '{name}' is not UTF-8"
            )));
        };
        let bits = Bits::read(from, &header, &bitmap)?;
        bitmaps.change(own, Change::Add(Some(bitmap.granularity())))?;
        bitmaps.change(own, Change::MergeFrom(&bits))?;
        if bitmap.flags & FLAG_AUTO == 0 {
            bitmaps.change(own, Change::Disable)?;
        }
        is_changed = true;
    }
    if is_changed {
        bitmaps.commit()?;
    }
    Ok(skipped)
}
