//! Wraps a disk in its filters, lists them and changes their options.

use fathom_core::{Disk, HandoverState, Parts};
use fathom_filters::{COW, Filter, Filters, Spec, wrap};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// The filters in the order in which requests pass them.
pub struct DiskFilters(Vec<Arc<dyn Filter>>);

impl DiskFilters {
    /// Creates the list of a disk's filters.
    ///
    /// # Errors
    /// If more than one of the filters is an overlay (`cow`).
    pub fn new(filters: Vec<Arc<dyn Filter>>) -> Result<DiskFilters, String> {
        let cows = filters.iter().filter(|filter| is_cow(filter)).count();
        match cows {
            0 | 1 => Ok(DiskFilters(filters)),
            _ => Err("--filter cow: given twice; a disk has at most one overlay".into()),
        }
    }

    /// Creates the filters of a disk with the state that their predecessors have handed over.
    pub fn make(
        all: &Filters,
        specs: &[Spec],
        handover_state: &HandoverState,
    ) -> Result<DiskFilters, String> {
        let names: Vec<_> = specs.iter().map(|spec| spec.name.as_str()).collect();
        let made = specs.iter().enumerate();
        let made =
            made.map(|(at, spec)| all.succeed(spec, handover_state.take(&part_name(&names, at))));
        made.collect::<Result<_, _>>().and_then(DiskFilters::new)
    }

    /// Adds the state of each filter for a successor.
    pub fn add_to(&self, parts: &mut Parts) {
        let names: Vec<_> = self.0.iter().map(|filter| filter.about().name).collect();
        for (at, filter) in self.0.iter().enumerate() {
            parts.add(part_name(&names, at), filter.clone());
        }
    }

    /// Returns the directory of the overlay, if the filters include one.
    pub fn overlay_dir(&self) -> Option<String> {
        let cow = self.0.iter().find(|filter| is_cow(filter))?;
        let default = COW.options[0].default.unwrap_or_default();
        let given = cow.values().pop().map(|(_, dir)| dir);
        Some(given.unwrap_or_else(|| default.to_owned()))
    }

    /// Wraps the disk in its filters, except the overlay, which is a part of the disk.
    pub fn wrap(&self, disk: Arc<dyn Disk>) -> Arc<dyn Disk> {
        let around = self.0.iter().rev().filter(|filter| !is_cow(filter));
        around.fold(disk, |disk, filter| wrap(disk, filter.clone()))
    }

    /// Returns the filters, from the one nearest to the user inwards.
    pub fn info(&self) -> Vec<FilterInfo> {
        self.0.iter().map(|filter| info(&**filter)).collect()
    }

    /// Changes the options of the filter at that [position](Self::position).
    ///
    /// The caller must make the workers look afterwards.
    pub fn set(&self, at: usize, options: BTreeMap<String, String>) -> Result<FilterInfo, String> {
        let filter = &*self.0[at];
        let changes: Vec<_> = options.into_iter().collect();
        filter.set(&changes)?;
        let info = info(filter);
        tracing::info!("{info}");
        Ok(info)
    }

    /// Returns the position of the filter `name`, as [`position_of_filter`] does.
    pub fn position(&self, name: &str) -> Result<usize, String> {
        let names: Vec<_> = self.0.iter().map(|filter| filter.about().name).collect();
        position_of_filter(&names, name)
    }
}

/// Returns the name of a filter among a disk's parts; it does not depend on other filters.
fn part_name(names: &[&str], at: usize) -> String {
    let name = names[at];
    match names[..at].iter().filter(|other| **other == name).count() {
        0 => format!("filter '{name}'"),
        before => format!("filter '{name}#{}'", before + 1),
    }
}

/// Finds a filter by its name, or by `name#2` for the second one of that name.
///
/// The error is a message for the user.
pub fn position_of_filter(names: &[&str], name: &str) -> Result<usize, String> {
    let (kind, number) = match name.split_once('#') {
        Some((kind, number)) => (kind, number.parse().ok()),
        None => (name, None),
    };
    let all = names.iter().enumerate();
    let mut of_kind = all.filter(|(_, other)| **other == kind);
    let found = match number {
        Some(number) => usize::checked_sub(number, 1).and_then(|n| of_kind.nth(n)),
        None if name != kind => None,
        None => match (of_kind.next(), of_kind.next()) {
            (Some(_), Some(_)) => {
                return Err(format!(
                    "the disk has several filters '{kind}'; name one of them: {kind}#1, {kind}#2 and so on"
                ));
            }
            (found, _) => found,
        },
    };
    found.map(|(index, _)| index).ok_or_else(|| match names {
        [] => format!(
            "the disk has no filters, so none is called '{name}'; add it with `fathom disk change DISK \
             'filters=[\"{kind}\"]'`, or start the server with --filter {kind}"
        ),
        names => format!("the disk has no filter '{name}'; its filters are {}", names.join(", ")),
    })
}

/// A filter with those of its options that differ from their defaults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FilterInfo {
    /// Name of the filter's kind.
    pub name: String,
    /// Values by option name.
    pub options: BTreeMap<String, String>,
    /// Total time in ns for which its workers have held requests back, if that is counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_ns: Option<u64>,
}

/// Formats the filter as on the command line.
impl fmt::Display for FilterInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spec = Spec {
            name: self.name.clone(),
            options: self.options.clone().into_iter().collect(),
        };
        spec.fmt(f)
    }
}

fn is_cow(filter: &Arc<dyn Filter>) -> bool {
    filter.about().name == COW.name
}

fn info(filter: &dyn Filter) -> FilterInfo {
    let values = filter.values().into_iter();
    FilterInfo {
        name: filter.about().name.to_owned(),
        options: values.map(|(key, value)| (key.to_owned(), value)).collect(),
        held_ns: filter.held().map(|held| held.as_nanos() as u64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_filters::Filters;

    fn filters(specs: &[&str]) -> Result<DiskFilters, String> {
        let all = Filters::default();
        let made = specs.iter().map(|spec| all.make(&spec.parse()?));
        DiskFilters::new(made.collect::<Result<_, String>>()?)
    }

    #[test]
    fn filters_are_told_apart_by_number() {
        let disk = filters(&["delay:read=1ms", "pause", "delay:read=2ms"]).unwrap();
        let set =
            |name: &str| disk.set(disk.position(name)?, [("read".into(), "5ms".into())].into());
        assert!(set("delay").unwrap_err().contains("delay#2"));
        for bad in [
            "delay#3", "delay#0", "delay#x", "delay#", "throttle", "pause#2",
        ] {
            assert!(set(bad).is_err(), "{bad}");
        }
        set("delay#2").unwrap();
        let shown: Vec<_> = disk.info().iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["delay:read=1ms", "pause", "delay:read=5ms"]);
        let frozen = disk.set(
            disk.position("pause").unwrap(),
            [("frozen".into(), "yes".into())].into(),
        );
        assert_eq!(frozen.unwrap().to_string(), "pause:frozen=yes");
    }

    #[test]
    fn an_overlay_is_where_the_user_wants_it() {
        assert_eq!(filters(&["pause"]).unwrap().overlay_dir(), None);
        let dir = |spec| filters(&[spec]).unwrap().overlay_dir().unwrap();
        assert_eq!(dir("cow"), "/var/tmp");
        assert_eq!(dir("cow:dir=/x"), "/x");
        assert!(filters(&["cow", "cow"]).is_err());
    }
}
