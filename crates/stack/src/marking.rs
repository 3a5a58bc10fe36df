//! The image of a disk, which can be marked as superseded by a newer one.

use fathom_core::DiskError;
use fathom_files::superseded::{Image, Superseded};
use fathom_files::{FileId, UsedFile};
use fathom_storage::{FileDisk, Location, OnSuperseded, refusal_of};
use std::sync::Arc;

/// The image to which a disk's writes go.
#[derive(Clone)]
pub struct MarkedImage {
    location: Location,
    file: Option<Arc<FileDisk>>,
    id: Option<String>,
}

impl MarkedImage {
    /// Creates the value. `files` are the files that the disk has open.
    pub(crate) fn new(
        location: &Location,
        file: Option<&Arc<FileDisk>>,
        files: &[UsedFile],
    ) -> MarkedImage {
        let id = files.first().and_then(|file| match &file.id {
            FileId::Named(id) => Some(id.clone()),
            FileId::File { .. } | FileId::Device { .. } => None,
        });
        MarkedImage {
            location: location.clone(),
            file: file.cloned(),
            id,
        }
    }

    /// Returns the location of the image.
    pub fn location(&self) -> &Location {
        &self.location
    }

    /// The image's mark, if a newer one has superseded it.
    pub fn mark(&self) -> Option<Superseded> {
        match &self.file {
            Some(file) => file.mark(),
            None => self.with_image(|image| image.mark()),
        }
    }

    /// Marks the image, durably. The error says why it cannot be marked.
    pub fn set_mark(&self, mark: &Superseded) -> Result<(), String> {
        match &self.file {
            Some(file) => file.set_mark(mark),
            None if !self.outlives_server() => Ok(()),
            None => self.with_image(|image| image.set_mark(mark)),
        }
    }

    /// Removes the image's mark, durably.
    pub fn clear_mark(&self) -> Result<(), String> {
        match &self.file {
            Some(file) => file.clear_mark(),
            None => self.with_image(|image| image.clear_mark()),
        }
    }

    /// Returns whether the image outlives the server. Images in memory cannot be superseded.
    fn outlives_server(&self) -> bool {
        self.file.is_some() || self.id.is_some() || self.location.kind().takes("server-timeout")
    }

    fn with_image<T>(&self, work: impl FnOnce(Image<'_>) -> T) -> T {
        work(Image {
            location: &self.location.to_string(),
            file: None,
            id: self.id.as_deref(),
        })
    }

    /// Fails if a newer image has superseded this one, which is not a file and will be written.
    ///
    /// A file is checked when it is opened and when it is activated.
    pub(crate) fn take(&self, on_superseded: OnSuperseded) -> Result<(), DiskError> {
        if self.file.is_some() || !self.outlives_server() || on_superseded == OnSuperseded::Ignore {
            return Ok(());
        }
        let Some(mark) = self.mark() else {
            return Ok(());
        };
        let problem = match on_superseded {
            OnSuperseded::Take => self.clear_mark().err(),
            _ => Some(refusal_of(&mark)),
        };
        problem.map_or(Ok(()), |problem| {
            Err(DiskError::Unusable {
                path: self.location.name(),
                problem,
            })
        })
    }
}
