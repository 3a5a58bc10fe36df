//! How two definitions of a disk differ, and how one is made of both.

use crate::disk::DiskSpec;
use fathom_filters::Spec;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

/// What differs between two disks of a name.
#[derive(Debug, PartialEq, Eq)]
pub enum Changes {
    /// Options of filters: what is to be set, filter by filter.
    Filters(Vec<BTreeMap<String, String>>),
    /// What another disk in its place can have without a guest's or a client's noticing.
    Remake,
    /// These keys, which it cannot.
    Others(Vec<String>),
}

/// Keys that may change while the disk is in use: a second disk with the new values takes its place.
const REMADE: [&str; 20] = [
    "aio",
    "alarms",
    "allow-dirs",
    "allow-superseded",
    "cache",
    "cpus",
    "discard",
    "filters",
    "iothreads",
    "keys",
    "metadata-cache",
    "poll",
    "pool",
    "readonly",
    "register-memory",
    "server-timeout",
    "server-reconnect",
    "server-connections",
    "export-description",
    "zero-missing-clusters",
];

/// Keys that decide which data a disk has. A change needs a new disk.
const DATA: [&str; 7] = [
    "base",
    "data-file",
    "format",
    "image",
    "offset",
    "pull",
    "size",
];

impl DiskSpec {
    /// Returns these options with those that a switch to the image of `switched` changes: all that it
    /// takes to open that image again. The others, which may be temporary there, stay.
    pub fn switched_to(&self, switched: DiskSpec) -> DiskSpec {
        DiskSpec {
            allow_dirs: switched.allow_dirs,
            keys: switched.keys,
            ..self.clone().on(switched.image, switched.format)
        }
    }

    /// Returns these options where a request names them, and those of `present` elsewhere.
    pub fn over(&self, named: &BTreeSet<String>, present: &DiskSpec) -> Result<DiskSpec, String> {
        let (mut members, own) = (members(present), members(self));
        members.retain(|key, _| !named.contains(key));
        members.extend(own.into_iter().filter(|(key, _)| named.contains(key)));
        serde_json::from_value(Value::Object(members)).map_err(|error| error.to_string())
    }

    /// Keys that decide which data the disk has, as far as they differ.
    pub fn other_data(&self, other: &DiskSpec) -> Vec<String> {
        let mut keys = self.differences(other);
        keys.retain(|key| DATA.contains(&key.as_str()));
        keys
    }

    /// What is to be done to make this `wanted`.
    pub fn changes_to(&self, wanted: &DiskSpec) -> Changes {
        let bare = |table: &DiskSpec| {
            let mut table = table.clone().with_format();
            table.filters.iter_mut().for_each(|one| one.options.clear());
            table
        };
        if bare(self) != bare(wanted) {
            let mut others = self.differences(wanted);
            others.retain(|key| !REMADE.contains(&key.as_str()));
            return match others.is_empty() {
                true => Changes::Remake,
                false => Changes::Others(others),
            };
        }
        let changes = |(is, wanted): (&Spec, &Spec)| {
            let gone = is
                .options
                .iter()
                .map(|(key, _)| (key.clone(), String::new()));
            gone.chain(wanted.options.iter().cloned()).collect()
        };
        let pairs = self.filters.iter().zip(&wanted.filters);
        Changes::Filters(pairs.map(changes).collect())
    }

    /// The keys whose values differ. (An image without a format is raw.)
    pub fn differences(&self, other: &DiskSpec) -> Vec<String> {
        let named = |table: &DiskSpec| members(&table.clone().with_format());
        let (one, other) = (named(self), named(other));
        let keys: BTreeSet<_> = one.keys().chain(other.keys()).collect();
        let differ = |key: &&&String| one.get(**key) != other.get(**key);
        keys.iter()
            .filter(differ)
            .map(|key| key.to_string())
            .collect()
    }
}

/// Options that are not at their defaults, by their keys.
fn members(table: &DiskSpec) -> Map<String, Value> {
    match serde_json::to_value(table) {
        Ok(Value::Object(members)) => members,
        _ => Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keys that are neither in [`REMADE`] nor in [`DATA`]: guests or clients would notice a change, or it has no effect
    /// on a disk that is open.
    const FIXED: [&str; 21] = [
        "base-cache",
        "base-cache-size",
        "base-fetch",
        "base-manifest",
        "base-profile",
        "bitmaps",
        "export-name",
        "force-share",
        "name",
        "nbd",
        "nbd-move",
        "pull-post-copy",
        "pull-record",
        "pull-speed",
        "queues",
        "serial",
        "socket-group",
        "socket-mode",
        "tenant",
        "trace",
        "vhost-user",
    ];

    #[test]
    fn each_key_is_in_one_list() {
        let error = serde_json::from_str::<DiskSpec>(r#"{"?": 1}"#).unwrap_err();
        let error = error.to_string();
        // unknown field `?`, expected one of `name`, `image` ...
        let mut keys: Vec<_> = error.split('`').skip(3).step_by(2).collect();
        keys.sort_unstable();
        let mut listed: Vec<_> = { REMADE.into_iter() }.chain(DATA).chain(FIXED).collect();
        listed.sort_unstable();
        assert_eq!(keys, listed);
    }

    #[test]
    fn documentation_lists_what_can_change() {
        let text = include_str!("../../../docs/disks.md");
        let (_, list) = text.split_once("These options can change:").unwrap();
        let (list, _) = list.split_once("and the list of filters").unwrap();
        let listed = list.split('`').skip(1).step_by(2).chain(["filters"]);
        assert_eq!(BTreeSet::from(REMADE), listed.collect());
    }
}
