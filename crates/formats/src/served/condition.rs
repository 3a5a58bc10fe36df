//! Problems of a disk's images that are known without a check.

use super::io::StorageId;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A problem of an image that a check can repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ImageProblem {
    /// The image was not closed after a write: clusters may be allocated that nothing uses.
    Leaks,
    /// The image is marked as corrupt, or damage was found in it.
    Damage,
    /// The same for a backing image.
    BackingDamage,
}

/// The problems of a disk's images, found at the last activation and since.
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

    /// Forgets all problems, since an activation looks for them again.
    pub(super) fn reset(&self) {
        for flag in [&self.leaks, &self.damage, &self.backing_damage] {
            flag.store(false, Relaxed);
        }
    }

    /// Notes that clusters of the image in that storage may be leaked.
    ///
    /// (Leaks of a backing image are ignored here; they are reported when that image is served as a
    /// disk of its own.)
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
