//! The job, in fio's words.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::bed::Program;
use crate::error::Result;
use crate::host;
use crate::work::{AROUND_FIO, Shape, fio_script};

/// Processes of VMs, each with a disk of its own.
pub const JOBS: u32 = 4;
/// Requests that each keeps in flight.
const DEPTH: u32 = 4;
pub const SHAPE: Shape = Shape {
    threads: JOBS,
    depth: DEPTH,
};
/// What a place is expected to do at least, of reads or writes.
const SLOWEST: u64 = 256 << 10;

/// The job `virt` of the post.
#[derive(Clone, Debug)]
pub struct Virt {
    /// Of each job's file, or part of the disk.
    pub size: u64,
    /// Its end, however much is left.
    pub runtime: Option<Duration>,
    pub seed: u64,
}

/// Where fio is to read and write.
#[derive(Clone, Copy, Debug)]
pub enum On<'a> {
    /// Files of [`file`]'s names in the directory where it runs.
    Files,
    /// A part of this block device for each job.
    Device(&'a Path),
    /// A part of this export for each job.
    Export(&'a str),
}

/// The name that fio gives to a job's file.
pub fn file(job: u32) -> String {
    format!("virt.{job}.0")
}

impl Virt {
    /// Of all jobs together.
    pub fn bytes(&self) -> u64 {
        self.size.saturating_mul(JOBS.into())
    }

    pub fn timeout(&self) -> Duration {
        match self.runtime {
            Some(runtime) => runtime + AROUND_FIO,
            None => AROUND_FIO + Duration::from_secs(self.bytes() / SLOWEST),
        }
    }

    /// fio's arguments. Jobs are threads, so that they can be seen as fio's.
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

    /// For a guest's shell: the same on a disk of its own.
    pub fn script(&self, device: &str) -> String {
        fio_script(&self.arguments(On::Device(Path::new(device))).join(" "))
    }

    /// fio on this machine, in the directory.
    ///
    /// # Errors
    /// When there is no fio.
    pub fn on_host<'a>(&self, on: On, dir: &'a Path) -> Result<Program<'a>> {
        fio(&self.arguments(on), dir, self.timeout())
    }

    /// Writes all that the job will read: reading what was never written measures nothing.
    ///
    /// # Errors
    /// When it cannot be written.
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
            // It takes `:` between names.
            let path = path.to_string_lossy().replace(':', "\\:");
            args.push(format!("--filename={path}"));
            "libaio"
        }
        On::Export(uri) => {
            args.push(format!("--uri={uri}"));
            "nbd"
        }
    };
    // An engine's own options are known only behind its name.
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
