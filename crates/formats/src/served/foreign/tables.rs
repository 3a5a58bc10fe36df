//! The tables of an image.

use crate::foreign::{Part, refused};
use crate::served::problem::told;
use crate::served::storage::Storage;
use fathom_core::DiskError;
use fathom_foreign::{Description, Image, Kind, Start};
use parking_lot::RwLock;
use std::path::Path;
use std::sync::Arc;

pub(super) struct Tables {
    /// The image itself, and the files that it names, in that order.
    pub(super) files: Vec<Arc<dyn Storage>>,
    kind: Kind,
    /// Names of the other files in the image.
    names: Vec<String>,
    image: RwLock<Arc<Image>>,
}

impl Tables {
    pub(super) fn read(
        files: Vec<Arc<dyn Storage>>,
        kind: Kind,
        start: &Start,
    ) -> Result<Tables, DiskError> {
        let image = read(&files, start)?;
        Ok(Tables {
            files,
            kind,
            names: start.names().to_vec(),
            image: RwLock::new(Arc::new(image)),
        })
    }

    /// Reads the tables again, since another process may have changed the files.
    ///
    /// The disk must have the same size as before.
    pub(super) fn read_again(&self) -> Result<(), DiskError> {
        let file = Part(self.files[0].bytes());
        let start = Start::read(self.kind, &file);
        let start = start.map_err(|error| told(self.path())(refused(error)))?;
        if start.names() != self.names {
            return Err(self.changed("names other files"));
        }
        let image = read(&self.files, &start)?;
        if image.size() != self.image().size() {
            return Err(self.changed("has another size"));
        }
        let mut place = self.image.write();
        *place = Arc::new(image);
        Ok(())
    }

    fn changed(&self, what: &str) -> DiskError {
        let problem = format!("{what} than when the image was opened; restart the server");
        told(self.path())(crate::Error::invalid(problem))
    }

    pub(super) fn image(&self) -> Arc<Image> {
        let image = self.image.read();
        image.clone()
    }

    pub(super) fn description(&self) -> Description {
        self.image().describe().clone()
    }

    pub(super) fn path(&self) -> &Path {
        self.files[0].path()
    }
}

fn read(files: &[Arc<dyn Storage>], start: &Start) -> Result<Image, DiskError> {
    let parts: Vec<_> = files.iter().map(|file| Part(file.bytes())).collect();
    let image = start.open(&parts[0], &parts[1..]);
    image.map_err(|error| told(files[0].path())(refused(error)))
}
