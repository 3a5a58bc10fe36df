//! The storage used by all technologies.

use std::path::PathBuf;

use super::cell::Cell;
use crate::bed::image;
use crate::error::Result;
use crate::experiment::place::Found;
use crate::scratch::Scratch;
use crate::work::{fio_file, fio_on_host};

/// A file or a block device, all blocks of which have been written.
pub struct Disk {
    pub path: PathBuf,
    found: Found,
    size: u64,
    _dir: Option<Scratch>,
}

impl Disk {
    /// Writes all blocks.
    ///
    /// # Errors
    /// If writing fails, or if overwriting a device is not allowed.
    pub fn make(cell: &Cell, progress: &mut dyn FnMut(&str)) -> Result<Disk> {
        let (found, size) = (cell.place.find()?, cell.size);
        found.refuse_data(cell.may_overwrite)?;
        progress(&format!("writing {} MiB to {found}", size >> 20));
        let (path, dir) = match &found {
            Found::Directory { path, .. } => {
                let dir = Scratch::within(path)?;
                let path = dir.path().join("disk.img");
                image::fill(&path, size)?;
                (path, Some(dir))
            }
            Found::Device(path) => {
                let job = [
                    "--name=fill",
                    &format!("--filename={}", fio_file(path)),
                    &format!("--size={size}"),
                    "--rw=write",
                    "--bs=1M",
                    "--direct=1",
                    "--end_fsync=1",
                    "--output-format=json",
                ];
                fio_on_host(&job.map(str::to_owned), cell.job.shape())?;
                (path.clone(), None)
            }
            Found::Export(uri) => (uri.into(), None), // rejected by `Cell::check`
        };
        Ok(Disk {
            path,
            found,
            size,
            _dir: dir,
        })
    }

    /// Whether a cell needs the same disk.
    pub fn is_of(&self, cell: &Cell) -> bool {
        self.size == cell.size && cell.place.find().is_ok_and(|found| found == self.found)
    }
}
