//! `readahead`: reads ahead of sequential reads, for slow storage.

mod regions;
mod streams;
mod windows;

use crate::about::{About, Opt};
use crate::filter::Kind;
use crate::layer::Layer;
use crate::live::View;
use crate::registry::Filters;
use crate::values::{Values, number, size};
use fathom_core::{Channel, Cx, DiskInfo, Op, PartState, RequestId};
use regions::Regions;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use streams::Streams;
use windows::{Hit, Windows};

/// Maximum number of windows of one worker.
const MOST_WINDOWS: u64 = 1024;

pub(crate) struct Readahead {
    /// Writes in flight and completed, by region, for all workers of the disk.
    regions: Arc<Regions>,
    /// Size of the disk in bytes; 0 before the first worker has started.
    disk: Arc<AtomicU64>,
}

pub(crate) struct Settings {
    size: u64,
    after: u64,
    windows: usize,
}

impl Kind for Readahead {
    const ABOUT: &'static About = &About {
        name: "readahead",
        what: "read ahead of sequential reads, for slow storage",
        options: &[
            Opt::new(
                "size",
                "BYTES",
                "256k",
                "size of a read, and of the data read ahead for each reader",
            ),
            Opt::new(
                "after",
                "NUMBER",
                "2",
                "sequential reads before reading ahead begins",
            ),
            Opt::new(
                "memory",
                "BYTES",
                "16M",
                "memory for data read ahead, for each I/O thread",
            ),
        ],
    };

    type Settings = Settings;

    fn parse(values: &Values<'_>) -> Result<Settings, String> {
        let size = values.get("size", |text| match size(text)? {
            size if (4096..=8 << 20).contains(&size) && size.is_multiple_of(4096) => Ok(size),
            _ => Err(format!("'{text}' is not a multiple of 4k from 4k to 8M")),
        })?;
        let memory = values.get("memory", crate::values::size)?;
        if memory < 2 * size {
            return Err("readahead: memory: less than twice the size".into());
        }
        Ok(Settings {
            size,
            after: values.get("after", number)?,
            windows: (memory / size).min(MOST_WINDOWS) as usize,
        })
    }

    fn new(_: &Settings, _: &Filters, _: Option<PartState>) -> Result<Readahead, String> {
        Ok(Readahead {
            regions: Arc::new(Regions::new()),
            disk: Arc::default(),
        })
    }

    fn resized(&self, before: u64, now: u64) {
        self.disk.store(now, Ordering::Relaxed);
        let (start, end) = (before.min(now), before.max(now));
        self.regions.begin_write(start, end - start);
        self.regions.end_write(start, end - start);
    }

    fn layer(
        self: &Arc<Self>,
        settings: View<Settings>,
        cx: &mut Cx,
        below: &DiskInfo,
    ) -> io::Result<Box<dyn Layer>> {
        // The disk may have been resized since `below` was read.
        let order = Ordering::Relaxed;
        let _ = self.disk.compare_exchange(0, below.size, order, order);
        Ok(Box::new(ReadingAhead {
            windows: Windows::new(cx, MOST_WINDOWS as usize, self.disk.clone())?,
            settings,
            streams: Streams::default(),
            regions: self.regions.clone(),
        }))
    }
}

struct ReadingAhead {
    settings: View<Settings>,
    regions: Arc<Regions>,
    streams: Streams,
    windows: Windows,
}

fn writes(op: Op) -> bool {
    matches!(op, Op::Write | Op::Discard | Op::WriteZeroes)
}

impl Layer for ReadingAhead {
    fn submit(&mut self, cx: &mut Cx, id: RequestId, below: &mut dyn Channel) {
        let request = &cx.slab[id];
        if writes(request.op) {
            self.regions.begin_write(request.offset, request.len);
        }
        if request.op != Op::Read {
            return below.submit(cx, id);
        }
        let (source, offset, len) = (request.source, request.offset, request.len);
        match self.windows.find(&self.regions, offset, len) {
            Some(Hit::Here(n)) => self.windows.serve(cx, id, n),
            Some(Hit::Coming(n)) => self.windows.wait(cx, id, n),
            None => below.submit(cx, id),
        }
        let (settings, windows) = (&self.settings, &mut self.windows);
        let stream = self.streams.note(source, offset, len);
        if stream.hits < settings.after {
            return;
        }
        stream.ahead = stream.ahead.max(stream.next);
        while stream.ahead < stream.next + settings.size {
            let most = (settings.windows, settings.size);
            match windows.fetch(cx, below, &self.regions, source, stream.ahead, most) {
                0 => break,
                fetched => stream.ahead += fetched,
            }
        }
    }

    fn completed(&mut self, cx: &mut Cx, id: RequestId) {
        let request = &cx.slab[id];
        if writes(request.op) {
            self.regions.end_write(request.offset, request.len);
        }
    }

    fn settled(&mut self, cx: &mut Cx, below: &mut dyn Channel) {
        self.windows.settle(cx, below, &self.regions);
    }

    fn timer(&mut self, _: &mut Cx, _: &mut dyn Channel) {
        self.settings.refresh();
    }
}
