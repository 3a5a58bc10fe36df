//! The result of a measurement, and what it takes into account.

use crate::qcow2::bitmap::Bitmap;
use serde_json::{Value, json};
use std::fmt;

/// File sizes in bytes; QEMU's `BlockMeasureInfo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measure {
    /// Size with the data of the source.
    pub required: u64,
    /// Size when the whole disk has been written.
    pub fully_allocated: u64,
    /// Additional size of the bitmaps; `None` if the source or the target cannot have bitmaps.
    pub bitmaps: Option<u64>,
}

/// The contents that will be copied to the image.
#[derive(Clone, Debug)]
pub struct Source {
    /// Number of bytes of data clusters: [`data_clusters`](super::data_clusters) with the cluster
    /// size of the new image.
    pub data: u64,
    /// The bitmaps of the source; `None` if its format has no bitmaps.
    pub bitmaps: Option<Vec<Bitmap>>,
}

impl Measure {
    /// Returns the measure of an image whose file always has `bytes` bytes.
    pub(crate) fn of_bytes(bytes: u64) -> Measure {
        Measure {
            required: bytes,
            fully_allocated: bytes,
            bitmaps: None,
        }
    }

    /// Returns the fields of `qemu-img measure --output=json`, by QEMU's names.
    pub fn to_json(&self) -> Value {
        let mut value = json!({
            "required": self.required,
            "fully-allocated": self.fully_allocated,
        });
        if let Some(bitmaps) = self.bitmaps {
            value["bitmaps"] = bitmaps.into();
        }
        value
    }
}

impl fmt::Display for Measure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "required size: {}", self.required)?;
        writeln!(f, "fully allocated size: {}", self.fully_allocated)?;
        if let Some(bitmaps) = self.bitmaps {
            writeln!(f, "bitmaps size: {bitmaps}")?;
        }
        Ok(())
    }
}
