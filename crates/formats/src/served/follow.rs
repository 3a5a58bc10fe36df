//! Follows changes that other processes made to a chain after it was opened.
//!
//! Before a disk is activated, another server may have merged backing images into the top image, or
//! images of the middle into the one below them. An example is the source of a live migration,
//! whose job ended after the target had been started. The disk is then the same, but consists of
//! fewer of the files that are open here, and some of them may be longer. A disk that uses any
//! other file has to be opened anew.

use super::open::{Chain, Link, is_padded};
use super::problem::told;
use super::storage::Storage;
use crate::Image;
use crate::{Error, Format, Result, resolve};
use fathom_core::DiskError;

impl Chain {
    /// Returns the images of the disk by their present headers.
    ///
    /// Images that no header refers to any more are left out. The first file is in use. If a header
    /// names a file that is not open here, returns the images as before; the activation then fails.
    pub(super) fn follow(&self) -> std::result::Result<Vec<Link>, DiskError> {
        let before = self.links();
        let mut now: Vec<Link> = Vec::new();
        let mut next = Some(0);
        while let Some(n) = next {
            let Some((link, below)) = self.follow_link(&before, n)? else {
                return Ok(before.to_vec());
            };
            now.push(link);
            next = below;
        }
        Ok(now)
    }

    /// Sets the images of the disk, whose files are in use, and updates their sizes.
    pub(super) fn take(&self, mut links: Vec<Link>) -> std::result::Result<(), DiskError> {
        for link in links.iter_mut().skip(1) {
            let file = &self.storages[usize::from(link.storage)];
            self.take_in(link, &**file).map_err(told(file.path()))?;
        }
        let (from, to) = (self.links().len(), links.len());
        if to < from {
            let path = self.path().display();
            tracing::info!("{path}: its chain now has {to} instead of {from} images");
        }
        self.set_links(links);
        Ok(())
    }

    /// Reads an image's header again and returns the image with the index of its backing image.
    ///
    /// `None`: its data or backing file is not the file that is open here.
    fn follow_link(
        &self,
        before: &[Link],
        n: usize,
    ) -> std::result::Result<Option<(Link, Option<usize>)>, DiskError> {
        let mut link = before[n].clone();
        let as_before = (n + 1 < before.len()).then_some(n + 1);
        if !link.image.has_tables() {
            return Ok(Some((link, as_before)));
        }
        let file = &self.storages[usize::from(link.storage)];
        let image = Image::read(file.bytes(), link.image.format()).map_err(told(file.path()))?;
        if has_same_below(&link.image, &image) {
            return Ok(Some((link, as_before)));
        }
        if !self.has_same_data(&link, &image) {
            return Ok(None);
        }
        let below = self.below(before, n, &image).map_err(told(file.path()))?;
        link.image = image;
        Ok(below.map(|below| (link, below)))
    }

    /// Returns the index of the present backing image. The inner `None`: the image has no backing
    /// image.
    ///
    /// The outer `None`: the header names a file that is not one of these.
    fn below(&self, before: &[Link], n: usize, now: &Image) -> Result<Option<Option<usize>>> {
        let Some(name) = now.backing_file() else {
            return Ok(Some(None));
        };
        let storage = |link: &Link| &self.storages[usize::from(link.storage)];
        let Ok(named) = resolve(storage(&before[n]).path(), name) else {
            return Ok(None);
        };
        let format = now.backing_format().map(|name| Format::from_name(&name));
        let format = format.transpose()?;
        let is_it = |other: &Link| {
            let fits = match (format, now) {
                (Some(format), _) => format == other.image.format(),
                // (The header of QED records raw or nothing.)
                (None, Image::Qed(_)) => other.image.has_tables(),
                (None, _) => false,
            };
            fits && storage(other).is_at(&named)
        };
        let found = (n + 1..before.len()).find(|m| is_it(&before[*m]));
        Ok(found.map(Some))
    }

    /// Returns whether the present header names the data file that is open here, under any name.
    pub(super) fn has_same_data(&self, link: &Link, now: &Image) -> bool {
        let is_there = |name: &[u8]| {
            // (The data file's storage follows that of the image itself.)
            let image = usize::from(link.storage);
            let (image, data) = (&self.storages[image], &self.storages[image + 1]);
            resolve(image.path(), name).is_ok_and(|named| data.is_at(&named))
        };
        let name = now.data_file();
        link.image.has_data_file() == now.has_data_file()
            && (link.image.data_file() == name || name.is_some_and(is_there))
    }

    /// Updates the size of a backing image, which other processes may have made longer.
    fn take_in(&self, link: &mut Link, file: &dyn Storage) -> Result<()> {
        let len = || {
            let len = file.bytes().len();
            len.map_err(Error::io("cannot read its size"))
        };
        let size = match &mut link.image {
            Image::Luks(image) if image.header.payload().size.is_some() => {
                // (The header records the payload's size.)
                return match len()? < image.size {
                    true => Err(Error::invalid("shorter than its header says")),
                    false => Ok(()),
                };
            }
            Image::Raw(image) => &mut image.size,
            Image::Luks(image) => &mut image.size,
            Image::Qcow2(_) | Image::Qed(_) => {
                let image = Image::read(file.bytes(), link.image.format())?;
                // (Otherwise the activation rejects the image.)
                if has_same_below(&link.image, &image) && self.has_same_data(link, &image) {
                    link.image = image;
                }
                return Ok(());
            }
            // (The activation checks whether the size has changed.)
            Image::Foreign(_) => return Ok(()),
        };
        let len = len()?;
        if !(link.writable && is_padded(link.raw.1, len)) {
            *size = len;
            link.raw.1 = link.image.size();
        }
        Ok(())
    }
}

/// Returns whether both headers name the same backing file, in the same format.
pub(super) fn has_same_below(one: &Image, other: &Image) -> bool {
    one.backing_file() == other.backing_file() && one.backing_format() == other.backing_format()
}
