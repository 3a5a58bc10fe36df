//! A filter as the server sees it: settings that can be read and changed, and a layer for each
//! worker.

use crate::about::About;
use crate::layer::Layer;
use crate::live::{Live, View};
use crate::registry::Filters;
use crate::values::Values;
use fathom_core::{Cx, DiskInfo, Part, PartState};
use parking_lot::Mutex;
use serde_json::json;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A filter around one disk, shared by all workers of the disk.
pub trait Filter: Part {
    /// Returns the description of the filter's kind.
    fn about(&self) -> &'static About;

    /// Returns the options that are not at their defaults, in the order of [`About::options`].
    fn values(&self) -> Vec<(&'static str, String)>;

    /// Applies all changes, or none and returns the reason. An empty value restores the option's
    /// default. Workers use the new settings once they have looked.
    fn set(&self, changes: &[(String, String)]) -> Result<(), String>;

    /// Returns the properties of the filtered disk, given those of the disk below.
    fn info(&self, below: DiskInfo) -> DiskInfo {
        below
    }

    /// Returns the total time for which the workers have held requests back; none if the filter
    /// does not measure it.
    fn held(&self) -> Option<Duration> {
        None
    }

    /// Called when the disk was activated and no request has arrived yet.
    fn opened(&self) {}

    /// Called when the disk below was resized; sizes are in bytes. The filter drops its data beyond
    /// the smaller of the two sizes.
    fn resized(&self, _before: u64, _now: u64) {}

    /// See [`Disk::connect_delay`](fathom_core::Disk::connect_delay).
    fn connect_delay(&self) -> Duration {
        Duration::ZERO
    }

    /// Creates the layer of one worker, on its thread. `below` describes the disk below.
    fn layer(&self, cx: &mut Cx, below: &DiskInfo) -> io::Result<Box<dyn Layer>>;
}

/// The part of a filter that is specific to its kind.
pub(crate) trait Kind: Send + Sync + Sized + 'static {
    const ABOUT: &'static About;

    /// All options in parsed form.
    type Settings: Send + Sync + 'static;

