//! Successors, which replace a bitmap when the backup made with it is safe.

use super::all::{State, now, remove};
use super::bitmap::{Bitmap, sync_dir};
use super::header::Header;
use super::limits::{granularity, is_granularity};
use super::place::Place;
use fathom_units::cause;
use std::fs;
use std::sync::Arc;

impl State {
    pub(super) fn drop_successor(&mut self, place: &Place, name: &str) {
        let before = self.successors.len();
        self.successors.retain(|next| *next.name() != *name);
        if self.successors.len() < before {
            remove(&place.next_path(name));
        }
    }

    /// See [`Bitmaps::begin_successor`](super::Bitmaps::begin_successor).
    pub(super) fn begin_successor(&mut self, place: &Place, name: &str) -> Result<u64, String> {
        let size = self.size.ok_or("the disk is not in use")?;
        let block = match self.find(name) {
            Some(bitmap) if is_granularity(size, bitmap.block()) => bitmap.block(),
            Some(_) => granularity(size),
            None => {
                self.has_room_for(place, name)?;
                granularity(size)
            }
        };
        self.drop_successor(place, name);
        let since = now();
        let (path, header) = (place.next_path(name), Header::new(size, block, since));
        let made = self.make(place, &path, name, header);
        let made = made.map_err(|error| {
            format!(
                "bitmap '{name}': not replaced by its successor: {}",
                cause(error)
            )
        })?;
        self.successors.push(Arc::new(made));
        Ok(since)
    }

    /// Replaces the bitmap by its successor: the one that began at `to`, or any.
    pub(super) fn advance(
        &mut self,
        place: &Place,
        name: &str,
        to: Option<u64>,
    ) -> Result<(), String> {
        let is_meant =
            |next: &Arc<Bitmap>| *next.name() == *name && to.is_none_or(|to| next.since() == to);
        let stays = |why| format!("{why}; bitmap '{name}' is unchanged");
        let at = self.successors.iter().position(is_meant).ok_or_else(|| {
            stays(
                "no backup with the bitmap has succeeded since the server started, or another \
                 one has begun"
                    .into(),
            )
        })?;
        let next = &self.successors[at];
        if let Some(problem) = next.problem() {
            return Err(stays(problem));
        }
        let path = place.path(name);
        let is_its_file = self.find(name).is_some_and(|bitmap| !bitmap.is_in_memory());
        if !is_its_file && path.symlink_metadata().is_ok() {
            return Err(stays(format!(
                "{} already exists; remove it",
                path.display()
            )));
        }
        fs::rename(place.next_path(name), &path).map_err(|error| stays(cause(error)))?;
        // From here on the successor is the bitmap.
        let next = self.successors.remove(at);
        self.current.retain(|bitmap| *bitmap.name() != *name);
        self.current.push(next);
        // If the machine crashes before the rename is durable, everything is dirty in both.
        sync_dir(&path).map_err(cause)
    }
}
