//! Where a disk comes from, as a table says it.

use super::DiskTable;
use fathom_files::gate;
use fathom_jobs::pull;
use fathom_nbd::NbdUri;
use std::path::{Path, PathBuf};

impl DiskTable {
    /// Which disk is to come here. The error is one line for the user.
    pub(crate) fn pull_terms(&self) -> Result<Option<pull::Terms>, String> {
        let Some(source) = &self.pull else {
            if self.pull_record.is_some() || self.pull_speed.is_some() || self.pull_post_copy {
                return Err(
                    "pull-record, pull-speed and pull-post-copy apply only to disks that are \
                     copied from another server (--pull)"
                        .into(),
                );
            }
            // The supervisor has checked the disks of a tenant, whose process cannot open the record.
            let record = self.pull_record_path();
            let record = record.filter(|_| gate::other().is_none());
            if let Some(record) = record.filter(|record| pull::is_unfinished(record)) {
                return Err(format!(
                    "{}: incomplete, or its record {} cannot be read; serve the disk with \
                     --pull, which copies the rest, or remove the record if it belongs to \
                     another image",
                    self.image,
                    record.display()
                ));
            }
            return Ok(None);
        };
        let source: NbdUri = source
            .parse()
            .map_err(|problem| format!("--pull: {problem}"))?;
        if self.vhost_user.is_none() {
            return Err(
                "--pull: needs --vhost-user, because the disk moves together with its guest".into(),
            );
        }
        if self.readonly || self.force_share {
            return Err("--pull: excludes --readonly, because the disk is written".into());
        }
        if self.pull_speed == Some(0) {
            return Err("--pull-speed: 0 is below the minimum of 1".into());
        }
        if self.pull_post_copy && self.nbd_move {
            return Err(
                "--pull-post-copy: excludes --nbd-move; the disk can move again when it has \
                 arrived"
                    .into(),
            );
        }
        let record = self.pull_record_path().ok_or_else(|| {
            format!(
                "{}: not a file; name a file for the record with --pull-record",
                self.image
            )
        })?;
        Ok(Some(pull::Terms {
            source,
            image: self.image.path().map(Path::to_owned),
            record,
            rate: self.pull_speed,
            post_copy: self.pull_post_copy,
        }))
    }

    /// Where it is noted how far a disk has come.
    pub(crate) fn pull_record_path(&self) -> Option<PathBuf> {
        let beside = |path: &Path| {
            let mut name = path.as_os_str().to_owned();
            name.push(".pull");
            PathBuf::from(name)
        };
        let own = || {
            let path = self.image.path()?;
            let is_device = path.starts_with("/dev") && !path.starts_with("/dev/shm");
            (!is_device).then(|| beside(path))
        };
        self.pull_record.clone().or_else(own)
    }
}
