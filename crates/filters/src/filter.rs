//! A filter as the daemon has it: settings that can be looked at and changed,
//! and a layer for each worker.

use crate::about::About;
use crate::layer::Layer;
use crate::live::{Live, View};
use crate::registry::Filters;
use crate::values::Values;
use fathom_core::{Cx, DiskInfo, Left, Part};
use serde_json::json;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// One filter around one disk, shared by all of its workers.
pub trait Filter: Part {
    fn about(&self) -> &'static About;

    /// The options that are not at their defaults, in the order of
    /// [`About::options`].
    fn values(&self) -> Vec<(&'static str, String)>;

    /// Change all of these, or none and say why. An empty value is the
    /// option's default. Workers go by it once they have looked.
    fn set(&self, changes: &[(String, String)]) -> Result<(), String>;

    /// What the disk is like behind it.
    fn info(&self, below: DiskInfo) -> DiskInfo {
        below
    }

    /// For how long its workers have held requests back, all together; None: that is not counted.
    fn held(&self) -> Option<Duration> {
        None
    }

    /// The disk was taken into use: no request has come yet.
    fn opened(&self) {}

    /// The disk below has another size, in bytes: what was kept of it behind the smaller of the two
    /// ends is not to be had any more.
    fn resized(&self, _before: u64, _now: u64) {}

    /// See [`Disk::connect_delay`](fathom_core::Disk::connect_delay).
    fn connect_delay(&self) -> Duration {
        Duration::ZERO
    }

    /// For one worker, on its thread. `below` is what the disk below is like.
    fn layer(&self, cx: &mut Cx, below: &DiskInfo) -> io::Result<Box<dyn Layer>>;
}

/// What the filters of one kind have of their own.
pub(crate) trait Kind: Send + Sync + Sized + 'static {
    const ABOUT: &'static About;

    /// All options, understood.
    type Settings: Send + Sync + 'static;

    fn parse(values: &Values<'_>) -> Result<Self::Settings, String>;

    /// `filters` has what is shared by several disks; `lent` is what a predecessor's has lent.
    fn new(
        settings: &Self::Settings,
        filters: &Filters,
        lent: Option<Left>,
    ) -> Result<Self, String>;

    /// Of a filter that shares its options with others: whoever sets them
    /// last sets them for all.
    fn shared_options(&self) -> Option<Arc<Options<Self::Settings>>> {
        None
    }

    /// Of such a filter: it says nothing of what it shares, and goes by what is there.
    fn joins(_settings: &Self::Settings) -> bool {
        false
    }

    /// New settings are about to be used. An error keeps the old ones.
    fn changing(&self, _to: &Self::Settings) -> Result<(), String> {
        Ok(())
    }

    /// Do what an option asks for that is no setting.
    fn act(&self, _option: &'static str, _value: &str) -> Result<(), String> {
        Ok(())
    }

    fn info(_settings: &Self::Settings, below: DiskInfo) -> DiskInfo {
        below
    }

    /// See [`Part::may_go`].
    fn may_go(_settings: &Self::Settings) -> Result<(), String> {
        Ok(())
    }

    /// See [`Part::lend`].
    fn lend(&self) -> io::Result<Option<Left>> {
        Ok(None)
    }

    /// See [`Part::leave`].
    fn leave(&self) -> io::Result<Option<Left>> {
        Ok(None)
    }

    /// See [`Part::inherit`]. `is_same`: it had the same options.
    fn inherit(&self, _left: Left, _is_same: bool) -> Result<(), String> {
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

/// Options as they are written, understood.
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

/// A filter of that kind, with its options.
pub(crate) fn make<K: Kind>(
    written: &[(String, String)],
    filters: &Filters,
    lent: Option<Left>,
) -> Result<Arc<dyn Filter>, String> {
    let (raw, settings) = parse::<K>(written)?;
    let kind = Arc::new(K::new(&settings, filters, lent)?);
    let joins = K::joins(&settings);
    let options = match kind.shared_options() {
        Some(options) if joins && !options.raw().is_empty() => options,
        Some(options) => {
            options.live.set(settings);
            *options.raw() = raw;
            options
        }
        None => {
            let options = Options::new(settings);
            *options.raw() = raw;
            Arc::new(options)
        }
    };
    Ok(Arc::new(Instance { kind, options }))
}

/// The options that are not at their defaults, as the user wrote them.
pub(crate) type Raw = Vec<(&'static str, String)>;

/// What a filter has been told.
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

    fn raw(&self) -> MutexGuard<'_, Raw> {
        self.raw.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is left beside the values of a kind.
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
    fn may_go(&self) -> Result<(), String> {
        K::may_go(&self.options.live.get())
    }

    fn lend(&self) -> io::Result<Option<Left>> {
        self.kind.lend()
    }

    fn leave(&self) -> io::Result<Option<Left>> {
        let left = self.kind.leave()?;
        Ok(left.map(|mut left| {
            left.values[OPTIONS] = json!(*self.options.raw());
            left
        }))
    }

    fn inherit(&self, left: Left) -> Result<(), String> {
        let is_same = left.values[OPTIONS] == json!(*self.options.raw());
        self.kind.inherit(left, is_same)
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
        self.options.raw().clone()
    }

    fn set(&self, changes: &[(String, String)]) -> Result<(), String> {
        let mut raw = self.options.raw();
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
