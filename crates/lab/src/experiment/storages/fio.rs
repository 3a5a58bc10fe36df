//! The job as arguments of fio.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::bed::Program;
use crate::error::Result;
use crate::host;
use crate::work::{AROUND_FIO, Shape, fio_script};

/// Number of jobs. Each stands for the process of a VM with a disk of its own.
pub const JOBS: u32 = 4;
/// Requests that each job keeps in flight.
const DEPTH: u32 = 4;
pub const SHAPE: Shape = Shape {
    threads: JOBS,
    depth: DEPTH,
};
/// Minimum speed expected of a place, in bytes per second.
const SLOWEST: u64 = 256 << 10;

/// The job `virt` of the blog post.
#[derive(Clone, Debug)]
pub struct Virt {
    /// Bytes of each job's file or part of the disk.
    pub size: u64,
    /// Maximum time of the job, even if data remains.
    pub runtime: Option<Duration>,
    pub seed: u64,
}

/// Where fio reads and writes.
#[derive(Clone, Copy, Debug)]
pub enum On<'a> {
    /// Files in fio's working directory, named as by [`file`].
    Files,
    /// A part of this block device for each job.
    Device(&'a Path),
    /// A part of this export for each job.
    Export(&'a str),
}

/// Returns fio's name for a job's file.
pub fn file(job: u32) -> String {
    format!("virt.{job}.0")
}

impl Virt {
    /// Returns the bytes of all jobs together.
    pub fn bytes(&self) -> u64 {
        self.size.saturating_mul(JOBS.into())
    }

    pub fn timeout(&self) -> Duration {
        match self.runtime {
            Some(runtime) => runtime + AROUND_FIO,
            None => AROUND_FIO + Duration::from_secs(self.bytes() / SLOWEST),
        }
    }

    /// Returns fio's arguments. The jobs are threads, so that they can be identified as fio's.
    pub fn arguments(&self, on: On) -> Vec<String> {
        let mut args = common(on);
        if let On::Device(_) | On::Export(_) = on {
            args.push(format!("--offset_increment={}", self.size));
        }
        args.extend(["--rw=randrw", "--bs=64k", "--thread", "--group_reporting"].map(Into::into));
        args.push("--output-format=json".into());
        args.push(format!("--iodepth={DEPTH}"));
        args.push(format!("--numjobs={JOBS}"));
        args.push(format!("--size={}", self.size));
        args.push(format!("--randseed={}", self.seed));
        if let Some(runtime) = self.runtime {
            args.push(format!("--runtime={}ms", runtime.as_millis()));
        }
        args
    }

    /// Returns a guest's shell script that runs the job on a disk.
    pub fn script(&self, device: &str) -> String {
        fio_script(&self.arguments(On::Device(Path::new(device))).join(" "))
    }

    /// Prepares fio on this machine, in the directory `dir`.
    ///
    /// # Errors
    /// If fio is not installed.
    pub fn on_host<'a>(&self, on: On, dir: &'a Path) -> Result<Program<'a>> {
        fio(&self.arguments(on), dir, self.timeout())
    }

    /// Writes everything that the job will read: reads of unwritten blocks would measure nothing.
    ///
    /// # Errors
    /// If writing fails.
    pub fn fill(&self, on: On, dir: &Path) -> Result<()> {
        let mut args = common(on);
        args.extend(["--rw=write", "--bs=1M", "--iodepth=2", "--end_fsync=1"].map(Into::into));
        args.push(format!("--size={}", self.bytes()));
        let timeout = AROUND_FIO + Duration::from_secs(self.bytes() / SLOWEST);
        fio(&args, dir, timeout)?.run().map(drop)
    }
}

fn common(on: On) -> Vec<String> {
    let mut args = vec!["--name=virt".to_owned(), "--direct=1".to_owned()];
    let engine = match on {
        On::Files => "libaio",
        On::Device(path) => {
            // In fio's file names, `:` is a separator.
            let path = path.to_string_lossy().replace(':', "\\:");
            args.push(format!("--filename={path}"));
            "libaio"
        }
        On::Export(uri) => {
            args.push(format!("--uri={uri}"));
            "nbd"
        }
    };
    // fio accepts an engine's own options only after the engine's name.
    args.insert(1, format!("--ioengine={engine}"));
    args
}

fn fio<'a>(args: &[String], dir: &'a Path, timeout: Duration) -> Result<Program<'a>> {
    let mut command = Command::new(host::program("fio")?);
    command.args(args).current_dir(dir);
    Ok(Program {
        name: "fio",
        command,
        dir,
        timeout,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const VIRT: Virt = Virt {
        size: 1 << 30,
        runtime: None,
        seed: 7,
    };

    #[test]
    fn the_job_is_the_posts() {
        let files = VIRT.arguments(On::Files);
        for word in [
            "--name=virt",
            "--ioengine=libaio",
            "--iodepth=4",
            "--rw=randrw",
            "--bs=64k",
            "--direct=1",
            "--size=1073741824",
            "--numjobs=4",
            "--randseed=7",
        ] {
            assert!(files.iter().any(|arg| arg == word), "{word}: {files:?}");
        }
        let is_bounded = |args: &[String]| args.iter().any(|arg| arg.starts_with("--runtime"));
        assert!(!is_bounded(&files));
        let brief = Virt {
            runtime: Some(Duration::from_millis(1500)),
            ..VIRT
        };
        let args = brief.arguments(On::Files);
        assert!(args.contains(&"--runtime=1500ms".to_owned()), "{args:?}");
    }

    #[test]
    fn jobs_on_one_disk_have_a_part_each() {
        let path = Path::new("/dev/disk/pci-0000:00");
        for on in [On::Device(path), On::Export("nbd://host")] {
            let args = VIRT.arguments(on);
            let part = "--offset_increment=1073741824".to_owned();
            assert!(args.contains(&part), "{args:?}");
        }
        let args = VIRT.arguments(On::Device(path));
        assert!(args.contains(&"--filename=/dev/disk/pci-0000\\:00".to_owned()));
        let script = VIRT.script("/dev/vdb");
        assert!(script.contains(" --filename=/dev/vdb "), "{script}");
    }
}
