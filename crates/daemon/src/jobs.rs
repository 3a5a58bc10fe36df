//! All that is done with disks beside their users, as one list.

use crate::info::{BackupInfo, Info, MirrorInfo, PullInfo, StreamInfo};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Jobs, in the order of their disks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Jobs {
    pub jobs: Vec<JobInfo>,
}

/// One of them; the disk itself tells more.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobInfo {
    /// Whose it is. One that can be ended is at `/v1/disks/DISK/KIND`; `commit` is a `stream` there.
    pub disk: String,
    /// `pull`, `backup`, `mirror`, `stream`, or `commit` (of what is in the middle of a chain).
    pub kind: String,
    /// As the disk tells it; of a backup `keeping` or `failed`.
    pub phase: String,
    /// Bytes; of a backup those that are kept.
    pub copied: u64,
    /// Bytes that are still to be copied or looked at, as far as is known; null: it goes on until it is ended.
    pub left: Option<u64>,
    /// For so long; null: that is not known.
    pub seconds: Option<u64>,
    /// Where to, or from where it is read.
    pub target: Option<String>,
    /// Why it has failed, or does not go on.
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
