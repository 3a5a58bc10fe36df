//! QED: the consistency check of the specification.
//!
//! Each cluster may be referenced at most once, and a cluster without a reference is leaked. As in
//! `qemu-img check`, invalid offsets can be repaired: they become unallocated. Leaks, and clusters
//! that are referenced twice, cannot be repaired.

use super::{Cluster, FEATURE_NEED_CHECK, Geometry, Header, L2Offset, QedImage};
use crate::offline::check::{Bits, Checker, Lines, Options, Repair, Report};
use crate::{Error, HostOffset, Result};
use fathom_files::ImageFile;

/// The check of this format.
pub(crate) static CHECKER: Checker = Checker { pass, mark_clean };

/// Number of bytes of a table that are read at once.
const CHUNK: usize = 64 << 10;

struct Scan<'a, 'b> {
    file: &'a dyn ImageFile,
    geometry: Geometry,
    /// Length in bytes of the file's whole clusters.
    file_len: u64,
    repair: Repair,
    used: Bits,
    report: Report,
    lines: &'a mut Lines<'b>,
}

fn pass(file: &dyn ImageFile, options: &Options, lines: &mut Lines) -> Result<Report> {
    let mut header = QedImage::read(file)?.header;
    if options.repair != Repair::Nothing && header.prepare_for_writing() {
        write_header(file, &header)?;
    }
    let geometry = header.geometry();
    let len = file.len().map_err(Error::io("cannot read its size"))?;
    let clusters = len >> geometry.cluster_bits;
    if clusters / 8 > options.max_memory {
        return Err(Error::unsupported(format!(
            "the file's {clusters} clusters exceed the limit of a check"
        )));
    }
    let total = header.image_size.div_ceil(geometry.cluster_size());
    let mut scan = Scan {
        file,
        geometry,
        file_len: clusters << geometry.cluster_bits,
        repair: options.repair,
        used: Bits::new(clusters),
        report: Report {
            total_clusters: total,
            ..Report::default()
        },
        lines,
    };
    scan.l1(header.l1_offset)?;
    for cluster in u64::from(header.header_size)..clusters {
        if !scan.used.get(cluster) {
            scan.report.leaks += 1;
        }
    }
    Ok(scan.report)
}

/// Clears the header's need-check bit, because the image is consistent. The caller has flushed the
/// repairs.
fn mark_clean(file: &dyn ImageFile) -> Result<()> {
    let mut header = QedImage::read(file)?.header;
    if header.needs_check() {
        header.features &= !FEATURE_NEED_CHECK;
        write_header(file, &header)?;
    }
    Ok(())
}

fn write_header(file: &dyn ImageFile, header: &Header) -> Result<()> {
    file.write_at(&header.encode(), 0)
        .map_err(Error::io("cannot write its header"))?;
    file.sync().map_err(Error::io("cannot flush"))
}

impl Scan<'_, '_> {
    fn corruption(&mut self, text: &str) {
        self.report.corruptions += 1;
        if self.repair == Repair::Nothing {
            self.lines.say(&format!("ERROR {text}"));
        }
    }

    /// Reports or repairs an invalid offset in the table entry at `at`.
    fn invalid_offset(&mut self, at: HostOffset, what: &str, offset: HostOffset) -> Result<()> {
        let text = format!("{what} offset={offset:#x}: not a cluster of the file");
        if self.repair != Repair::All {
            self.corruption(&text);
            return Ok(());
        }
        self.lines.say(&format!("Repairing {text}"));
        self.file
            .write_at(&[0; 8], at.0)
            .map_err(Error::io("cannot write a table"))?;
        self.report.corruptions_fixed += 1;
        Ok(())
    }

    /// Marks clusters as used. Returns false if a cluster was already used; each such cluster is a
    /// corruption.
    fn mark(&mut self, what: &str, offset: HostOffset, clusters: u64) -> bool {
        let first = offset.cluster(self.geometry.cluster_bits);
        let mut fresh = true;
        for cluster in first..first + clusters {
            if self.used.get(cluster) {
                self.corruption(&format!("{what} offset={offset:#x}: used twice"));
                fresh = false;
            }
            self.used.set(cluster);
        }
        fresh
    }

    /// Calls `visit` with the place and value of each entry that is not 0.
    fn entries(
        &mut self,
        table: HostOffset,
        mut visit: impl FnMut(&mut Self, HostOffset, u64) -> Result<()>,
    ) -> Result<()> {
        let mut chunk = vec![0; CHUNK.min(self.geometry.table_bytes() as usize)];
        for done in (0..self.geometry.table_bytes()).step_by(chunk.len()) {
            let at = table + done;
            self.file
                .read_at(&mut chunk, at.0)
                .map_err(Error::io("cannot read a table"))?;
            for (i, entry) in chunk.chunks_exact(8).enumerate() {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(entry);
                let value = u64::from_le_bytes(bytes);
                if value != 0 {
                    visit(self, at + i as u64 * 8, value)?;
                }
            }
        }
        Ok(())
    }

    fn l1(&mut self, offset: HostOffset) -> Result<()> {
        let table_clusters = 1 << self.geometry.table_clusters_bits;
        self.mark("L1 table", offset, table_clusters);
        self.entries(offset, |scan, at, entry| {
            let decoded = L2Offset(entry).decode(&scan.geometry, scan.file_len);
            let Ok(Some(table)) = decoded else {
                return scan.invalid_offset(at, "L2 table", HostOffset(entry));
            };
            match scan.mark("L2 table", table, table_clusters) {
                true => scan.l2(table),
                false => Ok(()),
            }
        })
    }

    fn l2(&mut self, table: HostOffset) -> Result<()> {
        let mut last = 0;
        let cluster_size = self.geometry.cluster_size();
        self.entries(table, |scan, at, entry| {
            let decoded = Cluster::decode(entry, &scan.geometry, scan.file_len);
            if decoded == Ok(Cluster::Zero) {
                return Ok(());
            }
            scan.report.allocated_clusters += 1;
            if last != 0 && entry.wrapping_sub(last) != cluster_size {
                scan.report.fragmented_clusters += 1;
            }
            last = entry;
            let Ok(Cluster::Data { host }) = decoded else {
                return scan.invalid_offset(at, "data cluster", HostOffset(entry));
            };
            scan.mark("data cluster", host, 1);
            Ok(())
        })
    }
}
