//! `delay`: adds time to every operation.

mod recorded;
mod spread;

use crate::about::{About, Opt};
use crate::filter::Kind;
use crate::held::Held;
use crate::layer::Layer;
use crate::live::View;
use crate::random::{Random, mix};
use crate::registry::Filters;
use crate::values::{Values, number};
use fathom_core::{Channel, Clock, Cx, DiskInfo, Op, PartState, RequestId};
use spread::Spread;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Options and the operations that they delay.
const OPERATIONS: [(&str, Op); 5] = [
    ("read", Op::Read),
    ("write", Op::Write),
    ("flush", Op::Flush),
    ("trim", Op::Discard),
    ("zero", Op::WriteZeroes),
];

const TIME: &str = "TIME|FROM..TO|MEAN+-SD";

pub(crate) struct Delay {
    /// Number of workers so far, which gives each worker its own random numbers.
    workers: AtomicU64,
    /// Tick from which the disk counts as open. Activation does not wait for it, but requests do: a
    /// front-end that stops in the meantime must not be delayed.
    ready: AtomicU64,
}

pub(crate) struct Settings {
    /// Delays indexed by `Op as usize`.
    operations: [Option<Spread>; Op::COUNT],
    open: Spread,
    connect: Spread,
    seed: u64,
}

impl Kind for Delay {
    const ABOUT: &'static About = &About {
        name: "delay",
        what: "delay operations; any number of them wait at the same time",
        options: &[
            Opt::new(
                "read",
                TIME,
                "0",
                "added time of reads: fixed, uniform or normal",
            ),
            Opt::new("write", TIME, "0", "added time of writes"),
            Opt::new("flush", TIME, "0", "added time of flushes"),
            Opt::new("trim", TIME, "0", "added time of discards"),
            Opt::new("zero", TIME, "0", "added time of writes of zeroes"),
            Opt::new(
                "open",
                TIME,
                "0",
                "added time before the first request after the image is opened",
            ),
            Opt::new(
                "connect",
                TIME,
                "0",
                "added time before a connecting client is served",
            ),
            Opt::new(
                "histogram",
                "FILE",
                "",
                "replay the device latencies in a file that `fathom stats --json` wrote; the \
                 options above take precedence",
            ),
            Opt::new("seed", "NUMBER", "0", "seed of the random numbers"),
        ],
    };

    type Settings = Settings;

    fn parse(values: &Values<'_>) -> Result<Settings, String> {
        let mut operations = match values.optional("histogram", recorded::read)? {
            Some(recorded) => recorded,
            None => std::array::from_fn(|_| None),
        };
        for (name, op) in OPERATIONS {
            if let Some(spread) = values.optional(name, Spread::parse)? {
                operations[op as usize] = (!spread.is_zero()).then_some(spread);
            }
        }
        Ok(Settings {
            operations,
            open: values.get("open", Spread::parse)?,
            connect: values.get("connect", Spread::parse)?,
            seed: values.get("seed", number)?,
        })
    }

    fn new(_: &Settings, _: &Filters, _: Option<PartState>) -> Result<Delay, String> {
        Ok(Delay {
            workers: AtomicU64::new(0),
            ready: AtomicU64::new(0),
        })
    }

    fn opened(&self, settings: &Settings) {
        let clock = Clock::get();
        let delay = clock.ticks(settings.open.draw_time(settings.seed));
        self.ready.store(clock.now() + delay, Ordering::Relaxed);
    }

    fn connect_delay(settings: &Settings) -> Duration {
        settings.connect.draw_time(settings.seed)
    }

    fn layer(
        self: &Arc<Self>,
        settings: View<Settings>,
        _: &mut Cx,
        _: &DiskInfo,
    ) -> io::Result<Box<dyn Layer>> {
        let worker = self.workers.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(Delaying {
            random: Random::new(mix(settings.seed) ^ mix(worker)),
            settings,
            delay: self.clone(),
            held: Held::default(),
        }))
    }
}

struct Delaying {
    settings: View<Settings>,
    delay: Arc<Delay>,
    random: Random,
    held: Held,
}

impl Layer for Delaying {
    fn submit(&mut self, cx: &mut Cx, id: RequestId, below: &mut dyn Channel) {
        let op = cx.slab[id].op;
        let spread = &self.settings.operations[op as usize];
        let delay = spread.as_ref().map_or(0, |s| s.draw(&mut self.random));
        let due = cx.now().max(self.delay.ready.load(Ordering::Relaxed)) + delay;
        if due == cx.now() || !cx.may_wait(id) {
            return below.submit(cx, id);
        }
        self.held.hold(cx, id, due);
    }

    /// New settings apply to new requests only; waiting requests have drawn their time already.
    fn timer(&mut self, cx: &mut Cx, below: &mut dyn Channel) {
        self.settings.refresh();
        self.held.release_due(cx, below);
    }

    fn drain(&mut self, cx: &mut Cx, _source: u16, below: &mut dyn Channel) {
        self.held.release_leaving(cx, below);
    }
}
