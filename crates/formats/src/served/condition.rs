//! What is known, without a check, to be wrong with the images of a disk.

use super::io::StorageId;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A problem of an image that a check can repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ImageProblem {
    /// The image was not closed after it was written to: clusters may be allocated that nothing uses.
    Leaks,
    /// The image is marked as corrupt, or damage was found in it.
    Damage,
    /// The same of an image below it.
    BackingDamage,
}

/// The problems of a disk's images, as of the last time that they were taken into use, and since.
#[derive(Debug, Default)]
pub(super) struct ImageCondition {
    leaks: AtomicBool,
    damage: AtomicBool,
    backing_damage: AtomicBool,
}

impl ImageCondition {
    pub(super) fn problems(&self) -> Vec<ImageProblem> {
        let all = [
            (&self.leaks, ImageProblem::Leaks),
            (&self.damage, ImageProblem::Damage),
            (&self.backing_damage, ImageProblem::BackingDamage),
        ];
        let found = all.into_iter().filter(|(flag, _)| flag.load(Relaxed));
        found.map(|(_, problem)| problem).collect()
    }

    /// Forgets all problems: the images are looked at again.
    pub(super) fn reset(&self) {
        for flag in [&self.leaks, &self.damage, &self.backing_damage] {
            flag.store(false, Relaxed);
        }
    }

    /// Notes that clusters of the image in that storage may be leaked. (A leak below the disk's own image is told of
    /// when that image is served by itself.)
    pub(super) fn note_leaks(&self, storage: StorageId) {
        if storage == 0 {
            self.leaks.store(true, Relaxed);
        }
    }

    /// Notes damage of the image in that storage.
    pub(super) fn note_damage(&self, storage: StorageId) {
        match storage {
            0 => self.damage.store(true, Relaxed),
            _ => self.backing_damage.store(true, Relaxed),
        }
    }
}
