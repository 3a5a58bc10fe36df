//! All that is done with disks beside their users, as one list.

use crate::info::{BackupInfo, Info, MirrorInfo, PullInfo, StreamInfo};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Jobs of all disks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Jobs {
    /// The jobs, in the order of their disks.
    pub jobs: Vec<JobInfo>,
}

/// A job of a disk. The state of the disk has further details.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobInfo {
    /// Name of the disk. A job other than a pull is ended by DELETE of `/v1/disks/DISK/KIND`, where the kind `commit`
    /// is `stream`.
    pub disk: String,
    /// Kind of the job:
    ///
    /// - `pull`: the disk moves from another server to this server.
    /// - `backup`: a backup.
    /// - `mirror`: a mirror, or a commit of the top image.
    /// - `stream`: a stream.
    /// - `commit`: a commit of images in the middle of the backing chain.
    pub kind: String,
    /// Phase of the job: `keeping` or `failed` for a backup, otherwise `phase` of the pull, mirror or stream.
    pub phase: String,
    /// Number of bytes copied. For a backup: number of bytes in the scratch file.
    pub copied: u64,
    /// Number of bytes still to be copied or examined, as far as known. Null for a backup, which continues until it is
    /// ended.
    pub left: Option<u64>,
    /// Time since the job began, in seconds. Null for a pull.
    pub seconds: Option<u64>,
    /// Target of a mirror, new backing image of a stream, image that a commit writes to, or URI of a backup. Null for a
    /// pull, and for a stream without a new backing image.
    pub target: Option<String>,
    /// Why the job has failed or makes no progress. Null if it has no problem.
    pub problem: Option<String>,
}

impl Info {
    pub fn jobs(&self) -> Vec<JobInfo> {
        let disk = &self.name;
        let pull = self.pull.iter().map(|one| pull(disk, one));
        let jobs = pull.chain(self.backup.iter().map(|one| backup(disk, one)));
        let jobs = jobs.chain(self.mirror.iter().map(|one| mirror(disk, one)));
        jobs.chain(self.stream.iter().map(|one| stream(disk, one)))
            .collect()
    }
}

fn pull(disk: &str, pull: &PullInfo) -> JobInfo {
    JobInfo {
        disk: disk.into(),
        kind: "pull".into(),
        phase: pull.phase.clone(),
        copied: pull.copied,
        left: Some(pull.left),
        seconds: None,
        target: None,
        problem: pull.problem.clone(),
    }
}

fn backup(disk: &str, backup: &BackupInfo) -> JobInfo {
    let phase = match backup.problem {
        None => "keeping",
        Some(_) => "failed",
    };
    JobInfo {
        disk: disk.into(),
        kind: "backup".into(),
        phase: phase.into(),
        copied: backup.kept,
        left: None,
        seconds: Some(backup.seconds),
        target: Some(backup.uri.clone()),
        problem: backup.problem.clone(),
    }
}

fn mirror(disk: &str, mirror: &MirrorInfo) -> JobInfo {
    JobInfo {
        disk: disk.into(),
        kind: "mirror".into(),
        phase: mirror.phase.clone(),
        copied: mirror.copied,
        left: Some(mirror.left),
        seconds: Some(mirror.seconds),
        target: Some(mirror.target.clone()),
        problem: mirror.problem.clone(),
    }
}

fn stream(disk: &str, stream: &StreamInfo) -> JobInfo {
    let kind = match stream.top {
        None => "stream",
        Some(_) => "commit",
    };
    JobInfo {
        disk: disk.into(),
        kind: kind.into(),
        phase: stream.phase.clone(),
        copied: stream.copied,
        left: Some(stream.left),
        seconds: Some(stream.seconds),
        target: stream.base.clone(),
        problem: stream.problem.clone(),
    }
}
