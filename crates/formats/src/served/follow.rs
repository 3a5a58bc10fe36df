//! A chain that has become shorter while others had its first image.
//!
//! Before a disk is taken into use, another server may have brought what is below its image into that, or images of
//! the middle into the one below them: the source of a live migration, whose job came to its end after the target had
//! been started. It is the same disk then, on fewer of the files that are open here. On any other file it has to be
//! opened anew.

use super::open::{Chain, Link};
use super::problem::told;
use crate::offline::Image;
use crate::{Format, Result, resolve};
use fathom_core::DiskError;
use std::path::PathBuf;

impl Chain {
    /// Leaves out what the images above do not need any more, by the headers as they are now. The first file is in use,
    /// so that nobody else changes the chain; what is not known here is left as it was, for whoever takes it into use.
    pub(super) fn follow(&self) -> std::result::Result<(), DiskError> {
        let (before, paths) = (self.links(), self.paths());
        let mut now: Vec<Link> = Vec::new();
        let mut next = Some(0);
        while let Some(n) = next {
            let (link, below) = follow_link(self, &before, &paths, n, now.len() < n)?;
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
}

/// An image as it is now, and which one it has below. `is_new_there`: those between it and the one above are left out.
fn follow_link(
    chain: &Chain,
    before: &[Link],
    paths: &[PathBuf],
    n: usize,
    is_new_there: bool,
) -> std::result::Result<(Link, Option<usize>), DiskError> {
    let mut link = before[n].clone();
    let as_before = (n + 1 < before.len()).then_some(n + 1);
    let (has_tables, format) = (link.image.format().has_tables(), link.image.format());
    if !(has_tables && as_before.is_some() || is_new_there && (has_tables || format == Format::Raw))
    {
        return Ok((link, as_before));
    }
    let file = &chain.storages[usize::from(link.storage)];
    let image = Image::read(file.bytes(), format).map_err(told(file.path()))?;
    let below = match has_same_below(&link.image, &image) {
        true => as_before,
        false => below(before, paths, n, &image)
            .map_err(told(file.path()))?
            .unwrap_or(as_before),
    };
    if is_new_there || below != as_before {
        // (What others have written to it may have made it longer.)
        link.raw.1 = if has_tables { 0 } else { image.size() };
        link.image = image;
    }
    Ok((link, below))
}

/// Which image of the chain it has below now, further down than before, or that it has none; None: another one.
fn below(
    before: &[Link],
    paths: &[PathBuf],
    n: usize,
    now: &Image,
) -> Result<Option<Option<usize>>> {
    let Some(name) = now.backing_file() else {
        return Ok(Some(None));
    };
    let path = |link: &Link| &paths[usize::from(link.storage)];
    let named = resolve(path(&before[n]), name)?;
    let format = now.backing_format().map(|name| Format::from_name(&name));
    let format = format.transpose()?;
    let is_it = |other: &Link| {
        let fits = match (format, now) {
            (Some(format), _) => format == other.image.format(),
            // (Its header says raw or nothing.)
            (None, Image::Qed(..)) => other.image.format().has_tables(),
            (None, _) => false,
        };
        fits && *path(other) == named
    };
    let further = (n + 2..before.len()).find(|m| is_it(&before[*m]));
    Ok(further.map(Some))
}

/// Whether they name the same file below them, in the same format.
pub(super) fn has_same_below(one: &Image, other: &Image) -> bool {
    one.backing_file() == other.backing_file() && one.backing_format() == other.backing_format()
}
