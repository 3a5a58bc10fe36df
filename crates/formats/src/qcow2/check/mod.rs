//! Checks qcow2 images: counts all references and compares them with the refcounts.
//!
//! A pass checks the whole image once, in two steps:
//!
//! 1. Structure: the L1 and L2 tables of the disk and its snapshots, and the bitmaps. Invalid
//!    entries are repaired, and then the pass ends. The next pass counts the remaining references.
//! 2. Refcounts: the refcount blocks are compared with the counters and repaired in place. If
//!    blocks are missing or shared, the refcounts are rebuilt at the end of the file. Then the
//!    copied flags are compared with the refcounts.
//!
//! A check needs two bytes and one bit of memory for each cluster of the file, a few words for each
//! L2 table, and the snapshot table. Each table is read once or twice, however often it is
//! referenced, so that the time is bounded by the file's size.

mod entries;
mod flags;
mod rebuild;
mod refcounts;
mod repair;
mod tables;

use crate::offline::check::{Bits, Checker, Counters, Lines, Options, Repair, Report};
use crate::offline::info::{read_bitmaps, read_snapshots, snapshot_table_bytes};
use crate::qcow2::bitmap::Bitmap;
use crate::qcow2::first_cluster;
use crate::qcow2::snapshot::Snapshot;
use crate::qcow2::{
    AUTOCLEAR_BITMAPS, Geometry, Header, INCOMPATIBLE_CORRUPT, INCOMPATIBLE_DIRTY, Overlap, Region,
    Regions,
};
use crate::{Error, HostOffset, Result};
use fathom_files::ImageFile;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The check of this format.
pub(crate) static CHECKER: Checker = Checker { pass, mark_clean };

/// The number of references to an L2 table, and its state.
#[derive(Clone, Copy, Default)]
struct Uses {
    /// Number of references from the active L1 table.
    active: u64,
    /// Number of references from all L1 tables.
    total: u64,
    /// Whether the table has invalid entries, which can be repaired.
    broken: bool,
}

struct Pass<'a, 'b> {
    file: &'a dyn ImageFile,
    header: Header,
    g: Geometry,
    file_len: u64,
    repair: Repair,
    snapshots: Vec<Snapshot>,
    /// Offsets of snapshots' L1 tables that have invalid entries.
    broken_l1: BTreeSet<HostOffset>,
    /// The regions that the header refers to.
    regions: Regions,
    bitmaps: Vec<Bitmap>,
    counts: Counters,
    /// References to L2 tables by the tables' offsets.
    tables: BTreeMap<HostOffset, Uses>,
    /// Offsets of the refcount blocks; 0 for missing blocks.
    blocks: Vec<HostOffset>,
    /// Clusters whose refcount in the file is one.
    single: Bits,
    /// Whether the refcounts cannot be repaired in place.
    rebuild: bool,
    /// Whether invalid tables or entries were found and not repaired.
    broken_structure: bool,
    /// Ranges of clusters that a repair has freed.
    freed: Vec<Range<u64>>,
    report: Report,
    lines: &'a mut Lines<'b>,
}

fn pass(file: &dyn ImageFile, options: &Options, lines: &mut Lines) -> Result<Report> {
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
    // Clusters that a broken table refers to appear to be free, so the refcounts are not rebuilt
    // then.
    if pass.rebuild && pass.repair == Repair::All && !pass.broken_structure {
        pass.rebuild_refcounts()?;
        return Ok(pass.report);
    }
    if pass.rebuild && pass.repair == Repair::Leaks {
        pass.refuse_rebuild();
    }
    if pass.report.repaired() {
        // The copied flags depend on the refcounts, which must therefore be durable first.
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
        let first = first_cluster(file)?;
        let mut header = Header::parse_for_repair(&first)?;
        header.encryption()?;
        if repair != Repair::Nothing {
            prepare(file, &mut header)?;
        }
        let g = header.geometry();
        let file_len = file.len().map_err(Error::io("cannot read its size"))?;
        if repair != Repair::Nothing && header.l1_entries > 0 && header.l1_offset.0 >= file_len {
            // A repair would treat all data as free space.
            return Err(Error::invalid(
                "its L1 table is beyond the file's end, which cannot be repaired",
            ));
        }
        let snapshots = read_snapshots(file, &header)?;
        let bitmaps = match read_bitmaps(file, &header) {
            // Bitmaps that cannot even be listed are dropped.
            Err(Error::Invalid(problem)) if repair == Repair::All => {
                lines.say(&format!("Repairing bitmaps, which are dropped: {problem}"));
                header.autoclear &= !AUTOCLEAR_BITMAPS;
                write_autoclear(file, &header)?;
                Vec::new()
            }
            other => other?,
        };
        // A compressed cluster may end in a cluster that begins at the end of the file.
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

    /// Counts a corruption that is not repaired.
    fn corruption(&mut self, text: &str) {
        self.report.corruptions += 1;
        if self.repair == Repair::Nothing {
            self.lines.say(&format!("ERROR {text}"));
        }
    }

    /// Counts a corruption that the caller repairs.
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

    /// Discards the freed clusters, if the file system supports that. The refcounts that free them
    /// are durable already.
    fn discard_freed(&self) {
        for range in &self.freed {
            let start = range.start << self.g.cluster_bits;
            let end = (range.end << self.g.cluster_bits).min(self.file_len);
            // A failure only wastes space.
            let _ = self.file.discard(start, end.saturating_sub(start));
        }
    }

    /// The first cluster boundary at or after the end of the file, where new structures are
    /// written.
    fn end(&self) -> HostOffset {
        HostOffset(self.file_len).up_to(self.g.cluster_size())
    }

    /// Whether the file contains these bytes. Part of the last cluster may be missing.
    fn in_file(&self, offset: HostOffset, len: u64) -> bool {
        let end = offset.checked_add(len);
        end.is_some_and(|end| end.0 < self.file_len.saturating_add(self.g.cluster_size()))
    }

    /// Whether each of these clusters has exactly `times` references, and therefore no other user.
    /// Only then may they be written to.
    fn is_alone(&self, offset: HostOffset, len: u64, times: u64) -> bool {
        let mut clusters = offset.clusters(len, self.g.cluster_bits);
        clusters.all(|cluster| self.counts.get(cluster) == times)
    }

    /// Adds `by` references to each cluster that these bytes touch.
    fn count(&mut self, offset: HostOffset, len: u64, by: u64) {
        if len > 0 {
            for cluster in offset.clusters(len, self.g.cluster_bits) {
                self.counts.add(cluster, by);
            }
        }
    }
}

/// Prepares the first write to an image. Fails if header structures that would be written overlap
/// each other. Clears unknown autoclear bits.
fn prepare(file: &dyn ImageFile, header: &mut Header) -> Result<()> {
    let (_, overlaps) = Regions::of_header(header, 0);
    // The refcount table can be rebuilt elsewhere.
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

/// Clears the dirty and corrupt bits after all repairs, because the image is consistent.
fn mark_clean(file: &dyn ImageFile) -> Result<()> {
    let header = Header::parse(&first_cluster(file)?)?;
    let clean = header.incompatible & !(INCOMPATIBLE_DIRTY | INCOMPATIBLE_CORRUPT);
    if clean == header.incompatible {
        return Ok(());
    }
    file.sync().map_err(Error::io("cannot flush"))?;
    file.write_at(&clean.to_be_bytes(), 72)
        .map_err(Error::io("cannot write its header"))?;
    file.sync().map_err(Error::io("cannot flush"))
}
