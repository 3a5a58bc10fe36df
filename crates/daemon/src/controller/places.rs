//! The definitions in the configuration, and their places.

use fathom_host::options::DiskOptions;
use fathom_spec::DiskSpec;
use std::collections::BTreeMap;

/// Returns `FILE:LINE` of each disk's entry in the configuration.
pub(super) fn places(disks: &[DiskOptions]) -> BTreeMap<String, String> {
    let places = disks
        .iter()
        .filter_map(|disk| Some((disk.name.clone(), disk.defined_at.clone()?)));
    places.collect()
}

/// The definitions of these disks.
pub(super) fn specs(disks: &[DiskOptions]) -> impl Iterator<Item = &DiskSpec> {
    disks.iter().map(|disk| &*disk.spec)
}
