//! Reads an image of one or several files.

use super::descriptor::{Descriptor, Form, Line};
use super::grains::SECTOR;
use super::{cowd, sesparse, sparse};
use crate::blocks::Budget;
use crate::describe::{Description, Details, VmdkExtent};
use crate::error::{Error, Result};
use crate::kind::Kind;
use crate::part::{Disk, Layout, Part};
use crate::source::Source;

/// Reads an image that contains its descriptor.
pub fn read_single(main: &Source) -> Result<Disk> {
    let descriptor = sparse::inner_descriptor(main)?;
    if descriptor.extents.len() > 1 {
        return Err(Error::unsupported(
            "this is a part of a VMDK image, whose descriptor names more: convert it with the \
             program that made it",
        ));
    }
    let extent = sparse::read(main, &mut Budget::new())?;
    let is_compressed = extent.blocks.rule.compressed.is_some();
    let layout = Layout::Blocks(extent.blocks);
    let described = VmdkExtent {
        name: None,
        format: "",
        ..describe(&layout, extent.sectors)
    };
    // Like QEMU, this relies on the header and ignores the type in the descriptor.
    let create_type = match is_compressed {
        true => "streamOptimized",
        false => "monolithicSparse",
    };
    let description = description(descriptor.cid, create_type, vec![described]);
    Ok(Disk::of(layout, description))
}

/// Reads an image whose descriptor is a file of its own. `files` are the files that it names.
pub fn read_described(descriptor: &Descriptor, files: &[Source]) -> Result<Disk> {
    let mut budget = Budget::new();
    let (mut parts, mut extents) = (Vec::new(), Vec::new());
    let mut start = 0;
    for line in &descriptor.extents {
        let layout = match line.form {
            Form::Zero => Layout::Zero,
            _ => read_extent(line, &files[line.name], &mut budget)
                .map_err(|error| in_file(error, &descriptor.names[line.name]))?,
        };
        let len = line.sectors * SECTOR;
        let has_file = line.form != Form::Zero;
        extents.push(VmdkExtent {
            name: has_file.then(|| descriptor.names[line.name].clone()),
            format: line.form.name(),
            ..describe(&layout, line.sectors)
        });
        parts.push(Part {
            start,
            len,
            // File 0 is the descriptor.
            file: match has_file {
                true => line.name + 1,
                false => 0,
            },
            layout,
        });
        start += len;
    }
    if parts.is_empty() {
        return Err(Error::damaged("its descriptor has no extents"));
    }
    let create_type = descriptor.check()?;
    Ok(Disk {
        parts,
        description: description(descriptor.cid, create_type, extents),
    })
}

fn read_extent(line: &Line, source: &Source, budget: &mut Budget) -> Result<Layout> {
    let (sectors, blocks) = match line.form {
        Form::Zero => return Ok(Layout::Zero),
        Form::Flat | Form::Vmfs => {
            let (at, len) = (line.offset * SECTOR, line.sectors * SECTOR);
            if !source.holds(at, len) {
                return Err(Error::damaged(format!(
                    "an extent of {len} bytes is at {at}, but its file ends at {}",
                    source.len
                )));
            }
            return Ok(Layout::Flat { at });
        }
        // Descriptors use either word for either format.
        Form::Sparse | Form::VmfsSparse => {
            if source.up_to(0, cowd::MAGIC.len())? == cowd::MAGIC {
                cowd::read(source, budget)?
            } else {
                let extent = sparse::read(source, budget)?;
                (extent.sectors, extent.blocks)
            }
        }
        Form::SeSparse => sesparse::read(source, budget)?,
    };
    if sectors != line.sectors {
        return Err(Error::damaged(format!(
            "an extent has {sectors} sectors, but the descriptor says {}",
            line.sectors
        )));
    }
    Ok(Layout::Blocks(blocks))
}

/// Adds the name of the damaged file to an error.
fn in_file(error: Error, name: &str) -> Error {
    match error {
        Error::Damaged(what) => Error::Damaged(format!("in {name:?}, {what}")),
        Error::Io(error) => Error::Io(std::io::Error::new(
            error.kind(),
            format!("{name:?}: {error}"),
        )),
        other => other,
    }
}

fn describe(layout: &Layout, sectors: u64) -> VmdkExtent {
    let rule = match layout {
        Layout::Blocks(blocks) => Some(blocks.rule),
        Layout::Zero | Layout::Flat { .. } => None,
    };
    VmdkExtent {
        name: None,
        format: "",
        virtual_size: sectors * SECTOR,
        cluster_size: rule.map(|rule| rule.block),
        compressed: rule.is_some_and(|rule| rule.compressed.is_some()),
    }
}

fn description(cid: u32, create_type: &'static str, extents: Vec<VmdkExtent>) -> Description {
    let block_size = extents.first().and_then(|extent| extent.cluster_size);
    let is_same = |extent: &VmdkExtent| extent.cluster_size == block_size;
    Description {
        kind: Kind::Vmdk,
        size: extents.iter().map(|extent| extent.virtual_size).sum(),
        block_size: block_size.filter(|_| extents.iter().all(is_same)),
        details: Details::Vmdk {
            cid,
            parent_cid: u32::MAX,
            create_type,
            extents,
        },
    }
}
