//! The result of a check.

use crate::Format;
use serde_json::{Map, Value};
use std::fmt;

/// The numbers that `qemu-img check` reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Number of parts that could not be checked.
    pub check_errors: u64,
    /// Number of corruptions, which make writes to the image dangerous.
    pub corruptions: u64,
    /// Number of clusters that are allocated but not used.
    pub leaks: u64,
    /// Number of corruptions that were repaired.
    pub corruptions_fixed: u64,
    /// Number of leaked clusters that were freed.
    pub leaks_fixed: u64,
    /// End of the last cluster in use, in bytes; 0 if unknown.
    pub image_end_offset: u64,
    /// Number of clusters of the disk.
    pub total_clusters: u64,
    /// Number of allocated clusters.
    pub allocated_clusters: u64,
    /// Number of allocated clusters that do not follow their predecessor in the file.
    pub fragmented_clusters: u64,
    /// Number of compressed clusters.
    pub compressed_clusters: u64,
}

impl Report {
    /// Whether the check has changed the image.
    pub fn repaired(&self) -> bool {
        self.leaks_fixed + self.corruptions_fixed > 0
    }

    /// The exit status of `qemu-img check`: 0 for a consistent image, 1 for an incomplete check, 2
    /// for corruptions, 3 for leaks only.
    pub fn exit_status(&self) -> u8 {
        if self.check_errors > 0 {
            1
        } else if self.corruptions > 0 {
            2
        } else if self.leaks > 0 {
            3
        } else {
            0
        }
    }

    /// Returns the fields of `qemu-img check --output=json`, by QEMU's names. Most fields are left
    /// out if they are 0.
    pub fn to_json(&self, filename: &str, format: Format) -> Value {
        let mut all = Map::new();
        all.insert("filename".into(), filename.into());
        all.insert("format".into(), format.name().into());
        all.insert("check-errors".into(), self.check_errors.into());
        for (name, value) in [
            ("image-end-offset", self.image_end_offset),
            ("corruptions", self.corruptions),
            ("leaks", self.leaks),
            ("corruptions-fixed", self.corruptions_fixed),
            ("leaks-fixed", self.leaks_fixed),
            ("total-clusters", self.total_clusters),
            ("allocated-clusters", self.allocated_clusters),
            ("fragmented-clusters", self.fragmented_clusters),
            ("compressed-clusters", self.compressed_clusters),
        ] {
            if value != 0 {
                all.insert(name.into(), value.into());
            }
        }
        Value::Object(all)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.repaired() {
            let (leaks, corruptions) = (self.leaks_fixed, self.corruptions_fixed);
            writeln!(
                f,
                "The following inconsistencies were found and repaired:\n"
            )?;
            writeln!(
                f,
                "    {leaks} leaked clusters\n    {corruptions} corruptions\n"
            )?;
            writeln!(f, "Double checking the fixed image now...")?;
        }
        if self.check_errors + self.corruptions + self.leaks == 0 {
            writeln!(f, "No errors were found on the image.")?;
        }
        if self.corruptions > 0 {
            writeln!(f, "\n{} errors were found on the image.", self.corruptions)?;
            writeln!(
                f,
                "Data may be corrupted, or further writes to the image may corrupt it."
            )?;
        }
        if self.leaks > 0 {
            writeln!(
                f,
                "\n{} leaked clusters were found on the image.",
                self.leaks
            )?;
            writeln!(f, "This means waste of disk space, but no harm to data.")?;
        }
        if self.check_errors > 0 {
            let errors = self.check_errors;
            writeln!(
                f,
                "\n{errors} internal errors have occurred during the check."
            )?;
        }
        if self.total_clusters > 0 && self.allocated_clusters > 0 {
            let percent = |part: u64, whole: u64| part as f64 * 100.0 / whole as f64;
            let (total, allocated) = (self.total_clusters, self.allocated_clusters);
            writeln!(
                f,
                "{allocated}/{total} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters",
                percent(allocated, total),
                percent(self.fragmented_clusters, allocated),
                percent(self.compressed_clusters, allocated)
            )?;
        }
        if self.image_end_offset > 0 {
            writeln!(f, "Image end offset: {}", self.image_end_offset)?;
        }
        Ok(())
    }
}
