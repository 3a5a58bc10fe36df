//! Kinds and identities of jobs.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use utoipa::ToSchema;

/// Kind of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum JobKind {
    /// Move of a disk from another server to this server.
    Pull,
    /// Backup of a disk.
    Backup,
    /// Mirror of a disk, or commit of the top image.
    Mirror,
    /// Copy of data from backing images into the top image.
    Stream,
    /// Commit of images in the middle of the backing chain.
    Commit,
}

impl JobKind {
    const ALL: [JobKind; 5] = [
        JobKind::Pull,
        JobKind::Backup,
        JobKind::Mirror,
        JobKind::Stream,
        JobKind::Commit,
    ];

    /// Returns the kind as it stands in identities of jobs.
    pub fn name(self) -> &'static str {
        match self {
            JobKind::Pull => "pull",
            JobKind::Backup => "backup",
            JobKind::Mirror => "mirror",
            JobKind::Stream => "stream",
            JobKind::Commit => "commit",
        }
    }
}

/// Identity of a job, as text `DISK.KIND.NUMBER`, or `DISK.pull`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobId {
    /// Name of the disk.
    pub disk: String,
    /// Kind of the job.
    pub kind: JobKind,
    /// Identity that no other job has; empty for a pull.
    pub number: String,
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (disk, kind) = (&self.disk, self.kind.name());
        match self.kind {
            JobKind::Pull => write!(f, "{disk}.{kind}"),
            _ => write!(f, "{disk}.{kind}.{}", self.number),
        }
    }
}

impl FromStr for JobId {
    type Err = ();

    fn from_str(text: &str) -> Result<JobId, ()> {
        let (front, number) = match text.strip_suffix(".pull") {
            Some(_) => (text, ""),
            None => text.rsplit_once('.').ok_or(())?,
        };
        // A disk's name may contain dots, too.
        let (disk, kind) = front.rsplit_once('.').ok_or(())?;
        let kind = JobKind::ALL.into_iter().find(|one| one.name() == kind);
        Ok(JobId {
            disk: disk.to_owned(),
            kind: kind.ok_or(())?,
            number: number.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_of_a_job_is_read_as_it_is_written() {
        for (text, disk, kind) in [
            ("vm1.mirror.3f", "vm1", JobKind::Mirror),
            ("a.stream.b.commit.3f", "a.stream.b", JobKind::Commit),
            ("vm1.pull", "vm1", JobKind::Pull),
            ("vm1.backup.9.pull", "vm1.backup.9", JobKind::Pull),
        ] {
            let id: JobId = text.parse().unwrap();
            assert_eq!((&*id.disk, id.kind), (disk, kind));
            assert_eq!(id.to_string(), text);
        }
        for text in ["", "vm1", "mirror", "vm1.mirror", "vm1.other.3f", ".."] {
            assert_eq!(text.parse::<JobId>(), Err(()), "{text}");
        }
    }
}
