//! qcow2: all references are counted and compared with the refcounts.
//!
//! A pass looks at everything once, in two halves:
//!
//! 1. structure: L1 and L2 tables of the disk and of its snapshots, and the
//!    bitmaps. Entries that cannot be right are repaired, and the pass ends:
//!    the next one counts what is left;
//! 2. refcounts: the blocks against the counters. They are repaired in place,
//!    or, when blocks are missing or shared, built anew at the end of the
//!    file. Then the copied flags, against the refcounts.
//!
//! Memory: two bytes and one bit for each cluster of the file, a few words
//! for each L2 table, and the snapshot table. Each table is read once or
//! twice, however often it is referred to, so that time is bounded by the
//! file's size.

mod entries;
mod flags;
mod rebuild;
mod refcounts;
mod repair;
mod tables;

use super::counters::{Bits, Counters};
use super::{Lines, Options, Repair, Report};
use crate::offline::info::{read_bitmaps, read_snapshots, snapshot_table_bytes};
use crate::offline::read::qcow2_first_cluster;
use crate::qcow2::bitmap::Bitmap;
use crate::qcow2::snapshot::Snapshot;
use crate::qcow2::{
    AUTOCLEAR_BITMAPS, Geometry, Header, INCOMPATIBLE_CORRUPT, INCOMPATIBLE_DIRTY, Overlap, Region,
    Regions,
};
use crate::{Error, HostOffset, Result};
use fathom_files::ImageFile;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// How often an L2 table is referred to, and what is known of it.
#[derive(Clone, Copy, Default)]
struct Uses {
    /// From the active L1 table.
    active: u64,
    /// From any L1 table.
    total: u64,
    /// It has entries that can be repaired.
    broken: bool,
}

struct Pass<'a, 'b> {
    file: &'a dyn ImageFile,
    header: Header,
    g: Geometry,
    file_len: u64,
    repair: Repair,
    snapshots: Vec<Snapshot>,
    /// Offsets of snapshots' L1 tables that have entries which cannot be right.
    broken_l1: BTreeSet<HostOffset>,
    /// What the header refers to.
    regions: Regions,
    bitmaps: Vec<Bitmap>,
    counts: Counters,
    /// L2 tables by their offsets.
    tables: BTreeMap<HostOffset, Uses>,
    /// Places of refcount blocks; 0 where there is none.
    blocks: Vec<HostOffset>,
    /// Clusters whose refcount in the file is one.
    single: Bits,
    /// The refcounts cannot be repaired in place.
    rebuild: bool,
    /// Some tables or entries cannot be right, and are not repaired.
    broken_structure: bool,
    /// Clusters that a repair has made free, as ranges.
    freed: Vec<Range<u64>>,
    report: Report,
    lines: &'a mut Lines<'b>,
}

pub(super) fn pass(file: &dyn ImageFile, options: &Options, lines: &mut Lines) -> Result<Report> {
    let mut pass = Pass::new(file, options, lines)?;
    pass.count_structure()?;
    pass.broken_structure = pass.report.corruptions > 0;
    pass.count_refcount_structures()?;
    if pass.broken_structure && pass.repair == Repair::All {
        pass.repair_structure()?;
        if pass.report.repaired() {
            return Ok(pass.report);
        }
    }
    pass.compare_refcounts()?;
    // What a broken table refers to looks free.
    if pass.rebuild && pass.repair == Repair::All && !pass.broken_structure {
        pass.rebuild_refcounts()?;
        return Ok(pass.report);
    }
    if pass.rebuild && pass.repair == Repair::Leaks {
        pass.refuse_rebuild();
    }
    if pass.report.repaired() {
        // Flags say what refcounts say: those come first.
        pass.sync()?;
        pass.discard_freed();
    }
    pass.check_flags()?;
    Ok(pass.report)
}

impl<'a, 'b> Pass<'a, 'b> {
    fn new(
        file: &'a dyn ImageFile,
        options: &Options,
        lines: &'a mut Lines<'b>,
    ) -> Result<Pass<'a, 'b>> {
        let repair = options.repair;
        let first = qcow2_first_cluster(file)?;
        let mut header = Header::parse_for_repair(&first)?;
        header.encryption()?;
        if repair != Repair::Nothing {
            prepare(file, &mut header)?;
        }
        let g = header.geometry();
        let file_len = file.len().map_err(Error::io("cannot read its size"))?;
        if repair != Repair::Nothing && header.l1_entries > 0 && header.l1_offset.0 >= file_len {
            // Everything would be free space.
            return Err(Error::invalid(
                "its L1 table is beyond the file's end, which cannot be repaired",
            ));
        }
        let snapshots = read_snapshots(file, &header)?;
        let bitmaps = match read_bitmaps(file, &header) {
            // Bitmaps that cannot even be listed are given up.
            Err(Error::Invalid(problem)) if repair == Repair::All => {
                lines.say(&format!("Repairing bitmaps, which are dropped: {problem}"));
                header.autoclear &= !AUTOCLEAR_BITMAPS;
                write_autoclear(file, &header)?;
                Vec::new()
            }
            other => other?,
        };
        // A compressed cluster may end in a cluster of which the file has nothing.
        let clusters = g.clusters_of(file_len) + 1;
        let total_clusters = g.clusters_of(header.size & !511);
        let (regions, _) = Regions::of_header(&header, snapshot_table_bytes(&snapshots));
        Ok(Pass {
            file,
            g,
            file_len,
            repair,
            snapshots,
            broken_l1: BTreeSet::new(),
            regions,
            bitmaps,
            counts: Counters::new(clusters, options.max_memory)?,
            tables: BTreeMap::new(),
            blocks: Vec::new(),
            single: Bits::new(clusters),
            rebuild: false,
            broken_structure: false,
            freed: Vec::new(),
            report: Report {
                total_clusters,
                ..Report::default()
            },
            lines,
            header,
        })
    }

