//! Resizes an image's disk: checks, and the steps before and after [`super::resize`].

use super::disk::ImageDisk;
use super::jobs::{Failure, Job};
use super::open::check;
use super::problem::{told, unusable};
use super::storage::Storage;
use crate::Image;
use crate::offline::info::read_bitmaps;
use crate::qcow2::bitmap::{Bitmap, FLAG_IN_USE};
use crate::qcow2::{L1Entry, MAX_L1_BYTES};
use crate::{Error, qcow2, qed};
use fathom_core::{DiskError, Resize};
use fathom_units::cause;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvError, TryRecvError, sync_channel};

/// A resize in progress.
pub struct Resizing {
    path: PathBuf,
    size: u64,
    outcome: Receiver<Result<(), Failure>>,
    /// Data file to be cut to that size at the end.
    cut: Option<Arc<dyn Storage>>,
}

impl Resizing {
    /// Waits for the end of the resize and returns the disk's size.
    pub fn wait(self) -> Result<u64, DiskError> {
        let outcome = self.outcome.recv();
        self.end(outcome)
    }

    /// Returns the result if the resize has ended.
    pub fn poll(&self) -> Option<Result<u64, DiskError>> {
        match self.outcome.try_recv() {
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(self.end(Err(RecvError))),
            Ok(outcome) => Some(self.end(Ok(outcome))),
        }
    }

    fn end(&self, outcome: Result<Result<(), Failure>, RecvError>) -> Result<u64, DiskError> {
        let path = self.path.display();
        match outcome {
            Ok(Ok(())) => {}
            Ok(Err(Failure::Unchanged(libc::ETIMEDOUT))) => {
                return Err(DiskError::Refused(format!(
                    "{path}: requests in flight do not end; the disk keeps its size"
                )));
            }
            Ok(Err(Failure::Unchanged(errno))) => {
                return Err(self.failed("cannot resize the image", errno));
            }
            Ok(Err(Failure::PartlyCut(errno))) => {
                let what = "cannot shrink the image, which keeps its size; data beyond the \
                     requested size may be lost";
                return Err(self.failed(what, errno));
            }
            Err(RecvError) => {
                let problem = format!("{path}: not resized: the image is no longer in use");
                return Err(DiskError::Refused(problem));
            }
        }
        if let Some(file) = &self.cut
            && let Err(error) = file
                .bytes()
                .set_len(self.size)
                .and_then(|()| file.bytes().sync())
        {
            // The disk has its new size by now, and no request reaches the data beyond it.
            let file = file.path().display();
            tracing::warn!(
                "{path}: cannot shorten its data file {file}, which stays longer than the disk: \
                 {}",
                cause(error)
            );
        }
        Ok(self.size)
    }

    fn failed(&self, what: &'static str, errno: i32) -> DiskError {
        DiskError::Io {
            path: self.path.clone(),
            what,
            source: io::Error::from_raw_os_error(errno),
        }
    }
}

impl ImageDisk {
    /// Begins to resize the disk, which is active and has workers, to the size in `to`.
    ///
    /// The resize must end before the next one begins, and before the disk is deactivated. Does not
    /// use `to.settle`.
    pub fn begin_resize(&self, to: &Resize) -> Result<Resizing, DiskError> {
        let (old, path) = (self.shared.size(), self.path());
        let size = to.wanted(old)?.unwrap_or(old);
        if !self.options.format.has_tables() {
            return Err(self.is_part());
        }
        if self.options.read_only || self.active().is_none() {
            return Err(unusable(
                path,
                "not resized: the image is not in use for writing",
            ));
        }
        let image = self.read()?;
        let checked = match &image {
            Image::Qcow2(header) => self.check_qcow2(header, size),
            Image::Qed(image) => self.check_qed(&image.header, size),
            Image::Raw(_) | Image::Luks(_) | Image::Foreign(_) => {
                unreachable!("it has tables")
            }
        };
        checked.map_err(|problem| {
            DiskError::Refused(format!("{}: not resized: {problem}", path.display()))
        })?;
        let link = &self.chain.links()[0];
        let has_data_file = link.image.has_data_file();
        let data = has_data_file.then(|| self.chain.storages[usize::from(link.data)].clone());
        let raw = matches!(&image, Image::Qcow2(header) if header.data_file_is_raw());
        if let Some(data) = data.as_ref().filter(|_| size > old) {
            let grown = grow_data_file(&**data, old, size, raw);
            grown.map_err(told(data.path()))?;
        }
        let (send, outcome) = sync_channel(1);
        self.shared.jobs.post(Job {
            size,
            raw_data_file: raw,
            outcome: send,
        });
        Ok(Resizing {
            path: path.to_owned(),
            size,
            outcome,
            cut: data.filter(|_| size < old),
        })
    }

