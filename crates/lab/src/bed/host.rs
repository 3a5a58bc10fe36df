//! This machine itself, without a guest: what the same work comes to there.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::{Job, Seen};
use crate::error::{Context, Error, Result};
use crate::evidence::{self, Sampler, Watch};
use crate::host;
use crate::process::{Process, tail_of};
use crate::scratch::Scratch;
use crate::work::Worked;

/// A directory of this machine's own, on the file system that has the images.
#[derive(Debug)]
pub struct HostBed {
    dir: Scratch,
}

impl HostBed {
    /// Makes the directory.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn new() -> Result<HostBed> {
        let dir = Scratch::on_disk()?;
        Ok(HostBed { dir })
    }

    /// Where scripts run, and may leave what they like.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Runs a script by the shell that guests have, each command of which must succeed, and returns
    /// what it printed.
    ///
    /// # Errors
    /// When it fails, or does not end in time.
    pub fn check(&self, script: &str, timeout: Duration) -> Result<String> {
        const NAME: &str = "a script on this machine";
        let output = self.file("script.out");
        let what = || format!("cannot create {}", output.display());
        let mut command = Command::new(host::program("busybox")?);
        command.args(["sh", "-c", &format!("set -e\n{script}")]);
        command.current_dir(self.dir());
        command.stdout(File::create(&output).context(what)?);
        let mut shell = Process::spawn(NAME, command, &self.file("script.log"))?;
        let status = shell.wait(timeout)?;
        let bytes = fs::read(&output).context(|| format!("cannot read {}", output.display()))?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if status.success() {
            return Ok(text);
        }
        Err(Error::Program {
            program: NAME.into(),
            status: status.to_string(),
            tail: tail_of(&format!("{text}\n{}", shell.log())),
        })
    }

    /// Runs a load here and looks at this machine and at the device below the directory meanwhile.
    ///
    /// # Errors
    /// When the script fails, or prints what cannot be parsed.
    pub fn measure(&self, job: &Job) -> Result<Seen> {
        let sampler = Sampler::start(Watch {
            // None where it is not known: a file of a network's, say.
            device: evidence::device_below(&self.file("script.out")).unwrap_or_default(),
            ..Watch::default()
        })?;
        let printed = self.check(job.script, job.timeout);
        let (mut evidence, series) = sampler.stop();
        let Worked { measures, load } = (job.parse)(&printed?)?;
        evidence.load = load;
        Ok(Seen {
            measures,
            series,
            evidence,
        })
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir().join(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_run_in_its_directory_and_their_failures_are_told() {
        let bed = HostBed::new().unwrap();
        let minute = Duration::from_secs(60);
        let script = "echo text >file; cat file; pwd";
        let said = bed.check(script, minute).unwrap();
        assert_eq!(said, format!("text\n{}\n", bed.dir().display()));
        let failed = bed.check("echo first; false; echo last", minute);
        let error = failed.unwrap_err().to_string();
        assert!(
            error.contains("first") && !error.contains("last"),
            "{error}"
        );
        let late = bed.check("sleep 60", Duration::from_millis(50));
        assert!(late.unwrap_err().to_string().contains("to end"));
    }

    #[test]
    fn a_load_is_measured_with_this_machines_processors() {
        let bed = HostBed::new().unwrap();
        let parse = |text: &str| {
            assert_eq!(text, "done\n");
            Ok(Worked::default())
        };
        let job = Job {
            script: "i=0; while [ $i -lt 200000 ]; do i=$((i + 1)); done; echo done",
            timeout: Duration::from_secs(60),
            parse: &parse,
        };
        let seen = bed.measure(&job).unwrap();
        let host = seen.evidence.host.unwrap();
        assert!(host.busy.iter().sum::<f64>() > 0.0, "{host:?}");
        assert_eq!(seen.evidence.guest, None);
    }
}
