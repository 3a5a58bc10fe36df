//! How two definitions of a disk differ, and how one is made of both.

use crate::disk::DiskSpec;
use fathom_filters::Spec;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;
use utoipa::PartialSchema;

/// The difference between two definitions of a disk.
#[derive(Debug, PartialEq, Eq)]
pub enum Changes {
    /// Only options of filters differ: the options to set, filter by filter.
    Filters(Vec<BTreeMap<String, String>>),
    /// A second disk with the other options can take the disk's place unnoticed by guests and
    /// clients.
    Remake,
    /// The options with these keys differ, which cannot change while the disk is served.
    Others(Vec<String>),
}

/// Effect of a change of an option on a disk in use: `x-change` in the option's schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Change {
    /// A second disk with the new value takes the disk's place.
    Live,
    /// The option decides which data the disk has: a change needs a new disk.
    Data,
    /// Guests or clients would notice a change, or it has no effect on a disk that is open.
    Fixed,
}

/// Effects of changes of the options, by their keys.
static CHANGES: LazyLock<BTreeMap<String, Change>> = LazyLock::new(|| {
    let schema = serde_json::to_value(DiskSpec::schema()).unwrap_or_default();
    let options = schema["properties"]
        .as_object()
        .cloned()
        .unwrap_or_default();
    let change = |option: &Value| serde_json::from_value(stated(option).clone());
    { options.into_iter() }
        .map(|(key, option)| (key, change(&option).unwrap_or(Change::Fixed)))
        .collect()
});

/// Returns `x-change` of an option's schema. (utoipa adds the extensions of a list to the schema of
/// its items.)
fn stated(option: &Value) -> &Value {
    match &option["x-change"] {
        Value::Null => &option["items"]["x-change"],
        stated => stated,
    }
}

fn is(key: &str, change: Change) -> bool {
    CHANGES.get(key) == Some(&change)
}

impl DiskSpec {
    /// Returns these options with those that a switch to the image of `switched` changes: all that
    /// it takes to open that image again. The others, which may be temporary there, stay.
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
        keys.retain(|key| is(key, Change::Data));
        keys
    }

    /// Returns the changes that turn this definition into `wanted`.
    pub fn changes_to(&self, wanted: &DiskSpec) -> Changes {
        let bare = |table: &DiskSpec| {
            let mut table = table.clone().with_format();
            table.filters.iter_mut().for_each(|one| one.options.clear());
            table
        };
        if bare(self) != bare(wanted) {
            let mut others = self.differences(wanted);
            others.retain(|key| !is(key, Change::Live));
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

    #[test]
    fn each_option_says_what_a_change_means() {
        let error = serde_json::from_str::<DiskSpec>(r#"{"?": 1}"#).unwrap_err();
        let error = error.to_string();
        // unknown field `?`, expected one of `name`, `image` ...
        let keys: BTreeSet<_> = error.split('`').skip(3).step_by(2).collect();
        assert_eq!(keys, CHANGES.keys().map(String::as_str).collect());
        let schema = serde_json::to_value(DiskSpec::schema()).unwrap();
        for (key, option) in schema["properties"].as_object().unwrap() {
            assert!(stated(option).is_string(), "{key}: {option}");
        }
    }

    #[test]
    fn documentation_lists_what_can_change() {
        let text = include_str!("../../../docs/disks.md");
        let (_, list) = text.split_once("These options can change:").unwrap();
        let (list, _) = list.split_once("and the list of filters").unwrap();
        let listed = list.split('`').skip(1).step_by(2).chain(["filters"]);
        let live = CHANGES.keys().filter(|key| is(key, Change::Live));
        assert_eq!(
            live.map(String::as_str).collect::<BTreeSet<_>>(),
            listed.collect()
        );
    }
}
