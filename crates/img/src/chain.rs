//! Opening an image to move its data: it and the files that it names, through the data plane.

use crate::error::{Error, of};
use fathom_core::{Disk, DiskInfo};
use fathom_formats::Format;
use fathom_formats::offline::SnapshotName;
use fathom_formats::served::{ImageDisk, ImageOptions, Storage};
use fathom_stack::{AllowedDirs, ImageOpener, StoredImage};
use fathom_storage::{Cache, EngineKind, FileOptions};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How to open an image.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// None: what it looks like.
    pub format: Option<Format>,
    pub read_only: bool,
    /// What is only read, of it and of the files that it names, may be written to by other processes.
    pub force_share: bool,
    pub cache: Cache,
    pub engine: EngineKind,
    /// Where the files may be that the image names; none: the image's own directory.
    pub allow_dirs: Vec<PathBuf>,
    /// The external data file, whatever the image calls it; none: what it calls it, to be read only.
    pub data_file: Option<PathBuf>,
    /// The state that an internal snapshot has kept.
    pub snapshot: Option<SnapshotName>,
    /// See [`ImageOptions::compress`].
    pub compress: bool,
    /// See [`ImageOptions::rebasing`].
    pub rebasing: bool,
    /// See [`ImageOptions::keep_bitmaps`].
    pub keep_bitmaps: bool,
}

impl OpenOptions {
    /// For an image that is read, through the page cache.
    pub fn reading(format: Option<Format>) -> OpenOptions {
        OpenOptions {
            format,
            read_only: true,
            force_share: false,
            cache: Cache::Writeback,
            engine: EngineKind::IoUring,
            allow_dirs: Vec::new(),
            data_file: None,
            snapshot: None,
            compress: false,
            rebasing: false,
            keep_bitmaps: false,
        }
    }

    /// For an image that is written to.
    pub fn writing(format: Option<Format>) -> OpenOptions {
        OpenOptions {
            read_only: false,
            ..OpenOptions::reading(format)
        }
    }

    fn files(&self) -> FileOptions {
        FileOptions {
            cache: self.cache,
            read_only: self.read_only,
            force_share: self.force_share && self.read_only,
            engine: self.engine,
            ..FileOptions::default()
        }
    }
}

/// An image in use: locked, its metadata in memory. It ends by [`Chain::close`], or when it is
/// dropped, after all its clients; then nobody hears of errors.
pub struct Chain {
    format: Format,
    disk: Arc<ImageDisk>,
    file: Arc<StoredImage>,
}

impl Chain {
    /// Opens an image with all that it names, locks it, and reads its metadata.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Chain, Error> {
        let files = options.files();
        let file = StoredImage::in_file(path, files.clone())?;
        Chain::activate(path, file, options, files)
    }

    /// The image in a file that is open for reading and writing; `path` is its name.
    pub(crate) fn in_file(path: &Path, file: File, options: &OpenOptions) -> Result<Chain, Error> {
        let files = options.files();
        let file = StoredImage::from_file(path, file, files.clone())?;
        Chain::activate(path, file, options, files)
    }

    fn activate(
        path: &Path,
        file: StoredImage,
        options: &OpenOptions,
        files: FileOptions,
    ) -> Result<Chain, Error> {
        let file = Arc::new(file);
        let format = match options.format {
            Some(format) => format,
            None => Format::probe(file.bytes()).map_err(of(path))?,
        };
        let dirs = AllowedDirs::new(path, &options.allow_dirs)?;
        let named = FileOptions {
            force_share: options.force_share,
            ..files
        };
        let opener = ImageOpener::new(dirs, named);
        let opener = opener.with_data_file(path, options.data_file.as_deref());
        let image = ImageOptions {
            read_only: options.read_only,
            snapshot: options.snapshot.clone(),
            compress: options.compress,
            any_size: true,
            rebasing: options.rebasing,
            keep_bitmaps: options.keep_bitmaps,
            keep_page_cache: true,
            ..ImageOptions::new(format)
        };
        let disk = Arc::new(opener.open_disk(file.clone(), image)?);
        disk.activate()?;
        Ok(Chain { format, disk, file })
    }

    pub fn format(&self) -> Format {
        self.format
    }

    pub fn disk(&self) -> &Arc<ImageDisk> {
        &self.disk
    }

    /// The image's own file.
    pub fn file(&self) -> &StoredImage {
        &self.file
    }

    pub fn info(&self) -> DiskInfo {
        self.disk.info()
    }

    /// Bytes of the disk.
    pub fn size(&self) -> u64 {
        self.info().size
    }

    /// The file, for who has the kernel write to it meanwhile: only if it goes by the page cache.
    pub(crate) fn write_behind(&self, cache: Cache) -> Option<File> {
        let is_cached = cache == Cache::Writeback;
        is_cached
            .then(|| self.file.file_disk()?.reopen().ok())
            .flatten()
    }

    /// Writes back and flushes what is in memory only, and unlocks.
    pub fn close(self) -> Result<(), Error> {
        Ok(self.disk.deactivate()?)
    }
}

impl Drop for Chain {
    /// Locks would else stay until the kernel has done away with the workers' rings.
    fn drop(&mut self) {
        let _ = self.disk.deactivate();
    }
}
