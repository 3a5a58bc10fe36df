//! Marks on files that newer images have superseded.

use super::{FileDisk, FileOptions, OnSuperseded, Shared};
use fathom_core::DiskError;
use fathom_files::superseded::{Image, Superseded};
use fathom_units::Utc;
use std::fs::File;
use std::path::Path;
use std::sync::atomic::Ordering;

impl FileDisk {
    /// Returns the file's mark, if a newer image has superseded it.
    pub fn mark(&self) -> Option<Superseded> {
        self.shared.with_image(|image| image.mark())
    }

    /// Marks the file, durably. This disk itself can still be activated. The error says why the
    /// file cannot be marked.
    pub fn set_mark(&self, mark: &Superseded) -> Result<(), String> {
        self.shared.has_marked.store(true, Ordering::Relaxed);
        self.shared.with_image(|image| image.set_mark(mark))
    }

    /// Removes the file's mark, durably.
    pub fn clear_mark(&self) -> Result<(), String> {
        self.shared.with_image(|image| image.clear_mark())
    }
}

impl Shared {
    fn with_image<T>(&self, work: impl FnOnce(Image<'_>) -> T) -> T {
        with_image(&self.path, &self.file, work)
    }

    /// Checks and, if allowed, removes the mark of a locked file that is about to be written. Fails
    /// if the mark forbids writing.
    pub(super) fn take_mark(&self) -> Result<(), DiskError> {
        if self.has_marked.load(Ordering::Relaxed) {
            return Ok(());
        }
        // Another process may have superseded the image since it was opened.
        refuse_superseded(&self.path, &self.file, &self.options)?;
        if self.options.read_only || self.options.superseded != OnSuperseded::Take {
            return Ok(());
        }
        let Some(mark) = self.with_image(|image| image.mark()) else {
            return Ok(());
        };
        let cleared = self.with_image(|image| image.clear_mark());
        cleared.map_err(|problem| unusable(&self.path, problem))?;
        let path = self.path.display();
        tracing::warn!(
            "{path}: writing to an image that {} has superseded (allow-superseded); its mark is \
             removed",
            mark.image
        );
        Ok(())
    }
}

/// Refuses to open a superseded file for writing, unless the options allow it.
pub(super) fn refuse_superseded(
    path: &Path,
    file: &File,
    options: &FileOptions,
) -> Result<(), DiskError> {
    if options.read_only || options.superseded != OnSuperseded::Refuse {
        return Ok(());
    }
    match with_image(path, file, |image| image.mark()) {
        None => Ok(()),
        Some(mark) => Err(unusable(path, refusal_of(&mark))),
    }
}

/// Returns the reason why an image with that mark is not opened for writing. The caller puts the
/// image's name before it.
pub fn refusal_of(mark: &Superseded) -> String {
    let Superseded {
        image, disk, time, ..
    } = mark;
    let time = Utc::from_seconds(*time);
    format!(
        "superseded by {image} (disk '{disk}', {time} UTC), which has all later writes; use that \
         image, or pass allow-superseded (--allow-superseded) to write to this one, which \
         discards the later writes"
    )
}

fn with_image<T>(path: &Path, file: &File, work: impl FnOnce(Image<'_>) -> T) -> T {
    work(Image {
        location: &path.to_string_lossy(),
        file: Some(file),
        id: None,
    })
}

fn unusable(path: &Path, problem: String) -> DiskError {
    DiskError::Unusable {
        path: path.to_owned(),
        problem,
    }
}
