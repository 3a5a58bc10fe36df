//! Opening an image to move its data: it and the files that it names, through the data plane.

use crate::error::{Error, usage};
use crate::open::{OpenOptions, format_of, open};
use fathom_core::{Disk, DiskInfo};
use fathom_formats::Format;
use fathom_formats::served::{ImageDisk, ImageOptions, OwnBitmaps, Storage};
use fathom_stack::{ImageOpener, StoredImage};
use fathom_storage::{ByteDisk, Cache, Location};
use std::fs::File;
use std::sync::Arc;

/// An image in use: locked, its metadata in memory. It ends by [`Chain::close`], or when it is
/// dropped, after all its clients; then nobody hears of errors.
pub struct Chain {
    format: Format,
    disk: Arc<ImageDisk>,
    image: Arc<StoredImage>,
}

impl Chain {
    /// Opens an image with all that it names, locks it, and reads its metadata.
    pub fn open(location: &Location, options: &OpenOptions) -> Result<Chain, Error> {
        Chain::of(open(location, options)?, options)
    }

    /// The image in what is open for reading and, unless the options say otherwise, writing. It stays locked
    /// as long as that is open.
    pub(crate) fn of(image: Arc<StoredImage>, options: &OpenOptions) -> Result<Chain, Error> {
        let format = format_of(&image, options.format)?;
        let named = fathom_storage::OpenOptions {
            force_share: options.force_share,
            ..options.storage()
        };
        let opener = ImageOpener::of(image.location(), &named, &options.allow_dirs)?;
        let opener = opener.with_data_file(image.path(), options.data_file.as_deref());
        let image_options = ImageOptions {
            read_only: options.read_only,
            snapshot: options.snapshot.clone(),
            keys: options.keys.keys().map_err(|e| usage(image.path(), e))?,
            compress: options.compress,
            any_size: true,
            rebasing: options.rebasing,
            own_bitmaps: match options.keep_bitmaps {
                true => OwnBitmaps::Kept,
                false => OwnBitmaps::Missed,
            },
            keep_page_cache: true,
            ..ImageOptions::new(format)
        };
        let disk = Arc::new(opener.open_disk(image.clone(), image_options)?);
        disk.activate()?;
        Ok(Chain {
            format,
            disk,
            image,
        })
    }

    pub fn format(&self) -> Format {
        self.format
    }

    pub fn disk(&self) -> &Arc<ImageDisk> {
        &self.disk
    }

    /// For whoever writes parts of its blocks, if they are large.
    pub(crate) fn bytes(&self) -> Arc<dyn Disk> {
        match self.info().block_size {
            0..=512 => self.disk.clone(),
            _ => Arc::new(ByteDisk::new(self.disk.clone())),
        }
    }

    /// What the image itself is in.
    pub fn image(&self) -> &StoredImage {
        &self.image
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
            .then(|| self.image.file_disk()?.reopen().ok())
            .flatten()
    }

    /// Writes back and flushes what is in memory only.
    pub fn close(self) -> Result<(), Error> {
        Ok(self.disk.deactivate()?)
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        let _ = self.disk.deactivate();
    }
}
