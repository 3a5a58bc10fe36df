//! Opens an image and the files that it names through the data plane, to move its data.

use crate::error::{Error, usage};
use crate::open::{OpenOptions, format_of, open};
use fathom_core::{Disk, DiskInfo};
use fathom_formats::Format;
use fathom_formats::served::{ImageDisk, ImageOptions, OwnBitmaps, Storage};
use fathom_stack::{ImageOpener, StoredImage};
use fathom_storage::{ByteDisk, Cache, Location};
use std::fs::File;
use std::sync::Arc;

/// An image in use: locked, with its metadata in memory. [`Chain::close`] or dropping it ends the
/// use, which must happen after all its clients are gone. Dropping it discards errors.
pub struct Chain {
    format: Format,
    disk: Arc<ImageDisk>,
    image: Arc<StoredImage>,
}

impl Chain {
    /// Opens an image and all files that it names, locks it, and reads its metadata.
    pub fn open(location: &Location, options: &OpenOptions) -> Result<Chain, Error> {
        Chain::of(open(location, options)?, options)
    }

    /// Opens the image in storage that is open for reading and, unless the options say otherwise,
    /// for writing. The image stays locked while the storage is open.
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

    /// Returns the disk for callers whose writes may cover only a part of a block. Blocks of more
    /// than 512 bytes are then read, modified and written back.
    pub(crate) fn bytes(&self) -> Arc<dyn Disk> {
        match self.info().block_size {
            0..=512 => self.disk.clone(),
            _ => Arc::new(ByteDisk::new(self.disk.clone())),
        }
    }

    /// Returns the storage of the top image.
    pub fn image(&self) -> &StoredImage {
        &self.image
    }

    pub fn info(&self) -> DiskInfo {
        self.disk.info()
    }

    /// Size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.info().size
    }

    /// Returns a descriptor of the image's file for early write-back, if its writes use the page
    /// cache.
    pub(crate) fn write_behind(&self, cache: Cache) -> Option<File> {
        let is_cached = cache == Cache::Writeback;
        is_cached
            .then(|| self.image.file_disk()?.reopen().ok())
            .flatten()
    }

    /// Writes back and flushes data and metadata that are only in memory.
    pub fn close(self) -> Result<(), Error> {
        Ok(self.disk.deactivate()?)
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        let _ = self.disk.deactivate();
    }
}
