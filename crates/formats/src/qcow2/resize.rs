//! Resizes qcow2 images: changes the L1 table in one [`Editor::commit`].

use super::growth::Growth;
use super::{L1Entry, MAX_L1_BYTES};
use crate::offline::bitmap::Bitmaps;
use crate::offline::create::Preallocation;
use crate::offline::edit::{Editor, Mapping};
use crate::offline::resize::{Resize, sync, whole_sectors};
use crate::{Error, Result};
use fathom_files::ImageFile;

pub(super) fn resize(file: &dyn ImageFile, to: &Resize) -> Result<()> {
    whole_sectors(to.size)?;
    let mut editor = Editor::open(file)?;
    let old = editor.header().size & !511;
    refuse(&editor, to)?;
    if to.size < old {
        shrink(&mut editor, to)?;
    } else {
        Growth {
            editor: &mut editor,
            to,
            old,
        }
        .grow()?;
    }
    commit(editor, old, to.size)?;
    match to.data_file.filter(|_| to.size < old) {
        None => Ok(()),
        Some(data) => {
            data.set_len(to.size)
                .map_err(Error::io("cannot resize its data file"))?;
            sync(data)
        }
    }
}

/// Commits the change, together with resized bitmaps if the image has any.
fn commit(mut editor: Editor, old: u64, new: u64) -> Result<()> {
    if editor.header().bitmaps().is_none() {
        return editor.commit();
    }
    let mut bitmaps = Bitmaps::of(editor)?;
    bitmaps.resize(old, new)?;
    bitmaps.commit()
}

fn refuse(editor: &Editor, to: &Resize) -> Result<()> {
    let header = editor.header();
    let l1_bytes = editor.geometry().l1_entries_for(to.size) * L1Entry::SIZE;
    if l1_bytes > MAX_L1_BYTES || to.size > i64::MAX as u64 {
        return Err(Error::usage(
            "the size exceeds the limit of its L1 table; convert it with a larger cluster_size",
        ));
    }
    if header.version < 3 && header.snapshots > 0 {
        return Err(Error::unsupported(
            "an image of version 2 that has snapshots cannot be resized",
        ));
    }
    let grows = to.size > header.size;
    if header.is_encrypted() && grows {
        refuse_encrypted(editor, to)?;
    }
    if editor.geometry().data_file && to.data_file.is_none() {
        return Err(Error::invalid("its external data file is not named"));
    }
    Ok(())
}

/// Refuses changes of an encrypted image that need the key.
fn refuse_encrypted(editor: &Editor, to: &Resize) -> Result<()> {
    let old = editor.header().size & !511;
    let is_whole = old.is_multiple_of(editor.geometry().cluster_size());
    if to.preallocation != Preallocation::Off {
        return Err(Error::usage(
            "preallocation: not possible for encrypted images, because preallocated data would \
             read as random bytes",
        ));
    }
    match is_whole && to.below.is_none_or(|below| below.size() <= old) {
        true => Ok(()),
        false => Err(Error::unsupported(
            "encrypted, so old data beyond the disk's end in its last cluster or its backing \
             image would become visible; resize the disk while it is served ('fathom disk \
             resize')",
        )),
    }
}

fn shrink(editor: &mut Editor, to: &Resize) -> Result<()> {
    if to.preallocation != Preallocation::Off {
        let problem = "preallocation applies only to a disk that grows";
        return Err(Error::usage(problem));
    }
    let clusters = editor.geometry().clusters_of(to.size);
    let mut mapping = Mapping::active(editor)?;
    mapping.cut(editor, clusters)?;
    mapping.store_active(editor)?;
    editor.header_mut().size = to.size;
    Ok(())
}
