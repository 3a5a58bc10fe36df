//! An overlay that takes a disk's changes and is discarded with the server.

use crate::bare::Bare;
use crate::confined::AllowedDirs;
use crate::description::Description;
use crate::image_files::{ImageOpener, StoredImage};
use fathom_core::{Disk, DiskError, DiskLayer, Part, PartState, Resize, SavedState};
use fathom_files::gate;
use fathom_formats::Format;
use fathom_formats::offline::Image;
use fathom_formats::offline::create::{Backing, Options as CreateOptions, create};
use fathom_formats::served::{ImageDisk, ImageOptions, Keys};
use fathom_storage::FileOptions;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// The overlay's name among a disk's parts.
const OVERLAY: &str = "overlay";

/// Opens the image at `path` for reading only, with a qcow2 overlay on top.
///
/// The overlay is an unnamed file in `dir`: a new one, or that of the predecessor.
pub(crate) fn open(path: &Path, dir: &Path, description: &Description) -> Result<Bare, DiskError> {
    let unusable = |problem: String| DiskError::Unusable {
        path: path.to_owned(),
        problem,
    };
    if description.offset.or(description.size).is_some() {
        let problem =
            "--filter cow: excludes --offset and --size, because it covers the whole image";
        return Err(unusable(problem.into()));
    }
    let backing = gate::real_path(path).map_err(|source| DiskError::Io {
        path: path.to_owned(),
        what: "cannot find the image",
        source,
    })?;
    let Some(name) = backing.to_str() else {
        let problem = "--filter cow: the image's path is not UTF-8";
        return Err(unusable(problem.into()));
    };
    let keys = description.keys.keys().map_err(unusable)?;
    let file = match description.handover_state.take(OVERLAY) {
        Some(mut early_state) => early_state.take_file().map_err(unusable)?.into(),
        None => make(&backing, name, dir, description, &keys)?,
    };
    let overlay = Overlay(file.try_clone().map_err(|source| DiskError::Io {
        path: dir.to_owned(),
        what: "cannot duplicate the overlay's file descriptor",
        source,
    })?);
    let file_options = FileOptions::from(&description.open_options());
    let options = FileOptions {
        read_only: false,
        ..file_options.clone()
    };
    let stored = StoredImage::from_file(&dir.join("overlay.qcow2"), file, options)?;
    let stored = Arc::new(stored);
    let storage = stored.file_disk().cloned();
    let dirs = AllowedDirs::new(&backing, &description.allow_dirs)?;
    let image_options = ImageOptions {
        format: Format::Qcow2,
        read_only: description.read_only,
        discard: description.discard,
        metadata_cache: description.metadata_cache(),
        offset: 0,
        size: None,
        keys,
        ..ImageOptions::new(Format::Qcow2)
    };
    let opener = ImageOpener::new(dirs, file_options)
        .with_data_file(&backing, description.data_file.as_deref());
    let disk = Arc::new(opener.open_disk(stored, image_options)?);
    Ok(Bare {
        image: Some(disk.clone()),
        disk: Arc::new(Passing(disk)),
        file: storage,
        data: None,
        whole: None,
        part: Some((OVERLAY, Arc::new(overlay))),
        halt: None,
    })
}

/// Creates an overlay for the image at `backing`, encrypted if the disk has keys.
fn make(
    backing: &Path,
    name: &str,
    dir: &Path,
    description: &Description,
    keys: &Keys,
) -> Result<File, DiskError> {
    let file = gate::unnamed(dir).map_err(|source| DiskError::Io {
        path: dir.to_owned(),
        what: "--filter cow: cannot create an overlay there",
        source,
    })?;
    let mut create_options = CreateOptions::new(Format::Qcow2);
    let format = description.format.unwrap_or(Format::Raw);
    let size = gate::open_image(backing, false)
        .map_err(|error| error.to_string())
        .and_then(|file| Image::read(&file, format).map_err(|error| error.to_string()))
        .map(|image| image.size());
    let backing_name = Backing {
        name: name.to_owned(),
        format: Some(format),
    };
    let made = size.and_then(|size| {
        create_options.backing = Some(backing_name);
        create_options.encryption.is_wanted = !keys.is_empty();
        let made = create(&file, None, &create_options, size, keys.first());
        made.map_err(|error| error.to_string())
    });
    made.map_err(|problem| DiskError::Unusable {
        path: backing.to_owned(),
        problem,
    })?;
    Ok(file)
}

/// The overlay's file, which a successor takes over; complete when the disk is not in use.
struct Overlay(File);

impl Part for Overlay {
    fn early_state(&self) -> io::Result<Option<PartState>> {
        Ok(Some(PartState {
            files: vec![self.0.try_clone()?.into()],
            is_needed: true,
            ..PartState::default()
        }))
    }
}

/// An image that does not survive the process.
///
/// A successor of a killed process has nothing to restore, so the image needs no saved state.
struct Passing(Arc<ImageDisk>);

impl DiskLayer for Passing {
    fn below(&self) -> &dyn Disk {
        &*self.0
    }

    fn saved_state_len(&self) -> u64 {
        0
    }

    fn set_saved_state(&self, _: Option<SavedState>) {}

    fn resize(&self, _: &Resize) -> Result<u64, DiskError> {
        let problem = "a disk with an overlay (--filter cow) cannot be resized; serve it without the \
             filter first";
        Err(DiskError::Refused(problem.into()))
    }
}
