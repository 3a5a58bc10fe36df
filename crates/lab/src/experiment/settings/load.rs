//! The load of fio, in the guest and on the host.

use crate::error::{Error, Result};
use crate::experiment::Settings;
use crate::work::FioJob;

pub(super) fn read(settings: &Settings) -> Result<FioJob> {
    let count = |name| Settings::needed(name, settings.count(name)?);
    Ok(FioJob {
        rw: settings.word("rw")?,
        bs: Settings::needed("bs", settings.size("bs")?)?,
        threads: count("threads")?,
        depth: count("iodepth")?,
        engine: settings.word("ioengine")?,
        direct: settings.is_on("direct"),
        fsync: count("fsync")?,
        size: None,
        runtime: Settings::needed("runtime", settings.time("runtime")?)?,
    })
}

pub(super) fn check(load: &FioJob) -> Result<()> {
    let bad = |what: String| Err(Error::Protocol(what));
    if !load.bs.is_multiple_of(SECTOR) {
        return bad(format!("--bs: {} is not a multiple of {SECTOR}", load.bs));
    }
    if load.fsync > 0 && load.rw.is_read_only() {
        return bad(format!("--fsync is for writes, not for --rw {}", load.rw));
    }
    Ok(())
}

const SECTOR: u64 = 512;

#[cfg(test)]
mod tests {
    use super::super::parameters::PARAMETERS;
    use super::*;

    fn load(settings: &[(&str, &str)]) -> FioJob {
        let defaults = Settings::defaults(PARAMETERS);
        let all = settings.iter();
        let all = all.fold(defaults, |all, (name, value)| all.with(name, value));
        read(&all).unwrap()
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
        check(&many).unwrap();
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
            let error = check(&load(settings)).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
