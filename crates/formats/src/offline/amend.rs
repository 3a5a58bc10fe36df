//! `fathom img amend`: changes format options in a qcow2 image's header.
//!
//! All changes are one [`Editor::commit`], which describes the result of a power cut.

use super::edit::{Editor, Mapping};
use super::info::read_snapshots;
use super::snapshot::store_table;
use crate::qcow2::snapshot::LEAST_EXTRA_V3;
use crate::qcow2::{
    COMPATIBLE_LAZY_REFCOUNTS, Cluster, Extension, Header, encode_feature_names, feature_names,
};
use crate::{Error, Result};
use fathom_files::ImageFile;
use std::collections::HashSet;

/// The options to change. `None` leaves an option unchanged.
#[derive(Clone, Copy, Debug, Default)]
pub struct Changes {
    /// Version of the format: 2 or 3.
    pub version: Option<u32>,
    /// Whether updates of refcounts may be postponed, which only version 3 supports.
    pub lazy_refcounts: Option<bool>,
    /// Width of refcounts in bits: a power of two, at most 64.
    pub refcount_bits: Option<u64>,
}

/// log2 of the refcount width in bits that version 2 has: 16 bits.
const ORDER_V2: u32 = 4;

/// Changes all options of the image in `file`, or none of them. The disk's contents do not change.
pub fn amend(file: &dyn ImageFile, changes: &Changes) -> Result<()> {
    let mut editor = Editor::open(file)?;
    let old = editor.header().version;
    let new = changes.version.unwrap_or(old);
    if new >= 3 && old < 3 {
        upgrade(&mut editor)?;
    }
    if let Some(bits) = changes.refcount_bits {
        set_refcount_bits(&mut editor, bits, new)?;
    }
    if let Some(lazy) = changes.lazy_refcounts {
        set_lazy(editor.header_mut(), lazy, new)?;
    }
    if new < 3 && old >= 3 {
        downgrade(&mut editor)?;
    }
    editor.commit()
}

fn set_lazy(header: &mut Header, lazy: bool, version: u32) -> Result<()> {
    match (lazy, version >= 3) {
        (true, true) => header.compatible |= COMPATIBLE_LAZY_REFCOUNTS,
        (true, false) => return Err(Error::usage("lazy_refcounts=on needs compat=1.1")),
        (false, _) => header.compatible &= !COMPATIBLE_LAZY_REFCOUNTS,
    }
    Ok(())
}

fn set_refcount_bits(editor: &mut Editor<'_>, bits: u64, version: u32) -> Result<()> {
    if !bits.is_power_of_two() || bits > 64 {
        let problem = "refcount_bits: not a power of two from 1 to 64";
        return Err(Error::usage(problem));
    }
    let order = bits.ilog2();
    if version < 3 && order != ORDER_V2 {
        return Err(Error::usage("refcount_bits other than 16 needs compat=1.1"));
    }
    if order == editor.header().refcount_order {
        return Ok(());
    }
    editor.set_refcount_order(order)
}

/// Upgrades the image to version 3.
fn upgrade(editor: &mut Editor<'_>) -> Result<()> {
    let mut snapshots = read_snapshots(editor.file(), editor.header())?;
    let short = |extra: &[u8]| extra.len() < LEAST_EXTRA_V3;
    if snapshots.iter().any(|snapshot| short(&snapshot.extra)) {
        let size = editor.header().size;
        for snapshot in snapshots.iter_mut().filter(|s| short(&s.extra)) {
            let known = [snapshot.vm_state_size(), size].map(u64::to_be_bytes);
            snapshot.extra = known.concat();
        }
        store_table(editor, &snapshots)?;
    }
    let header = editor.header_mut();
    header.version = 3;
    let names = Extension::FeatureNames(encode_feature_names(&feature_names()));
    header.extensions.push(names);
    Ok(())
}

/// Downgrades the image to version 2. Fails if the image uses features that only version 3 has.
fn downgrade(editor: &mut Editor<'_>) -> Result<()> {
    if let Some(problem) = what_only_v3_says(editor)? {
        return Err(Error::Unsupported(problem));
    }
    let header = editor.header_mut();
    (header.version, header.compatible, header.autoclear) = (2, 0, 0);
    header.unknown_fields.clear();
    let kept = |e: &Extension| !matches!(e, Extension::FeatureNames(_));
    header.extensions.retain(kept);
    Ok(())
}

/// Describes the first feature in the image's header, snapshots or tables that version 2 lacks.
fn what_only_v3_says(editor: &Editor<'_>) -> Result<Option<String>> {
    let header = editor.header();
    let of_header = if header.incompatible != 0 {
        Some("it has features that version 2 lacks (extended_l2, a data file or zstd)")
    } else if header.bitmaps().is_some() {
        Some(
            "it has bitmaps, which version 2 lacks; remove them first ('fathom img bitmap \
             --remove')",
        )
    } else if header.refcount_order != ORDER_V2 {
        Some("version 2 has refcounts of 16 bits; add refcount_bits=16")
    } else {
        None
    };
    if let Some(problem) = of_header {
        return Ok(Some(problem.into()));
    }
    let snapshots = read_snapshots(editor.file(), editor.header())?;
    let other = |size: Option<u64>| size.is_some_and(|size| size != header.size & !511);
    if snapshots
        .iter()
        .any(|s| other(s.disk_size()) || s.vm_state_size() > u32::MAX.into())
    {
        let problem = "a snapshot has another size than the disk, or more than 4 GiB of a machine's state, \
             which version 2 cannot express; delete it first";
        return Ok(Some(problem.into()));
    }
    let mut zeroes = 0;
    let mut count = |cluster| zeroes += u64::from(matches!(cluster, Cluster::Zero { .. }));
    let mut seen = HashSet::new();
    Mapping::active(editor)?.each(editor, &mut seen, &mut count)?;
    for snapshot in &snapshots {
        let mapping = Mapping::read(editor, snapshot.l1_offset, snapshot.l1_entries)?;
        mapping.each(editor, &mut seen, &mut count)?;
    }
    Ok((zeroes > 0).then(|| {
        format!(
            "{zeroes} clusters of its disk and snapshots read as zeroes without being stored, \
             which version 2 cannot express; 'fathom img convert -O qcow2 -o compat=0.10' makes \
             a copy"
        )
    }))
}
