//! A fio job from an experiment's parameters: on a device or in a file, in a guest and on the host.

use std::path::Path;
use std::time::Duration;

use fathom_run::evidence::Bare;

use super::{Shape, fio_file, fio_on_host, fio_script, host_time};
use crate::error::Result;
use crate::words::words;
use crate::workload::Rw;

words! {
    /// fio's I/O engine for several requests in flight.
    pub enum Engine {
        /// Linux AIO.
        Libaio = "libaio",
        /// Linux's io_uring.
        IoUring = "io_uring",
    }
}

/// Requests of one size and pattern for a limited time. fio's jobs run as threads.
#[derive(Clone, Debug)]
pub struct FioJob {
    /// Operation and pattern of the requests.
    pub rw: Rw,
    /// Size of a request in bytes.
    pub bs: u64,
    /// Number of threads.
    pub threads: u32,
    /// Number of requests that each thread keeps in flight.
    pub depth: u32,
    /// I/O engine; not used with one request in flight.
    pub engine: Engine,
    /// Whether the guest's job uses O_DIRECT.
    pub direct: bool,
    /// Number of writes after which fio flushes; 0 for never.
    pub fsync: u32,
    /// Size in bytes of the region of the device or file, of which each thread gets its own part.
    /// If `None`, every thread uses the whole device or file.
    pub size: Option<u64>,
    /// Duration of the job in a guest.
    pub runtime: Duration,
}

impl FioJob {
    /// Returns a label such as `randread of 4096 bytes by 8 threads with 32 in flight each`.
    pub fn label(&self) -> String {
        format!(
            "{} of {} bytes by {} threads with {} in flight each",
            self.rw, self.bs, self.threads, self.depth
        )
    }

    /// Returns the numbers of threads and of requests in flight.
    pub fn shape(&self) -> Shape {
        Shape {
            threads: self.threads,
            depth: self.depth,
        }
    }

    /// Returns the script for the job on a device or file in a guest.
    pub fn script(&self, file: &str) -> String {
        fio_script(&self.arguments(file, self.direct, self.runtime).join(" "))
    }

    /// Runs the job on the host, always with direct I/O. The run time is shorter, because no cache
    /// has to be filled.
    ///
    /// # Errors
    /// When fio fails.
    pub fn on_host(&self, file: &Path) -> Result<Bare> {
        let job = self.arguments(&fio_file(file), true, host_time(self.runtime));
        fio_on_host(&job, self.shape())
    }

    /// Returns fio's arguments.
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
