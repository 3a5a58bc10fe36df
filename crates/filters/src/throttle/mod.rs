//! `throttle`: limits operations and bytes per second, with QEMU's options.

mod bucket;
mod group;
mod limits;
mod queues;

pub use group::Groups;

use crate::about::{About, Opt};
use crate::filter::{Kind, Options};
use crate::layer::Layer;
use crate::live::View;
use crate::registry::Filters;
use crate::values::Values;
use fathom_core::{Channel, Clock, Cx, DiskInfo, Op, PartState, RequestId};
use group::Group;
use limits::Limits;
use queues::Queues;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub(crate) struct Throttle {
    group: Arc<Group>,
    /// Time for which workers have held requests back, in ticks.
    held: Arc<AtomicU64>,
}

pub(crate) struct Settings {
    limits: Limits,
    group: Option<String>,
}

const RATE: &str = "limit per second; 0: no limit";
const BURST: &str = "limit per second in a burst";
const LENGTH: &str = "maximum length of a burst";

const fn iops(name: &'static str) -> Opt {
    Opt::new(name, "NUMBER", "0", RATE)
}

const fn bps(name: &'static str) -> Opt {
    Opt::new(name, "BYTES", "0", RATE)
}

const fn iops_max(name: &'static str) -> Opt {
    Opt::new(name, "NUMBER", "0", BURST)
}

const fn bps_max(name: &'static str) -> Opt {
    Opt::new(name, "BYTES", "0", BURST)
}

const fn length(name: &'static str) -> Opt {
    Opt::new(name, "SECONDS", "1", LENGTH)
}

impl Kind for Throttle {
    const ABOUT: &'static About = &About {
        name: "throttle",
        what: "limit operations and bytes a second, as QEMU's throttling does; discards and \
               zeroes count as writes, flushes not at all",
        options: &[
            iops("iops-total"),
            iops_max("iops-total-max"),
            length("iops-total-max-length"),
            iops("iops-read"),
            iops_max("iops-read-max"),
            length("iops-read-max-length"),
            iops("iops-write"),
            iops_max("iops-write-max"),
            length("iops-write-max-length"),
            bps("bps-total"),
            bps_max("bps-total-max"),
            length("bps-total-max-length"),
            bps("bps-read"),
            bps_max("bps-read-max"),
            length("bps-read-max-length"),
            bps("bps-write"),
            bps_max("bps-write-max"),
            length("bps-write-max-length"),
            Opt::new(
                "iops-size",
                "BYTES",
                "0",
                "a longer operation counts as several of this size; 0: as one",
            ),
            Opt::new(
                "group",
                "NAME",
                "",
                "group of disks that share these limits; a disk that sets limits sets them for \
                 the whole group",
            ),
        ],
    };

    type Settings = Settings;

    fn parse(values: &Values<'_>) -> Result<Settings, String> {
        Ok(Settings {
            limits: Limits::parse(values)?,
            group: values.text("group").map(str::to_owned),
        })
    }

    fn new(
        settings: &Settings,
        filters: &Filters,
        _: Option<PartState>,
    ) -> Result<Throttle, String> {
        let group = match &settings.group {
            Some(name) => filters.groups.join(name),
            None => Group::new(None),
        };
        if !Throttle::joins(settings) {
            group.go_by(&settings.limits);
        }
        Ok(Throttle {
            group,
            held: Arc::default(),
        })
    }

    fn final_state(&self) -> io::Result<Option<PartState>> {
        Ok(Some(PartState {
            values: self.group.levels(),
            ..PartState::default()
        }))
    }

    fn restore(&self, left: PartState, is_same: bool) -> Result<(), String> {
        // After a change of options, the buckets start anew.
        match is_same {
            true => self.group.restore(left.values),
            false => Ok(()),
        }
    }

    fn held(&self) -> Option<Duration> {
        let ns = Clock::get().ns(self.held.load(Ordering::Relaxed));
        Some(Duration::from_nanos(ns))
    }

    fn shared_options(&self) -> Option<Arc<Options<Settings>>> {
        Some(self.group.options())
    }

    fn joins(settings: &Settings) -> bool {
        settings.group.is_some() && settings.limits == Limits::unlimited()
    }

    fn changing(&self, to: &Settings) -> Result<(), String> {
        if to.group.as_deref() != self.group.name() {
            return Err("throttle: group: cannot be changed while the disk is served".into());
        }
        // As in QEMU, consumption under the old limits is forgotten.
        self.group.begin(&to.limits);
        Ok(())
    }

    fn layer(
        self: &Arc<Self>,
        settings: View<Settings>,
        _: &mut Cx,
        _: &DiskInfo,
    ) -> io::Result<Box<dyn Layer>> {
        Ok(Box::new(Throttling {
            settings,
            group: self.group.clone(),
            queues: Queues::default(),
            held: self.held.clone(),
            since: None,
        }))
    }
}

struct Throttling {
    settings: View<Settings>,
    group: Arc<Group>,
    queues: Queues,
    held: Arc<AtomicU64>,
    /// Start of the time with held requests that is not in `held` yet, in ticks.
    since: Option<u64>,
}

impl Throttling {
    /// Updates `held` after a request may have begun or ended waiting.
    fn note(&mut self, now: u64) {
        if let Some(since) = self.since {
            self.held.fetch_add(now - since, Ordering::Relaxed);
        }
        self.since = self.queues.holds().then_some(now);
    }
}

impl Layer for Throttling {
    fn submit(&mut self, cx: &mut Cx, id: RequestId, below: &mut dyn Channel) {
        let op = cx.slab[id].op;
        let is_counted = !matches!(op, Op::Flush | Op::BlockStatus);
        let (limits, group) = (&self.settings.limits, &self.group);
        if is_counted && cx.may_wait(id) {
            self.queues.submit(cx, id, below, |cx, id| {
                group.reserve(limits, &cx.slab[id], cx.now())
            });
            if self.queues.holds() {
                self.note(cx.now());
            }
            return;
        }
        if is_counted {
            group.reserve(limits, &cx.slab[id], cx.now());
        }
        below.submit(cx, id);
    }

    fn timer(&mut self, cx: &mut Cx, below: &mut dyn Channel) {
        if self.settings.refresh() {
            // The reservations were made under the old limits.
            self.queues.forget_reservations();
        }
        let (limits, group) = (&self.settings.limits, &self.group);
        self.queues.release_due(cx, below, |cx, id| {
            group.reserve(limits, &cx.slab[id], cx.now())
        });
        self.note(cx.now());
    }

    fn drain(&mut self, cx: &mut Cx, _source: u16, below: &mut dyn Channel) {
        // Requests released early are counted, too, so that others wait longer.
        let (limits, group) = (&self.settings.limits, &self.group);
        self.queues.release_leaving(cx, below, |cx, id| {
            group.reserve(limits, &cx.slab[id], cx.now())
        });
        self.note(cx.now());
    }
}