    /// A contradiction that stays.
    fn corruption(&mut self, text: &str) {
        self.report.corruptions += 1;
        if self.repair == Repair::Nothing {
            self.lines.say(&format!("ERROR {text}"));
        }
    }

    /// A contradiction that is repaired, by the caller.
    fn repairing(&mut self, text: &str) {
        self.report.corruptions_fixed += 1;
        self.lines.say(&format!("Repairing {text}"));
    }

    fn read(&self, buf: &mut [u8], offset: HostOffset) -> Result<()> {
        self.file
            .read_at(buf, offset.0)
            .map_err(Error::io("cannot read its metadata"))
    }

    fn write(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        self.file
            .write_at(buf, offset.0)
            .map_err(Error::io("cannot write its metadata"))
    }

    fn sync(&self) -> Result<()> {
        self.file.sync().map_err(Error::io("cannot flush"))
    }

    /// Gives the space of what is free back to the file system, if it can
    /// take it. The refcounts that say so are durable.
    fn discard_freed(&self) {
        for range in &self.freed {
            let start = range.start << self.g.cluster_bits;
            let end = (range.end << self.g.cluster_bits).min(self.file_len);
            // Space only: nothing depends on it.
            let _ = self.file.discard(start, end.saturating_sub(start));
        }
    }

    /// Where something new can be put.
    fn end(&self) -> HostOffset {
        HostOffset(self.file_len).up_to(self.g.cluster_size())
    }

    /// Whether the file has these bytes, but for part of the last cluster.
    fn in_file(&self, offset: HostOffset, len: u64) -> bool {
        let end = offset.checked_add(len);
        end.is_some_and(|end| end.0 < self.file_len.saturating_add(self.g.cluster_size()))
    }

    /// Whether these clusters are referred to `times`, and so are nothing
    /// else: only then may they be written to.
    fn is_alone(&self, offset: HostOffset, len: u64, times: u64) -> bool {
        let mut clusters = offset.clusters(len, self.g.cluster_bits);
        clusters.all(|cluster| self.counts.get(cluster) == times)
    }

    /// Counts `by` references to each cluster that the bytes are in.
    fn count(&mut self, offset: HostOffset, len: u64, by: u64) {
        if len > 0 {
            for cluster in offset.clusters(len, self.g.cluster_bits) {
                self.counts.add(cluster, by);
            }
        }
    }
}

/// Before the first write to an image: nothing that would be written may
/// overlap something else, and unknown autoclear bits go.
fn prepare(file: &dyn ImageFile, header: &mut Header) -> Result<()> {
    let (_, overlaps) = Regions::of_header(header, 0);
    // The refcount table can be built anew elsewhere.
    let stays = |o: &&Overlap| o.region != Region::RefcountTable;
    if let Some(overlap) = overlaps.iter().find(stays) {
        return Err(Error::invalid(format!(
            "{overlap}, which cannot be repaired"
        )));
    }
    if header.prepare_for_writing() {
        write_autoclear(file, header)?;
    }
    Ok(())
}

fn write_autoclear(file: &dyn ImageFile, header: &Header) -> Result<()> {
    if header.version < 3 {
        return Ok(());
    }
    file.write_at(&header.autoclear.to_be_bytes(), 88)
        .map_err(Error::io("cannot write its header"))?;
    file.sync().map_err(Error::io("cannot flush"))
}

/// The image is consistent: says so in its header, after everything else.
pub(super) fn mark_clean(file: &dyn ImageFile) -> Result<()> {
    let header = Header::parse(&qcow2_first_cluster(file)?)?;
    let clean = header.incompatible & !(INCOMPATIBLE_DIRTY | INCOMPATIBLE_CORRUPT);
    if clean == header.incompatible {
        return Ok(());
    }
    file.sync().map_err(Error::io("cannot flush"))?;
    file.write_at(&clean.to_be_bytes(), 72)
        .map_err(Error::io("cannot write its header"))?;
    file.sync().map_err(Error::io("cannot flush"))
}
