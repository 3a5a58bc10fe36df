//! The backing file's name in qcow2 images, and the removal of all data that hides it.

use super::{Extension, Header};
use crate::Result;
use crate::offline::edit::{Editor, Mapping, header_switch};
use crate::offline::new_backing::NewBacking;
use fathom_files::ImageFile;

pub(super) fn set(file: &dyn ImageFile, backing: Option<NewBacking<'_>>) -> Result<()> {
    let mut editor = Editor::open(file)?;
    name_backing(editor.header_mut(), backing);
    editor.commit()
}

fn name_backing(header: &mut Header, backing: Option<NewBacking<'_>>) {
    header.backing_file = backing.map(|b| b.name.to_vec());
    let other = |e: &Extension| !matches!(e, Extension::BackingFormat(_));
    header.extensions.retain(other);
    if let Some(backing) = backing {
        let name = backing.format.name().as_bytes().to_vec();
        header.extensions.insert(0, Extension::BackingFormat(name));
    }
}

/// Sets or removes the name in an image that this process is using.
pub(super) fn set_in_use(file: &dyn ImageFile, backing: Option<NewBacking<'_>>) -> Result<()> {
    header_switch(file, |header| name_backing(header, backing))?.write(file)
}

/// Checks whether [`set_in_use`] could store `backing`.
pub(super) fn check_in_use(file: &dyn ImageFile, backing: Option<NewBacking<'_>>) -> Result<()> {
    header_switch(file, |header| name_backing(header, backing)).map(drop)
}

/// Removes all data from the image. After a power cut, the image is unchanged or empty.
pub(super) fn make_empty(file: &dyn ImageFile) -> Result<()> {
    let mut editor = Editor::open(file)?;
    let mut mapping = Mapping::active(&editor)?;
    let entries = mapping.l1_entries();
    mapping.cut(&mut editor, 0)?;
    mapping.grow(entries);
    mapping.store_active(&mut editor)?;
    editor.commit()
}
