//! Jobs: the background operations on disks, as one list.

use crate::info::{BackupInfo, Info, MirrorInfo, PullInfo, StartingJob, StreamInfo};
use crate::job_id::{JobId, JobKind};
use fathom_control::{ErrorKind, RequestError};
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
    /// Identity of the job, for `/v1/jobs/{id}`: the disk, the kind, and a number that no other job
    /// has, separated by dots. A pull, which a disk has only once, has no number.
    #[serde(default)]
    pub id: String,
    /// Name of the disk.
    pub disk: String,
    /// Kind of the job:
    ///
    /// - `pull`: the disk moves from another server to this server.
    /// - `backup`: a backup.
    /// - `mirror`: a mirror, or a commit of the top image.
    /// - `stream`: a stream.
    /// - `commit`: a commit of images in the middle of the backing chain.
    pub kind: String,
    /// State of the job, in the same words for all kinds.
    #[serde(default)]
    pub state: JobState,
    /// Phase of the job: `starting` before it runs, then `keeping` or `failed` for a backup,
    /// otherwise `phase` of the pull, mirror or stream.
    pub phase: String,
    /// Number of bytes copied. For a backup: number of bytes in the scratch file.
    pub copied: u64,
    /// Number of bytes still to be copied or examined, as far as known. Null for a backup, which
    /// continues until it is ended.
    pub left: Option<u64>,
    /// Maximum number of bytes copied per second. Null if there is no limit, and for a backup,
    /// which is as fast as its client.
    #[serde(default)]
    pub speed: Option<u64>,
    /// Time since the job began, in seconds. Null for a pull.
    pub seconds: Option<u64>,
    /// Target of a mirror, new backing image of a stream, image that a commit writes to, or URI of
    /// a backup. Null for a pull, and for a stream without a new backing image.
    pub target: Option<String>,
    /// Why the job has failed or makes no progress. Null if it has no problem.
    pub problem: Option<String>,
}

/// State of a job:
///
/// - `starting`: its target or images are being opened. The job can be neither changed nor ended
///   yet.
/// - `running`: it makes progress, or a backup can be read.
/// - `waiting`: the virtual machine has released the disk. The job continues when the machine is
///   back.
/// - `ready`: the disk can be switched to the mirror's target, or the guest can migrate.
/// - `finishing`: it ends by itself, soon.
/// - `done`: it has succeeded.
/// - `failed`: it has ended without success.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    /// The job's target or images are being opened.
    Starting,
    /// The job makes progress, or the backup can be read.
    #[default]
    Running,
    /// The job waits until the virtual machine that has released the disk is back.
    Waiting,
    /// The disk can be switched to the mirror's target, or the guest can migrate.
    Ready,
    /// The job ends by itself, soon.
    Finishing,
    /// The job has succeeded.
    Done,
    /// The job has ended without success.
    Failed,
}

impl JobState {
    /// Returns the state for a phase of any kind of job.
    fn of(phase: &str) -> JobState {
        match phase {
            "starting" => JobState::Starting,
            "waiting" => JobState::Waiting,
            "ready" => JobState::Ready,
            "stopping" | "finishing" | "switching" | "arriving" => JobState::Finishing,
            "done" => JobState::Done,
            "failed" => JobState::Failed,
            _ => JobState::Running,
        }
    }
}

/// Returns the error for a job that does not exist.
pub fn unknown_job(id: &str) -> RequestError {
    let text = format!("no job '{id}', or it has been removed; 'fathom jobs --json' lists all");
    ErrorKind::Unknown.because(text)
}

impl Info {
    /// Returns the jobs of the disk.
    pub fn jobs(&self) -> Vec<JobInfo> {
        let disk = &self.name;
        let pull = self.pull.iter().map(|one| JobInfo::pull(disk, one));
        let jobs = pull.chain(self.backup.iter().map(|one| JobInfo::backup(disk, one)));
        let jobs = jobs.chain(self.mirror.iter().map(|one| JobInfo::mirror(disk, one)));
        let jobs = jobs.chain(self.stream.iter().map(|one| JobInfo::stream(disk, one)));
        let starting = self.starting.iter();
        jobs.chain(starting.map(|one| JobInfo::starting(disk, one)))
            .collect()
    }

    /// Returns the job of the disk with this identity.
    ///
    /// # Errors
    /// If the job does not exist.
    pub fn job(&self, id: &JobId) -> Result<JobInfo, RequestError> {
        let text = id.to_string();
        let found = self.jobs().into_iter().find(|job| job.id == text);
        found.ok_or_else(|| unknown_job(&text))
    }
}

impl JobInfo {
    /// Creates a job with these values and no others.
    fn new(disk: &str, kind: JobKind, number: &str, phase: &str) -> JobInfo {
        let id = JobId {
            disk: disk.to_owned(),
            kind,
            number: number.to_owned(),
        };
        JobInfo {
            id: id.to_string(),
            disk: disk.to_owned(),
            kind: kind.name().to_owned(),
            state: JobState::of(phase),
            phase: phase.to_owned(),
            copied: 0,
            left: None,
            speed: None,
            seconds: None,
            target: None,
            problem: None,
        }
    }

    fn starting(disk: &str, job: &StartingJob) -> JobInfo {
        JobInfo {
            speed: job.speed,
            target: job.target.clone(),
            ..JobInfo::new(disk, job.kind, &job.id, "starting")
        }
    }

    fn pull(disk: &str, pull: &PullInfo) -> JobInfo {
        JobInfo {
            speed: pull.speed,
            copied: pull.copied,
            left: Some(pull.left),
            problem: pull.problem.clone(),
            ..JobInfo::new(disk, JobKind::Pull, "", &pull.phase)
        }
    }

    /// Describes a backup of this disk.
    pub fn backup(disk: &str, backup: &BackupInfo) -> JobInfo {
        let phase = match backup.problem {
            None => "keeping",
            Some(_) => "failed",
        };
        JobInfo {
            copied: backup.kept,
            seconds: Some(backup.seconds),
            target: Some(backup.uri.clone()),
            problem: backup.problem.clone(),
            ..JobInfo::new(disk, JobKind::Backup, &backup.id, phase)
        }
    }

    /// Describes a mirror of this disk.
    pub fn mirror(disk: &str, mirror: &MirrorInfo) -> JobInfo {
        JobInfo {
            copied: mirror.copied,
            left: Some(mirror.left),
            speed: mirror.speed,
            seconds: Some(mirror.seconds),
            target: Some(mirror.target.clone()),
            problem: mirror.problem.clone(),
            ..JobInfo::new(disk, JobKind::Mirror, &mirror.id, &mirror.phase)
        }
    }

    /// Describes a stream of this disk, or a commit in the middle of its backing chain.
    pub fn stream(disk: &str, stream: &StreamInfo) -> JobInfo {
        let kind = match stream.top {
            None => JobKind::Stream,
            Some(_) => JobKind::Commit,
        };
        JobInfo {
            copied: stream.copied,
            left: Some(stream.left),
            speed: stream.speed,
            seconds: Some(stream.seconds),
            target: stream.base.clone(),
            problem: stream.problem.clone(),
            ..JobInfo::new(disk, kind, &stream.id, &stream.phase)
        }
    }
}
