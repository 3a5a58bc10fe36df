//! The registry of filters.

use crate::about::About;
use crate::cow::Cow;
use crate::delay::Delay;
use crate::fault::Fault;
use crate::filter::{Filter, Kind, make, parse};
use crate::log::Log;
use crate::pause::Pause;
use crate::readahead::Readahead;
use crate::readonly::Readonly;
use crate::spec::Spec;
use crate::throttle::{Groups, Throttle};
use fathom_core::PartState;
use fathom_units::unknown_name;
use std::sync::Arc;

/// All filters, one per line.
pub static FILTERS: &[Registered] = &[
    of::<Delay>(),
    of::<Throttle>(),
    of::<Fault>(),
    of::<Cow>(),
    of::<Readonly>(),
    of::<Pause>(),
    of::<Log>(),
    of::<Readahead>(),
];

pub struct Registered {
    pub about: &'static About,
    make: Make,
    check: Check,
}

impl Registered {
    /// Checks whether a filter can be created with these options, without side effects. The error
    /// is one line for the user.
    pub fn check(&self, options: &[(String, String)]) -> Result<(), String> {
        (self.check)(options)
    }
}

type Check = fn(&[(String, String)]) -> Result<(), String>;
type Make = fn(&[(String, String)], &Filters, Option<PartState>) -> Result<Arc<dyn Filter>, String>;

const fn of<K: Kind>() -> Registered {
    Registered {
        about: K::ABOUT,
        make: make::<K>,
        check: |options| parse::<K>(options).map(drop),
    }
}

/// Returns the filter `name`.
pub fn find(name: &str) -> Result<&'static Registered, String> {
    let known = FILTERS.iter().find(|filter| filter.about.name == name);
    known.ok_or_else(|| {
        let names: Vec<_> = FILTERS.iter().map(|filter| filter.about.name).collect();
        unknown_name("filter", name, &names, "'fathom filters' lists all")
    })
}

/// Creates filters for the disks of one server.
#[derive(Default)]
pub struct Filters {
    /// State shared by several disks.
    pub groups: Groups,
}

impl Filters {
    /// Creates a filter. The error is one line for the user.
    pub fn make(&self, spec: &Spec) -> Result<Arc<dyn Filter>, String> {
        self.succeed(spec, None)
    }

    /// Creates a filter with the early state of its predecessor.
    pub fn succeed(
        &self,
        spec: &Spec,
        early_state: Option<PartState>,
    ) -> Result<Arc<dyn Filter>, String> {
        (find(&spec.name)?.make)(&spec.options, self, early_state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_filter_works_without_options_and_refuses_unknown_ones() {
        let filters = Filters::default();
        for registered in FILTERS {
            let name = registered.about.name;
            let made = filters.make(&name.parse().expect("a name"));
            let filter = made.unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(filter.values(), []);
            let unknown = format!("{name}:no-such-option=1");
            assert!(
                filters
                    .make(&unknown.parse().expect("well formed"))
                    .is_err()
            );
        }
        assert!(
            filters
                .make(&"no-such-filter".parse().expect("a name"))
                .is_err()
        );
    }

    proptest! {
        /// Every input is accepted or rejected with a single line.
        #[test]
        fn no_option_does_harm(
            filter in 0..FILTERS.len(),
            options in prop::collection::vec((0..24usize, value()), 0..5),
            changes in prop::collection::vec((0..24usize, value()), 0..5),
        ) {
            let about = FILTERS[filter].about;
            let named = |(n, value): &(usize, String)| {
                let option = about.options.get(*n).map_or("other", |option| option.name);
                (option.to_owned(), value.clone())
            };
            // Excludes options that would create or open files with random names.
            let harmless = |(name, _): &(String, String)| !["file", "histogram"].contains(&&name[..]);
            let pick = |from: &[(usize, String)]| -> Vec<_> {
                from.iter().map(named).filter(harmless).collect()
            };
            let name = about.name.to_owned();
            let spec = Spec { name, options: pick(&options) };
            match Filters::default().make(&spec) {
                Err(error) => prop_assert_eq!(error.lines().count(), 1),
                Ok(made) => {
                    let before = made.values();
                    if let Err(error) = made.set(&pick(&changes)) {
                        prop_assert_eq!(error.lines().count(), 1);
                        prop_assert_eq!(made.values(), before);
                    }
                }
            }
        }
    }

    fn value() -> impl Strategy<Value = String> {
        let plausible = "[0-9]{1,12}(ns|us|ms|s|k|M|G|%)?";
        prop_oneof![
            plausible,
            (plausible, "(\\.\\.|\\+-|\\+)", plausible).prop_map(|(a, b, c)| a + &b + &c),
            "yes|no|EIO|read\\+write|lost|torn|json|",
            "[a-zA-Z0-9.,:+-]{0,8}",
        ]
    }

    #[test]
    fn defaults_are_values() {
        let filters = Filters::default();
        for about in FILTERS.iter().map(|filter| filter.about) {
            let defaults = about.options.iter().filter_map(|option| {
                let default = option.default.filter(|d| !d.is_empty())?;
                Some((option.name.to_owned(), default.to_owned()))
            });
            let spec = Spec {
                name: about.name.to_owned(),
                options: defaults.collect(),
            };
            if let Err(error) = filters.make(&spec) {
                panic!("{spec}: {error}");
            }
        }
    }
}
