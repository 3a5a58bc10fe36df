//! An overlay that takes a disk's changes and goes with the server.

use crate::confined::AllowedDirs;
use crate::description::Description;
use crate::image_files::{ImageOpener, StoredImage};
use fathom_core::{Channel, Cx, Disk, DiskError, DiskInfo, Resize};
use fathom_formats::Format;
use fathom_formats::offline::create::{Backing, Options as CreateOptions, backing_size, create};
use fathom_formats::served::{ImageDisk, ImageOptions};
use fathom_storage::{FileDisk, FileOptions};
use std::fs::{DirBuilder, File, remove_dir, remove_file};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Put a new qcow2 image over the one at `path`, which is opened for reading
/// only. Its file is in `dir`, without a name once this returns.
pub fn open(
    path: &Path,
    dir: &Path,
    description: &Description,
) -> Result<(Arc<dyn Disk>, Arc<FileDisk>), DiskError> {
    let unusable = |problem: String| DiskError::Unusable {
        path: path.to_owned(),
        problem,
    };
    if description.offset.or(description.size).is_some() {
        let problem = "--filter cow is for all of an image, not with --offset and --size";
        return Err(unusable(problem.into()));
    }
    let backing = path.canonicalize().map_err(|source| DiskError::Io {
        path: path.to_owned(),
        what: "cannot be found",
        source,
    })?;
    let Some(name) = backing.to_str() else {
        let problem = "--filter cow: the image's path is not valid UTF-8";
        return Err(unusable(problem.into()));
    };
    let file = Named::new(dir)?;
    let mut create_options = CreateOptions::new(Format::Qcow2);
    let backing_name = Backing {
        name: name.to_owned(),
        format: Some(description.format.unwrap_or(Format::Raw)),
    };
    let overlay = file.overlay();
    let made = File::create_new(&overlay)
        .map_err(|error| error.to_string())
        .and_then(|file| {
            let size = backing_size(&overlay, &backing_name).map_err(|e| e.to_string())?;
            create_options.backing = Some(backing_name);
            create(&file, None, &create_options, size).map_err(|e| e.to_string())
        });
    made.map_err(unusable)?;
    let file_options = FileOptions::from(&description.open_options());
    let stored = Arc::new(StoredImage::open(
        &file.overlay(),
        FileOptions {
            read_only: false,
            ..file_options.clone()
        },
    )?);
    let storage = stored.file_disk().clone();
    let dirs = AllowedDirs::new(&backing, &description.allow_dirs)?;
    let image_options = ImageOptions {
        format: Format::Qcow2,
        read_only: description.read_only,
        discard: description.discard,
        metadata_cache: description.metadata_cache(),
        offset: 0,
        size: None,
        ..ImageOptions::new(Format::Qcow2)
    };
    let opener = ImageOpener::new(dirs, file_options)
        .with_data_file(&backing, description.data_file.as_deref());
    let disk = opener.open_disk(stored, image_options)?;
    Ok((Arc::new(Passing(disk)), storage))
}

/// The overlay's file while it has a name: in a directory of its own, so that
/// nobody else's file is in the way.
struct Named(PathBuf);

impl Named {
    fn new(dir: &Path) -> Result<Named, DiskError> {
        let failed = |source| DiskError::Io {
            path: dir.to_owned(),
            what: "--filter cow: cannot keep an overlay there",
            source,
        };
        for n in 0.. {
            let path = dir.join(format!("fathom-{}-{n}", std::process::id()));
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return path.canonicalize().map(Named).map_err(failed),
                // Of a process of that number, which was killed.
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && n < 1000 => {}
                Err(error) => return Err(failed(error)),
            }
        }
        unreachable!("it gives up before")
    }

    fn overlay(&self) -> PathBuf {
        self.0.join("overlay.qcow2")
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        // It may not have been made.
        let _ = remove_file(self.overlay());
        if let Err(error) = remove_dir(&self.0) {
            tracing::warn!("{}: cannot be removed: {error}", self.0.display());
        }
    }
}

/// An image of which nothing is left when the process is killed, so that its
/// successor has nothing to restore: it wants no keepsake.
struct Passing(ImageDisk);

impl Disk for Passing {
    fn info(&self) -> DiskInfo {
        self.0.info()
    }

    fn activate(&self) -> Result<(), DiskError> {
        self.0.activate()
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        self.0.deactivate()
    }

    fn resize(&self, _: &Resize) -> Result<u64, DiskError> {
        let problem =
            "a disk with an overlay (--filter cow) cannot be resized: serve it without first";
        Err(DiskError::Refused(problem.into()))
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        self.0.channel(cx)
    }
}
