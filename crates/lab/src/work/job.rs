//! A job of fio's as an experiment's parameters say it: on a device or in a file, in a guest and on
//! the host.

use std::path::Path;
use std::time::Duration;

use fathom_run::evidence::Bare;

use super::{Shape, fio_file, fio_on_host, fio_script, host_time};
use crate::error::Result;
use crate::words::words;
use crate::workload::Rw;

words! {
    /// How fio keeps several requests in flight.
    pub enum Engine {
        Libaio = "libaio",
        IoUring = "io_uring",
    }
}

/// Requests of one size and pattern, for a time. Its jobs are threads.
#[derive(Clone, Debug)]
pub struct FioJob {
    pub rw: Rw,
    pub bs: u64,
    pub threads: u32,
    /// Requests that each keeps in flight.
    pub depth: u32,
    /// Of no use with one in flight.
    pub engine: Engine,
    pub direct: bool,
    /// Flush after so many writes; 0: never.
    pub fsync: u32,
    /// Of the device or file, bytes of which each thread has a part of its own; all have all of it
    /// when not given.
    pub size: Option<u64>,
    pub runtime: Duration,
}

impl FioJob {
    /// `randread of 4096 bytes by 8 threads, each with 32 in flight`.
    pub fn label(&self) -> String {
        format!(
            "{} of {} bytes by {} threads with {} in flight each",
            self.rw, self.bs, self.threads, self.depth
        )
    }

    pub fn shape(&self) -> Shape {
        Shape {
            threads: self.threads,
            depth: self.depth,
        }
    }

    /// The job on a device or file in a guest.
    pub fn script(&self, file: &str) -> String {
        fio_script(&self.arguments(file, self.direct, self.runtime).join(" "))
    }

    /// The job on the host, past the page cache in any case: for a part of the time, since nothing
    /// of it can be in a cache.
    ///
    /// # Errors
    /// When fio fails.
    pub fn on_host(&self, file: &Path) -> Result<Bare> {
        let job = self.arguments(&fio_file(file), true, host_time(self.runtime));
        fio_on_host(&job, self.shape())
    }

    /// fio's arguments.
    pub fn arguments(&self, file: &str, direct: bool, runtime: Duration) -> Vec<String> {
        let engine = match self.depth {
            1 => "psync",
            _ => self.engine.name(),
        };
        let mut job = vec![
            "--name=lab".to_owned(),
            format!("--filename={file}"),
            format!("--rw={}", self.rw),
            format!("--bs={}", self.bs),
            format!("--direct={}", u8::from(direct)),
            format!("--ioengine={engine}"),
            format!("--iodepth={}", self.depth),
            format!("--numjobs={}", self.threads),
            format!("--runtime={}ms", runtime.as_millis()),
        ];
        if self.rw.is_read_only() {
            job.push("--readonly".into());
        }
        if let Some(size) = self.size {
            let part = size / u64::from(self.threads.max(1)) / self.bs * self.bs;
            job.push(format!("--size={part}"));
            job.push(format!("--offset_increment={part}"));
        }
        if self.fsync > 0 {
            job.push(format!("--fsync={}", self.fsync));
        }
        let same = [
            "--time_based",
            "--thread",
            "--norandommap",
            "--group_reporting",
            "--allow_file_create=0",
            "--output-format=json",
        ];
        job.extend(same.map(str::to_owned));
        job
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_does_the_same_job() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("a:b");
        crate::bed::image::fill(&path, 1 << 20).unwrap();
        let job = FioJob {
            rw: Rw::RandRead,
            bs: 4096,
            threads: 2,
            depth: 1,
            engine: Engine::Libaio,
            direct: true,
            fsync: 0,
            size: Some(1 << 20),
            runtime: Duration::from_secs(1),
        };
        let bare = job.on_host(&path).unwrap();
        assert!(
            bare.requests_per_second > 0.0 && bare.mean_ns > 0.0,
            "{bare:?}"
        );
    }
}
