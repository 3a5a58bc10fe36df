//! A chain that others have changed since it was opened.
//!
//! Before a disk is taken into use, another server may have brought what is below its image into that, or images of
//! the middle into the one below them: the source of a live migration, whose job came to its end after the target had
//! been started. It is the same disk then, on fewer of the files that are open here, and some of them may be longer. On
//! any other file it has to be opened anew.

use super::open::{Chain, Link, is_padded};
use super::problem::told;
use super::storage::Storage;
use crate::offline::Image;
use crate::{Error, Format, Result, resolve};
use fathom_core::DiskError;

impl Chain {
    /// The images that the disk is made of, by their headers as they are now: without those that the ones above do not
    /// name any more. The first file is in use. With something that is not known here they are those that it was made of:
    /// whoever takes them into use says so.
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

    /// It is made of these, whose files are in use.
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

    /// An image, and which one it has below now. None: its data is in another file, or it has another one below it.
    fn follow_link(
        &self,
        before: &[Link],
        n: usize,
    ) -> std::result::Result<Option<(Link, Option<usize>)>, DiskError> {
        let mut link = before[n].clone();
        let as_before = (n + 1 < before.len()).then_some(n + 1);
        if !link.image.format().has_tables() {
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

    /// Which image of the chain it has below now, or that it has none; None: another one.
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
                // (Its header says raw or nothing.)
                (None, Image::Qed(..)) => other.image.format().has_tables(),
                (None, _) => false,
            };
            fits && storage(other).is_at(&named)
        };
        let found = (n + 1..before.len()).find(|m| is_it(&before[*m]));
        Ok(found.map(Some))
    }

    /// Whether its header as it is now names the file that its data is in, if that is another one, by whatever name.
    pub(super) fn has_same_data(&self, link: &Link, now: &Image) -> bool {
        let is_there = |name: &[u8]| {
            // (It comes after the image's own.)
            let image = usize::from(link.storage);
            let (image, data) = (&self.storages[image], &self.storages[image + 1]);
            resolve(image.path(), name).is_ok_and(|named| data.is_at(&named))
        };
        let name = now.data_file();
        link.image.has_data_file() == now.has_data_file()
            && (link.image.data_file() == name || name.is_some_and(is_there))
    }

    /// What others have written to an image below may have made it longer.
    fn take_in(&self, link: &mut Link, file: &dyn Storage) -> Result<()> {
        let len = || {
            let len = file.bytes().len();
            len.map_err(Error::io("cannot read its size"))
        };
        match &mut link.image {
            Image::Luks(header, size) if header.payload().size.is_some() => {
                // (Its header says how long it is.)
                if len()? < *size {
                    return Err(Error::invalid("shorter than its header says"));
                }
            }
            Image::Raw { size } | Image::Luks(_, size) => {
                let len = len()?;
                if !(link.writable && is_padded(link.raw.1, len)) {
                    *size = len;
                    link.raw.1 = link.image.size();
                }
            }
            Image::Qcow2(_) | Image::Qed(..) => {
                let image = Image::read(file.bytes(), link.image.format())?;
                // (Else whoever takes it into use refuses it.)
                if has_same_below(&link.image, &image) && self.has_same_data(link, &image) {
                    link.image = image;
                }
            }
            // (Whoever takes it into use looks whether it has another size.)
            Image::Foreign(_) => {}
        }
        Ok(())
    }
}

/// Whether they name the same file below them, in the same format.
pub(super) fn has_same_below(one: &Image, other: &Image) -> bool {
    one.backing_file() == other.backing_file() && one.backing_format() == other.backing_format()
}
