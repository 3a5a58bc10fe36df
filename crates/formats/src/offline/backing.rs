//! Changes that `fathom img rebase` and `fathom img commit` make to an image's structures: the name
//! of the backing file, and removal of all data.

use super::Image;
use super::edit::{Editor, Mapping, header_switch};
use crate::qcow2::{self, Extension};
use crate::{Error, Format, Result, qed};
use fathom_files::ImageFile;

/// The name and format of a new backing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewBacking<'a> {
    pub name: &'a [u8],
    pub format: Format,
}

/// Sets or removes the backing file of the image in `file`. The last write replaces one sector of
/// the header, so after a power cut the image has the old name or the new one.
pub fn set_backing(
    file: &dyn ImageFile,
    format: Format,
    backing: Option<NewBacking<'_>>,
) -> Result<()> {
    check_name(backing)?;
    match format {
        Format::Raw | Format::Luks | Format::Foreign(_) => Err(raw_has_none()),
        Format::Qcow2 => set_qcow2(file, backing),
        Format::Qed => set_qed(file, backing),
    }
}

/// Sets or removes the backing file of an image that this process is using. Changes nothing else.
pub(crate) fn set_backing_in_use(
    file: &dyn ImageFile,
    format: Format,
    backing: Option<NewBacking<'_>>,
) -> Result<()> {
    match format {
        Format::Qcow2 => {
            check_name(backing)?;
            let switch = header_switch(file, |header| name_backing(header, backing))?;
            switch.write(file)
        }
        _ => set_backing(file, format, backing),
    }
}

/// Checks whether [`set_backing_in_use`] could store `backing`.
pub(crate) fn check_backing_in_use(
    file: &dyn ImageFile,
    format: Format,
    backing: Option<NewBacking<'_>>,
) -> Result<()> {
    check_name(backing)?;
    match Image::read(file, format)? {
        Image::Raw { .. } | Image::Luks(..) | Image::Foreign(_) => Err(raw_has_none()),
        Image::Qcow2(_) => header_switch(file, |header| name_backing(header, backing)).map(drop),
        Image::Qed(header, _) => match backing {
            Some(backing) => {
                free_place(&header, header.backing_range(), backing.name.len()).map(drop)
            }
            None => Ok(()),
        },
    }
}

fn check_name(backing: Option<NewBacking<'_>>) -> Result<()> {
    match backing.is_some_and(|b| b.name.len() > qed::MAX_BACKING_NAME as usize) {
        true => Err(Error::usage("the backing file's name exceeds 1023 bytes")),
        false => Ok(()),
    }
}

fn raw_has_none() -> Error {
    Error::usage("only qcow2 and qed images have backing files")
}

fn set_qcow2(file: &dyn ImageFile, backing: Option<NewBacking<'_>>) -> Result<()> {
    let mut editor = Editor::open(file)?;
    name_backing(editor.header_mut(), backing);
    editor.commit()
}

fn name_backing(header: &mut qcow2::Header, backing: Option<NewBacking<'_>>) {
    header.backing_file = backing.map(|b| b.name.to_vec());
    let other = |e: &Extension| !matches!(e, Extension::BackingFormat(_));
    header.extensions.retain(other);
    if let Some(backing) = backing {
        let name = backing.format.name().as_bytes().to_vec();
        header.extensions.insert(0, Extension::BackingFormat(name));
    }
}

fn set_qed(file: &dyn ImageFile, backing: Option<NewBacking<'_>>) -> Result<()> {
    let Image::Qed(mut header, _) = Image::read(file, Format::Qed)? else {
        unreachable!("it was asked for QED");
    };
    let failed = |source| Error::Io {
        what: "cannot write its header",
        source,
    };
    let old = header.backing_range();
    header.features &= !(qed::FEATURE_BACKING_FILE | qed::FEATURE_BACKING_FORMAT_NO_PROBE);
    (header.backing_offset, header.backing_len) = (0, 0);
    if let Some(backing) = backing {
        let at = free_place(&header, old, backing.name.len())?;
        file.write_at(backing.name, at).map_err(failed)?;
        file.sync().map_err(failed)?;
        header.features |= qed::FEATURE_BACKING_FILE;
        if backing.format == Format::Raw {
            header.features |= qed::FEATURE_BACKING_FORMAT_NO_PROBE;
        }
        header.backing_offset = at as u32;
        header.backing_len = backing.name.len() as u32;
    }
    file.write_at(&header.encode(), 0).map_err(failed)?;
    file.sync().map_err(failed)
}

/// Finds a place for a name of `len` bytes in the header's clusters, which have at least 4 KiB. The
/// place does not overlap the old name.
fn free_place(header: &qed::Header, old: Option<(u64, usize)>, len: usize) -> Result<u64> {
    let is_free = |at: &u64| {
        let end = at + len as u64;
        let apart = old.is_none_or(|(start, len)| end <= start || start + len as u64 <= *at);
        apart && end <= header.header_bytes()
    };
    let places = [512, 512 + 1024, 512 + 2048];
    let place = places.into_iter().find(is_free);
    place.ok_or_else(|| Error::unsupported("its header has no space for another name"))
}

/// Removes all data from the image in `file`, which then reads as its backing file. After a power
/// cut, the image is unchanged or empty. Returns false, without any change, if the format does not
/// support this.
pub fn make_empty(file: &dyn ImageFile, format: Format) -> Result<bool> {
    if format != Format::Qcow2 {
        return Ok(false);
    }
    let mut editor = Editor::open(file)?;
    let mut mapping = Mapping::active(&editor)?;
    let entries = mapping.l1_entries();
    mapping.cut(&mut editor, 0)?;
    mapping.grow(entries);
    mapping.store_active(&mut editor)?;
    editor.commit()?;
    Ok(true)
}
