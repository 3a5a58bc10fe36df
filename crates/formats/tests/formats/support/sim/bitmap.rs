//! A bitmap in the image, while the run itself records the changes.

use super::case::{Case, Made};
use super::model::{SECTOR, Value};
use super::recorder::Recorder;
use super::run::{Run, Start};
use super::world::World;
use fathom_core::DiskError;
use fathom_formats::offline::Image;
use fathom_formats::offline::bitmap::{Bits, list};
use fathom_formats::served::{OwnBitmap, OwnBitmaps};
use std::collections::HashSet;
use std::sync::Arc;

const NAME: &str = "b";
/// Number of bytes that a bit covers.
const GRANULARITY: u64 = SECTOR as u64;

impl Case {
    pub fn can_have_bitmaps(&self) -> bool {
        self.format == "qcow2" && !self.options.contains("compat=0.10") && !self.tiny_cache
    }
}

impl Start<'_> {
    /// The run records what it changes in the image's bitmap.
    pub fn recording(mut self) -> Self {
        self.options.own_bitmaps = OwnBitmaps::Recorded;
        self
    }
}

impl Run {
    fn records(&self) -> bool {
        self.options.own_bitmaps == OwnBitmaps::Recorded
    }

    /// Takes the bitmap from the image after activation and checks its contents. From then on, the
    /// bitmap in the image is marked as invalid.
    pub(super) fn take_bitmap(&mut self) {
        if !self.records() {
            return;
        }
        let mut wanted = None;
        let mut take = |own: OwnBitmap| {
            wanted = own.words;
            true
        };
        let taken = self.disk.take_bitmaps(&mut |_, _| true, &mut take);
        assert_eq!(taken.expect("they can be taken"), Vec::<Vec<u8>>::new());
        assert_eq!(wanted, self.left, "it is as it was left");
    }

    pub(super) fn deactivate_disk(&mut self) -> Result<(), DiskError> {
        use fathom_core::Disk;
        if !self.records() {
            return self.disk.deactivate();
        }
        let bits = self.sectors();
        let mut words = vec![0; bits.div_ceil(64) as usize];
        for sector in self.model.touched().into_iter().filter(|n| *n < bits) {
            words[sector as usize / 64] |= 1 << (sector % 64);
        }
        let own = OwnBitmap {
            name: NAME.into(),
            granularity: GRANULARITY,
            words: Some(words.clone()),
        };
        let (ended, left) = self.disk.deactivate_with(&mut std::iter::once(own));
        let is_left = !left.is_empty();
        assert!(is_left || !self.strict, "there is room for it");
        self.left = Some(words).filter(|_| is_left);
        ended
    }
}

/// Returns the sectors that a valid bitmap marks as dirty; `None` if there is no valid bitmap.
pub fn dirty(made: &Made, world: &Arc<World>) -> Result<Option<HashSet<u64>>, String> {
    if !made.case.can_have_bitmaps() {
        return Ok(None);
    }
    let file = Recorder::new(world.clone(), 0, &made.names[0]);
    let read = || {
        let Image::Qcow2(header) = Image::read(&*file, made.case.format())? else {
            return Ok(None);
        };
        let all = list(&*file)?;
        let Some(found) = all
            .iter()
            .find(|one| one.name() == NAME && one.dirty.is_some())
        else {
            return Ok(None);
        };
        let mut sectors = HashSet::new();
        let bits = Bits::read(&*file, &header, &found.bitmap)?;
        bits.for_each(0..bits.disk_size(), &mut |part| {
            sectors.extend(part.start / GRANULARITY..part.end / GRANULARITY);
            Ok(())
        })?;
        Ok(Some(sectors))
    };
    read().map_err(|error: fathom_formats::Error| format!("its bitmap: {error}"))
}

/// Checks that every sector that has changed is dirty.
pub fn is_never_too_clean(
    dirty: &HashSet<u64>,
    before: &[Value],
    now: &[Value],
) -> Result<(), String> {
    for (sector, (before, now)) in (0..).zip(before.iter().zip(now)) {
        if before != now && !dirty.contains(&sector) {
            return Err(format!(
                "sector {sector} is {now:#x}, was {before:#x}, and not dirty"
            ));
        }
    }
    Ok(())
}
