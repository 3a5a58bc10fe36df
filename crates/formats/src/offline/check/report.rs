//! What a check found.

use crate::Format;
use serde_json::{Map, Value};
use std::fmt;

/// Numbers as `qemu-img check` has them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Parts that could not be read.
    pub check_errors: u64,
    /// Contradictions: writing would do harm.
    pub corruptions: u64,
    /// Clusters that take space and are not used.
    pub leaks: u64,
    /// Repaired.
    pub corruptions_fixed: u64,
    /// Repaired.
    pub leaks_fixed: u64,
    /// Bytes up to the end of the last cluster in use; 0 where it is unknown.
    pub image_end_offset: u64,
    /// Clusters of the disk.
    pub total_clusters: u64,
    /// Of these, allocated ones.
    pub allocated_clusters: u64,
    /// Of these, the ones that do not follow their predecessors.
    pub fragmented_clusters: u64,
    /// And the compressed ones.
    pub compressed_clusters: u64,
}

impl Report {
    /// Anything was changed.
    pub fn repaired(&self) -> bool {
        self.leaks_fixed + self.corruptions_fixed > 0
    }

    /// The exit status of `qemu-img check`: 0 for a consistent image, 1 for a
    /// check that was not completed, 2 for corruptions, 3 for leaks only.
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

    /// The fields that `qemu-img check --output=json` has, by its names:
    /// mostly those that are not 0.
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
