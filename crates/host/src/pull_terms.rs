//! The move of a disk from another server, by the disk's options.

use fathom_files::gate;
use fathom_jobs::pull;
use fathom_nbd::NbdUri;
use fathom_spec::DiskSpec;
use std::path::Path;

/// Returns the terms on which a disk moves here. None: the disk does not move. The error is one
/// line for the user.
pub fn pull_terms(spec: &DiskSpec) -> Result<Option<pull::Terms>, String> {
    let Some(source) = &spec.pull else {
        if spec.pull_record.is_some() || spec.pull_speed.is_some() || spec.pull_post_copy {
            return Err(
                "pull-record, pull-speed and pull-post-copy apply only to disks that are \
                 copied from another server (--pull)"
                    .into(),
            );
        }
        // The supervisor has checked the disks of a tenant, whose process cannot open the record.
        let record = spec.pull_record_path();
        let record = record.filter(|_| gate::other().is_none());
        if let Some(record) = record.filter(|record| pull::is_unfinished(record)) {
            return Err(format!(
                "{}: incomplete, or its record {} cannot be read; serve the disk with \
                 --pull, which copies the rest, or remove the record if it belongs to \
                 another image",
                spec.image,
                record.display()
            ));
        }
        return Ok(None);
    };
    let source: NbdUri = source
        .parse()
        .map_err(|problem| format!("--pull: {problem}"))?;
    if spec.vhost_user.is_none() {
        return Err(
            "--pull: needs --vhost-user, because the disk moves together with its guest".into(),
        );
    }
    if spec.readonly || spec.force_share {
        return Err("--pull: excludes --readonly, because the disk is written".into());
    }
    if spec.pull_speed == Some(0) {
        return Err("--pull-speed: 0 is below the minimum of 1".into());
    }
    if spec.pull_post_copy && spec.nbd_move {
        return Err(
            "--pull-post-copy: excludes --nbd-move; the disk can move again when it has \
             arrived"
                .into(),
        );
    }
    let record = spec.pull_record_path().ok_or_else(|| {
        format!(
            "{}: not a file; name a file for the record with --pull-record",
            spec.image
        )
    })?;
    Ok(Some(pull::Terms {
        source,
        image: spec.image.path().map(Path::to_owned),
        record,
        rate: spec.pull_speed,
        post_copy: spec.pull_post_copy,
    }))
}
