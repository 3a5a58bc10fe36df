//! Where the configuration defines each disk.

use crate::options::DiskOptions;
use std::collections::BTreeMap;

/// Returns `FILE:LINE` of each disk's entry in the configuration.
pub(super) fn places(disks: &[DiskOptions]) -> BTreeMap<String, String> {
    let places = disks
        .iter()
        .filter_map(|disk| Some((disk.name.clone(), disk.defined_at.clone()?)));
    places.collect()
}
