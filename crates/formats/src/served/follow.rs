//! A chain that has become shorter while others had its first image.
//!
//! Before a disk is taken into use, another server may have brought what is below its image into that, or images of
//! the middle into the one below them: the source of a live migration, whose job came to its end after the target had
//! been started. It is the same disk then, on fewer of the files that are open here. On any other file it has to be
//! opened anew.

use super::open::{Chain, Link};
use super::problem::told;
use super::storage::Storage;
use crate::offline::Image;
use crate::{Error, Format, Result, resolve};
use fathom_core::DiskError;

impl Chain {
    /// Leaves out what the images above do not need any more, by the headers as they are now. The first file is in use,
    /// so that nobody else changes the chain. With something that is not known here all is left as it was: whoever takes it
    /// into use says so.
    pub(super) fn follow(&self) -> std::result::Result<(), DiskError> {
        let before = self.links();
        let mut now: Vec<Link> = Vec::new();
        let mut next = Some(0);
        while let Some(n) = next {
            let Some((link, below)) = self.follow_link(&before, n, now.len() < n)? else {
                return Ok(());
            };
            now.push(link);
            next = below;
        }
        if now.len() < before.len() {
            let path = self.path().display();
            let (from, to) = (before.len(), now.len());
            tracing::info!("{path}: others have left it on {to} instead of {from} images");
            self.leave_out(now);
        }
        Ok(())
    }

    /// An image as it is now, and which one it has below. `is_new_there`: those between it and the one above are left out. None:
    /// it has another file below it.
    fn follow_link(
        &self,
        before: &[Link],
        n: usize,
        is_new_there: bool,
    ) -> std::result::Result<Option<(Link, Option<usize>)>, DiskError> {
        let mut link = before[n].clone();
        let as_before = (n + 1 < before.len()).then_some(n + 1);
        let file = &self.storages[usize::from(link.storage)];
        if !link.image.format().has_tables() {
            if is_new_there {
                take_in_size(&mut link, &**file).map_err(told(file.path()))?;
            }
            return Ok(Some((link, as_before)));
        }
        let image = Image::read(file.bytes(), link.image.format()).map_err(told(file.path()))?;
        let below = match has_same_below(&link.image, &image) {
            true => as_before,
            false => match self.below(before, n, &image).map_err(told(file.path()))? {
                Some(below) => below,
                None => return Ok(None),
            },
        };
        if is_new_there || below != as_before {
            link.image = image;
        }
        Ok(Some((link, below)))
    }

    /// Which image of the chain it has below now, further down than before, or that it has none; None: another one.
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
        let further = (n + 2..before.len()).find(|m| is_it(&before[*m]));
        Ok(further.map(Some))
    }
}

/// What others have written to an image without tables may have made it longer.
fn take_in_size(link: &mut Link, file: &dyn Storage) -> Result<()> {
    let len = || {
        let len = file.bytes().len();
        len.map_err(Error::io("its size cannot be read"))
    };
    match &mut link.image {
        Image::Raw { size } | Image::Luks(_, size) => {
            *size = len()?;
            link.raw.1 = *size;
        }
        // (Whoever takes one into use looks whether it has another size.)
        Image::Foreign(_) | Image::Qcow2(_) | Image::Qed(..) => {}
    }
    Ok(())
}

/// Whether they name the same file below them, in the same format.
pub(super) fn has_same_below(one: &Image, other: &Image) -> bool {
    one.backing_file() == other.backing_file() && one.backing_format() == other.backing_format()
}