    /// Takes over the size that another process has given the image while it was not in use here.
    pub(super) fn take_in(&self) -> Result<u64, DiskError> {
        if !self.options.format.has_tables() {
            return Err(self.is_part());
        }
        if self.active().is_none() && self.options.snapshot.is_none() {
            let image = self.read()?;
            check(self.path(), &image, !self.options.read_only)?;
            if image.size() == 0 {
                return Err(unusable(self.path(), "a disk of 0 bytes"));
            }
            self.shared.set_size(image.size());
        }
        Ok(self.shared.size())
    }

    fn is_part(&self) -> DiskError {
        let what = match &self.chain.links()[0].image {
            Image::Luks(_) => "a luks image cannot be resized while it is served",
            _ => "a disk that is a part of its file (--offset, --size) cannot be resized",
        };
        DiskError::Refused(format!("{}: {what}", self.path().display()))
    }

    fn read(&self) -> Result<Image, DiskError> {
        let image = Image::read(self.chain.storages[0].bytes(), self.options.format);
        image.map_err(told(self.path()))
    }

    /// Returns the size in bytes of the backing image's disk.
    fn below(&self) -> u64 {
        self.chain
            .links()
            .get(1)
            .map_or(0, |link| link.image.size())
    }

    fn check_qcow2(&self, header: &qcow2::Header, size: u64) -> Result<(), String> {
        let g = header.geometry();
        let entries = g.l1_entries_for(size);
        let clusters = g.clusters_of(entries.saturating_mul(L1Entry::SIZE));
        let old = self.shared.size();
        if entries > MAX_L1_BYTES / L1Entry::SIZE {
            return Err(
                "the size exceeds the limit of its L1 table; convert it with a larger \
                 cluster_size"
                    .into(),
            );
        }
        if entries > header.l1_entries.into() && clusters >= g.refcount_block_entries() {
            return Err(format!(
                "its L1 table would have {clusters} clusters, too many while it is served; stop \
                 serving it, and use 'fathom img resize'"
            ));
        }
        if header.version < 3 && header.snapshots > 0 {
            return Err("an image of version 2 with snapshots".into());
        }
        if header.version < 3 && size > old && self.below() > old {
            return Err(
                "its backing file is larger than its disk, which only images of version 3 can \
                 hide; convert it with compat=1.1"
                    .into(),
            );
        }
        let others = self.has_bitmaps_of_a_size(header);
        match others.map_err(|error| error.to_string())? {
            false => Ok(()),
            true => Err(
                "it has bitmaps, which cannot be resized while it is served; stop serving it and \
                 use 'fathom img resize', or remove them"
                    .into(),
            ),
        }
    }

    /// Returns whether the image has valid bitmaps. Bitmaps that are recorded elsewhere meanwhile
    /// do not count.
    fn has_bitmaps_of_a_size(&self, header: &qcow2::Header) -> Result<bool, Error> {
        let bitmaps = read_bitmaps(self.chain.storages[0].bytes(), header)?;
        let says = |bitmap: &Bitmap| bitmap.flags & FLAG_IN_USE == 0;
        Ok(bitmaps.iter().any(says))
    }

    fn check_qed(&self, header: &qed::Header, size: u64) -> Result<(), String> {
        let most = header.geometry().max_size();
        if size > most {
            return Err(format!(
                "its tables reach at most {most} bytes; convert it to qcow2"
            ));
        }
        match size < self.shared.size() {
            true => Err("qed images cannot shrink; convert it to qcow2".into()),
            false => Ok(()),
        }
    }
}

/// Makes the data file longer.
///
/// If the file is a raw image by itself, its data beyond the old end of the disk becomes part of
/// the disk. Otherwise that data is dropped.
fn grow_data_file(data: &dyn Storage, old: u64, new: u64, raw: bool) -> crate::Result<()> {
    let failed = || Error::io("cannot resize its data file");
    let len = match raw {
        true => data.bytes().len().map_err(failed())?.max(old),
        false => old,
    };
    if len >= new {
        return Ok(());
    }
    let resized = data
        .bytes()
        .set_len(len)
        .and_then(|()| data.bytes().set_len(new));
    resized.and_then(|()| data.bytes().sync()).map_err(failed())
}
