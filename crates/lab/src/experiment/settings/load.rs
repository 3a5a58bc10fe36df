//! The load: fio, in the guest and on the host.

use std::path::Path;
use std::time::Duration;

use fathom_run::evidence::Bare;

use super::parameters::Engine;
use crate::error::{Error, Result};
use crate::experiment::Settings;
use crate::work::{Shape, fio_file, fio_on_host, fio_script, host_time};
use crate::workload::Rw;

pub(super) struct Load {
    pub rw: Rw,
    bs: u64,
    threads: u32,
    depth: u32,
    engine: Engine,
    direct: bool,
    fsync: u32,
    pub runtime: Duration,
}

impl Load {
    pub fn new(settings: &Settings) -> Result<Load> {
        let count = |name| Settings::needed(name, settings.count(name)?);
        Ok(Load {
            rw: settings.word("rw")?,
            bs: Settings::needed("bs", settings.size("bs")?)?,
            threads: count("threads")?,
            depth: count("iodepth")?,
            engine: settings.word("ioengine")?,
            direct: settings.is_on("direct"),
            fsync: count("fsync")?,
            runtime: Settings::needed("runtime", settings.time("runtime")?)?,
        })
    }

    pub fn check(&self) -> Result<()> {
        let bad = |what: String| Err(Error::Protocol(what));
        if !self.bs.is_multiple_of(SECTOR) {
            return bad(format!("--bs: {} is not a multiple of {SECTOR}", self.bs));
        }
        if self.fsync > 0 && self.rw.is_read_only() {
            return bad(format!("--fsync is for writes, not for --rw {}", self.rw));
        }
        Ok(())
    }

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

    /// The job on a device or file in the guest.
    pub fn script(&self, file: &str) -> String {
        fio_script(&self.job(file, self.direct, self.runtime).join(" "))
    }

    /// The job on the host, past the page cache in any case: for a part of the time, since nothing
    /// of it can be in a cache.
    pub fn on_host(&self, file: &Path) -> Result<Bare> {
        let job = self.job(&fio_file(file), true, host_time(self.runtime));
        fio_on_host(&job, self.shape())
    }

    fn job(&self, file: &str, direct: bool, runtime: Duration) -> Vec<String> {
        let engine = match self.depth {
            1 => "psync",
            _ => self.engine.name(),
        };
        let mut job = vec![
            "--name=settings".to_owned(),
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

const SECTOR: u64 = 512;

#[cfg(test)]
mod tests {
    use super::super::parameters::PARAMETERS;
    use super::*;

    fn load(settings: &[(&str, &str)]) -> Load {
        let defaults = Settings::defaults(PARAMETERS);
        let all = settings.iter();
        let all = all.fold(defaults, |all, (name, value)| all.with(name, value));
        Load::new(&all).unwrap()
    }

    #[test]
    fn a_job_is_what_was_asked_for() {
        let one = load(&[]).script("/dev/vda");
        for word in [
            "--filename=/dev/vda --rw=randread --bs=4096 --direct=1 --ioengine=psync",
            "--numjobs=1 --runtime=10000ms --readonly",
        ] {
            assert!(one.contains(word), "{word}: {one}");
        }
        let many = load(&[
            ("rw", "randwrite"),
            ("iodepth", "32"),
            ("ioengine", "io_uring"),
            ("fsync", "8"),
            ("direct", "off"),
        ]);
        many.check().unwrap();
        let many = many.script("/mnt/disk/file");
        for word in ["--direct=0 --ioengine=io_uring --iodepth=32", "--fsync=8"] {
            assert!(many.contains(word), "{word}: {many}");
        }
        assert!(!many.contains("--readonly"), "{many}");
    }

    #[test]
    fn what_is_no_load_is_said() {
        for (settings, words) in [
            (&[("fsync", "1")][..], "--fsync is for writes"),
            (&[("bs", "1000")], "multiple of 512"),
        ] {
            let error = load(settings).check().unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn the_host_does_the_same_job() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("a:b");
        crate::bed::image::fill(&path, 1 << 20).unwrap();
        let bare = load(&[("runtime", "1s"), ("threads", "2")])
            .on_host(&path)
            .unwrap();
        assert!(
            bare.requests_per_second > 0.0 && bare.mean_ns > 0.0,
            "{bare:?}"
        );
    }
}
