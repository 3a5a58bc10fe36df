//! Files and block devices as a kind of storage.

use super::{FileDisk, FileOptions};
use crate::kind::{Kind, OpenOptions, Opened, Place};
use fathom_core::DiskError;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(crate) const KIND: Kind = Kind {
    name: "file",
    form: "an image file or block device",
    what: "File of any file system, or block device; also for qcow2 and other formats",
    prefixes: &[],
    images: true,
    network: false,
    locks: true,
    options: &[],
    parse: |text| Ok(Arc::new(At(text.into()))),
};

/// The file with this path.
pub(crate) struct At(pub PathBuf);

impl Place for At {
    fn open(&self, options: &OpenOptions) -> Result<Opened, DiskError> {
        let file = Arc::new(FileDisk::open(&self.0, options.into())?);
        Ok(Opened {
            disk: file.clone(),
            file: Some(file),
            part: None,
            bytes: None,
            identity: None,
            halt: None,
        })
    }

    fn path(&self) -> Option<&Path> {
        Some(&self.0)
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.display().fmt(f)
    }
}

impl From<&OpenOptions> for FileOptions {
    fn from(options: &OpenOptions) -> FileOptions {
        FileOptions {
            cache: options.cache,
            read_only: options.read_only,
            force_share: options.force_share,
            patient: options.patient,
            succeeds: options.succeeds,
            keeps_lock: options.keeps_lock,
            superseded: options.superseded,
            engine: options.engine,
            workers: options.workers,
            discard: options.discard,
            growable: options.growable,
            ..FileOptions::default()
        }
    }
}
