//! Mirrors a disk to another image, and adds overlays to a disk.

use super::Served;
use crate::mirror::{Order, Running};
use crate::remake::{Layer, Other};
use fathom_formats::Format;
use fathom_host::options::DiskOptions;
use fathom_jobs::InUse;
use fathom_jobs::mirror::Terms;
use fathom_requests::{MirrorOrder, new_identity};
use fathom_spec::{DiskSpec, check_path};
use fathom_storage::Location;
use fathom_units::cause;
use std::fs;
use std::path::{Path, PathBuf};

/// Reasons why a disk cannot be changed: its jobs.
const STREAMED: &str = "its chain of images is being changed; wait until that ends, or end it with 'fathom stream \
     stop'";
const BACKED_UP: &str = "a backup is in progress; wait until it ends";
const MIRRORED: &str = "a mirror is in progress; end it first, or switch to its target";

impl Served {
    /// Returns what is needed to begin a mirror. The error is for the user.
    pub fn mirror_order(&self, order: MirrorOrder, has_nbd: bool) -> Result<Order, String> {
        let mut spec: DiskSpec = self.spec().clone().on(order.target, order.format);
        if !order.keys.is_empty() {
            spec.keys = order.keys;
        }
        spec.check_keys()?;
        spec.image.path().map_or(Ok(()), check_path)?;
        Ok(Order {
            id: new_identity(),
            disk: self.options.name.clone(),
            source: self.source(),
            terms: Terms {
                rate: order.speed,
                brakes: order.active,
            },
            target: DiskOptions::of(spec, has_nbd)?,
            above: None,
            shared: self.shared.clone(),
            events: self.events.clone(),
        })
    }

    /// Size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.stack.disk.info().size
    }

    /// Takes the disk into use until the returned value is dropped. Returns `None` if the disk
    /// already has users. The error says why the disk cannot be used.
    pub fn try_to_use(&self) -> Result<Option<InUse>, String> {
        if self.shared.is_used() {
            return Ok(None);
        }
        let disk = self.shared.for_job(self.stack.disk.clone());
        InUse::new(&disk)
            .map(Some)
            .map_err(|error| error.to_string())
    }

    /// Returns which job in progress needs the disk with its present image, if there is such a job.
    pub(super) fn job_of_others(&self) -> Option<&'static str> {
        if self.backup.as_ref().is_some_and(|backup| !backup.is_over()) {
            return Some(BACKED_UP);
        }
        let is_mirrored = self.mirror.as_ref().is_some_and(|mirror| !mirror.is_over());
        let is_streamed = { self.stream.iter() }.any(|running| !running.following.is_over());
        let streamed = is_streamed.then_some(STREAMED);
        is_mirrored.then_some(MIRRORED).or(streamed)
    }

    /// Returns why the disk cannot be mirrored.
    pub fn may_not_be_mirrored(&self) -> Option<String> {
        if self.is_changed_by_others() {
            Some("other processes may change the image, which a mirror would miss".into())
        } else if self.moves.going.is_some() {
            Some("another server may take the disk over (nbd-move)".into())
        } else if has_filter(self.spec(), "cow") {
            Some("its changes are discarded when the server ends (--filter cow)".into())
        } else {
            self.may_not_be_disturbed()
        }
    }

    /// Returns why the disk's image cannot get an overlay.
    pub fn may_not_have_layer(&self) -> Option<String> {
        let disk = &self.options.disk;
        let problem = if !disk.location.path().is_some_and(Path::is_file) {
            "its image is not a file"
        } else if disk.read_only {
            "the disk is read-only"
        } else if disk.offset.or(disk.size).is_some() {
            "the disk is a part of its file (offset, size)"
        } else if disk.base.is_some() || disk.data_file.is_some() {
            "the disk has a base or a data file that its image does not name"
        } else if has_filter(self.spec(), "cow") {
            "its changes are discarded when the server ends (--filter cow)"
        } else {
            return self.may_not_be_disturbed();
        };
        Some(problem.into())
    }

    /// Returns the options of the disk with a new overlay at `path`. The error is for the user.
    pub fn layered(&self, path: PathBuf, has_nbd: bool) -> Result<(DiskOptions, Other), String> {
        check_path(&path)?;
        let spec = self.spec();
        let below = spec.image.path().ok_or("its image is not a file")?;
        // (An absolute path: the overlay may be in another directory.)
        let below = fs::canonicalize(below);
        let below = below.map_err(|error| format!("cannot find its image: {}", cause(error)))?;
        let mut dirs = spec.allow_dirs.clone();
        if let Some(dir) = below.parent().filter(|dir| path.parent() != Some(dir))
            && !dirs.iter().any(|allowed| allowed == dir)
        {
            dirs.push(dir.to_owned());
        }
        let layer = Layer {
            format: self.stack.format,
            size: self.stack.tap.below().info().size,
            path: path.clone(),
            below,
            keys: self.options.disk.keys.clone(),
        };
        let spec = DiskSpec {
            allow_dirs: dirs,
            ..spec.clone().on(Location::file(path), Some(Format::Qcow2))
        };
        Ok((DiskOptions::of(spec, has_nbd)?, Other::Layer(layer)))
    }

    pub fn set_mirror(&mut self, mirror: Running) {
        self.mirror = Some(mirror);
    }

    pub fn mirror(&self) -> Option<&Running> {
        self.mirror.as_ref()
    }

    /// Forgets the mirror, which has ended, and whose final state has been reported.
    pub fn forget_mirror(&mut self) {
        self.mirror = None;
    }
}

pub(super) fn has_filter(spec: &DiskSpec, name: &str) -> bool {
    spec.filters.iter().any(|filter| filter.name == name)
}