    fn parse(values: &Values<'_>) -> Result<Self::Settings, String>;

    /// Creates a filter. `filters` holds state shared by several disks; `early_state` is the state
    /// that the predecessor's filter has passed early.
    fn new(
        settings: &Self::Settings,
        filters: &Filters,
        early_state: Option<PartState>,
    ) -> Result<Self, String>;

    /// Returns the options that this filter shares with others, if any. The filter that sets them
    /// last sets them for all.
    fn shared_options(&self) -> Option<Arc<Options<Self::Settings>>> {
        None
    }

    /// Returns whether a filter with shared options sets none of them itself and uses the existing
    /// ones.
    fn joins(_settings: &Self::Settings) -> bool {
        false
    }

    /// Called before new settings take effect. On an error the old ones stay.
    fn changing(&self, _to: &Self::Settings) -> Result<(), String> {
        Ok(())
    }

    /// Executes an option that is an action rather than a setting.
    fn act(&self, _option: &'static str, _value: &str) -> Result<(), String> {
        Ok(())
    }

    fn info(_settings: &Self::Settings, below: DiskInfo) -> DiskInfo {
        below
    }

    /// See [`Part::check_handover`].
    fn check_handover(_settings: &Self::Settings) -> Result<(), String> {
        Ok(())
    }

    /// See [`Part::early_state`].
    fn early_state(&self) -> io::Result<Option<PartState>> {
        Ok(None)
    }

    /// See [`Part::final_state`].
    fn final_state(&self) -> io::Result<Option<PartState>> {
        Ok(None)
    }

    /// See [`Part::restore`]. `is_same`: the predecessor's filter had the same options.
    fn restore(&self, _left: PartState, _is_same: bool) -> Result<(), String> {
        Ok(())
    }

    /// See [`Part::end`].
    fn end(&self, _deadline: Instant) {}

    /// See [`Filter::held`].
    fn held(&self) -> Option<Duration> {
        None
    }

    /// See [`Filter::opened`].
    fn opened(&self, _settings: &Self::Settings) {}

    /// See [`Filter::resized`].
    fn resized(&self, _before: u64, _now: u64) {}

    fn connect_delay(_settings: &Self::Settings) -> Duration {
        Duration::ZERO
    }

    fn layer(
        self: &Arc<Self>,
        settings: View<Self::Settings>,
        cx: &mut Cx,
        below: &DiskInfo,
    ) -> io::Result<Box<dyn Layer>>;
}

/// Parses options.
pub(crate) fn parse<K: Kind>(written: &[(String, String)]) -> Result<(Raw, K::Settings), String> {
    let mut raw = Raw::new();
    for (name, value) in written {
        if K::ABOUT.option(name)?.default.is_none() {
            return Err(format!(
                "{name}: only 'fathom set' can set it, while the disk is served"
            ));
        }
        apply(K::ABOUT, &mut raw, name, value)?;
    }
    let settings = K::parse(&Values::new(K::ABOUT, &raw))?;
    Ok((raw, settings))
}

/// Creates a filter of kind `K` with these options.
pub(crate) fn make<K: Kind>(
    written: &[(String, String)],
    filters: &Filters,
    early_state: Option<PartState>,
) -> Result<Arc<dyn Filter>, String> {
    let (raw, settings) = parse::<K>(written)?;
    let kind = Arc::new(K::new(&settings, filters, early_state)?);
    let joins = K::joins(&settings);
    let options = match kind.shared_options() {
        Some(options) if joins && !options.raw.lock().is_empty() => options,
        Some(options) => {
            options.live.set(settings);
            *options.raw.lock() = raw;
            options
        }
        None => {
            let options = Options::new(settings);
            *options.raw.lock() = raw;
            Arc::new(options)
        }
    };
    Ok(Arc::new(Instance { kind, options }))
}

/// The options that are not at their defaults, as the user wrote them.
pub(crate) type Raw = Vec<(&'static str, String)>;

/// Options of a filter, as written and in parsed form.
pub(crate) struct Options<S> {
    raw: Mutex<Raw>,
    live: Arc<Live<S>>,
}

impl<S> Options<S> {
    pub(crate) fn new(settings: S) -> Options<S> {
        Options {
            raw: Mutex::default(),
            live: Live::new(settings),
        }
    }

    pub(crate) fn settings(&self) -> Arc<S> {
        self.live.get()
    }
}

/// Key of the options in the handover state, besides the values of the kind.
const OPTIONS: &str = "options";

struct Instance<K: Kind> {
    kind: Arc<K>,
    options: Arc<Options<K::Settings>>,
}

fn apply(about: &'static About, raw: &mut Raw, name: &str, value: &str) -> Result<(), String> {
    let option = about.option(name)?;
    raw.retain(|(known, _)| *known != option.name);
    if !value.is_empty() {
        raw.push((option.name, value.to_owned()));
    }
    let place = |name: &str| about.options.iter().position(|o| o.name == name);
    raw.sort_by_key(|(name, _)| place(name));
    Ok(())
}

impl<K: Kind> Part for Instance<K> {
    fn check_handover(&self) -> Result<(), String> {
        K::check_handover(&self.options.live.get())
    }

    fn early_state(&self) -> io::Result<Option<PartState>> {
        self.kind.early_state()
    }

    fn final_state(&self) -> io::Result<Option<PartState>> {
        let left = self.kind.final_state()?;
        Ok(left.map(|mut left| {
            left.values[OPTIONS] = json!(*self.options.raw.lock());
            left
        }))
    }

    fn restore(&self, left: PartState) -> Result<(), String> {
        let is_same = left.values[OPTIONS] == json!(*self.options.raw.lock());
        self.kind.restore(left, is_same)
    }

    fn end(&self, deadline: Instant) {
        self.kind.end(deadline);
    }
}

impl<K: Kind> Filter for Instance<K> {
    fn about(&self) -> &'static About {
        K::ABOUT
    }

    fn values(&self) -> Vec<(&'static str, String)> {
        self.options.raw.lock().clone()
    }

    fn set(&self, changes: &[(String, String)]) -> Result<(), String> {
        let mut raw = self.options.raw.lock();
        let mut changed = raw.clone();
        let mut actions = Vec::new();
        for (name, value) in changes {
            let option = K::ABOUT.option(name)?;
            match option.default {
                Some(_) => apply(K::ABOUT, &mut changed, name, value)?,
                None => actions.push((option.name, value)),
            }
        }
        let settings = K::parse(&Values::new(K::ABOUT, &changed))?;
        for (option, value) in actions {
            self.kind.act(option, value)?;
        }
        self.kind.changing(&settings)?;
        self.options.live.set(settings);
        *raw = changed;
        Ok(())
    }

    fn info(&self, below: DiskInfo) -> DiskInfo {
        K::info(&self.options.live.get(), below)
    }

    fn held(&self) -> Option<Duration> {
        self.kind.held()
    }

    fn opened(&self) {
        self.kind.opened(&self.options.live.get());
    }

    fn resized(&self, before: u64, now: u64) {
        self.kind.resized(before, now);
    }

    fn connect_delay(&self) -> Duration {
        K::connect_delay(&self.options.live.get())
    }

    fn layer(&self, cx: &mut Cx, below: &DiskInfo) -> io::Result<Box<dyn Layer>> {
        self.kind.layer(self.options.live.view(), cx, below)
    }
}
