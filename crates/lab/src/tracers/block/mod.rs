//! Traces the host's block layer: the image's I/O on the device below it.

use std::path::Path;

use fathom_run::{Kind, Pair};

use super::ftrace::{Mode, Recorder, Side, Source};
use super::scene::Scene;
use super::{Collected, Collector, Tracefs, boxed};
use crate::error::Result;

/// Name of the event file and of the collector in a round's list.
pub const NAME: &str = "block";

const DEV: Source = Source::Device("dev");
const SECTOR: Source = Source::Field("sector");
const SECTORS: Source = Source::Field("nr_sector");
const RWBS: Source = Source::Rwbs("rwbs");
/// The field's name changed in Linux 5.18.
const ERROR: Source = Source::Errno("error", "errors");

/// Events of a request or a bio. The guest's collector records the first three as well.
pub(super) const EVENTS: &[(&str, Kind, &[Source])] = &[
    (
        "block/block_bio_queue",
        Kind::BlockBioQueue,
        &[DEV, SECTOR, SECTORS, RWBS],
    ),
    (
        "block/block_rq_issue",
        Kind::BlockRqIssue,
        &[DEV, SECTOR, SECTORS, RWBS],
    ),
    (
        "block/block_rq_complete",
        Kind::BlockRqComplete,
        &[DEV, SECTOR, SECTORS, RWBS, ERROR],
    ),
    (
        "block/block_split",
        Kind::BlockSplit,
        &[DEV, SECTOR, Source::Field("new_sector")],
    ),
    (
        "block/block_bio_backmerge",
        Kind::BlockMerge,
        &[DEV, SECTOR, SECTORS, RWBS],
    ),
    (
        "block/block_bio_frontmerge",
        Kind::BlockMerge,
        &[DEV, SECTOR, SECTORS, RWBS],
    ),
];

/// Options of the recording.
#[derive(Clone, Debug)]
pub struct Options<'a> {
    /// dev_t of the whole disk (major << 20 | minor). All events in the file have this number.
    pub dev: u64,
    /// dev_t of its relevant partitions. Bios carry a partition's number, but sectors of the whole
    /// disk.
    pub partitions: &'a [u64],
    /// When the kernel's buffers are read, and their size.
    pub mode: Mode,
}

/// A running recording of the block layer's events.
#[derive(Debug)]
pub struct Block {
    recorder: Recorder,
}

/// Starts to record the events of one device.
///
/// # Errors
/// When the kernel does not support tracing.
pub fn start(tracefs: &Tracefs, options: &Options) -> Result<Block> {
    let mut recorder = Recorder::new(tracefs, NAME, options.mode)?;
    let mut filter = format!("dev == {}", options.dev);
    for &partition in options.partitions {
        recorder.alias_device(partition, options.dev);
        filter.push_str(&format!(" || dev == {partition}"));
    }
    for (event, kind, args) in EVENTS {
        recorder.event(event, Some(&filter), *kind, args);
    }
    recorder.start()?;
    Ok(Block { recorder })
}

/// Records the device below the disk's image.
pub(super) fn in_scene(scene: &Scene) -> Option<Result<Box<dyn Collector>>> {
    let (dev, partitions) = scene.device?;
    let options = Options {
        dev,
        partitions,
        mode: scene.mode,
    };
    Some(boxed(start(scene.tracefs, &options)))
}

impl Collector for Block {
    fn name(&self) -> &'static str {
        NAME
    }

    fn halt(&mut self) -> Result<()> {
        self.recorder.halt()
    }

    fn keep(&mut self, since: Pair, until: Pair) {
        self.recorder.keep(since, until);
    }

    fn stop(self: Box<Self>, round: &Path) -> Result<Collected> {
        self.recorder.finish(round, Side::Host)
    }
}
