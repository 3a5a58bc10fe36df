//! A cached base image as a disk.

use super::bytes::Bytes;
use super::channel::CachedChannel;
use super::link;
use super::shared::{Shared, User};
use super::terms::Terms;
use crate::file::FileOptions;
use crate::kind::OpenOptions;
use fathom_core::{Channel, Cx, Disk, DiskError, DiskInfo};
use fathom_files::ImageFile;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Default time for which requests wait for data that does not arrive.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) struct CachedDisk(Arc<User>);

impl CachedDisk {
    /// Connects to the image's keeper; may block.
    pub(super) fn open(
        name: PathBuf,
        remote: &str,
        options: &OpenOptions,
    ) -> Result<CachedDisk, DiskError> {
        if !options.read_only {
            let problem = "base images are read-only; add --readonly, or --filter cow for changes that are \
                 discarded";
            return Err(DiskError::Unusable {
                path: name,
                problem: problem.into(),
            });
        }
        let terms = Terms::new(remote.to_owned(), options.base.clone());
        let files = FileOptions {
            force_share: true,
            growable: true,
            ..FileOptions::from(options)
        };
        let patience = options
            .server_reconnect
            .map(|time| time.0.unwrap_or_default());
        let shown = link::connect(&terms, &name, &files, None)?;
        let keeper = shown.keeper.clone();
        let failed = |source| DiskError::Io {
            path: name.clone(),
            what: "cannot open the cached image",
            source,
        };
        let patience = patience.unwrap_or(PATIENCE);
        let shared = Shared::new(terms, name.clone(), files, patience, shown).map_err(failed)?;
        let shared = Arc::new(shared);
        link::start(shared.clone(), keeper).map_err(failed)?;
        Ok(CachedDisk(Arc::new(User(shared))))
    }

    /// Returns the image as a file with blocking access.
    pub(super) fn bytes(&self) -> Arc<dyn ImageFile> {
        Arc::new(Bytes(self.0.clone()))
    }

    /// Returns a text that identifies the image.
    pub(super) fn identity(&self) -> String {
        self.0.0.terms.place().display().to_string()
    }
}

impl Disk for CachedDisk {
    fn info(&self) -> DiskInfo {
        let shared = &self.0.0;
        DiskInfo {
            size: shared.geometry.size & !511,
            optimal_io_size: 0,
            read_only: true,
            write_cache: false,
            discard: None,
            write_zeroes: None,
            ..shared.view().disk.info()
        }
    }

    fn activate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        Ok(Box::new(CachedChannel::new(self.0.0.clone(), cx)?))
    }
}
