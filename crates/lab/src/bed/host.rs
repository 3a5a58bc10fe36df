//! This machine without a guest, as the reference for the same work.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::{Job, Program, Seen};
use crate::error::Result;
use crate::evidence;
use crate::host;
use crate::scratch::Scratch;

/// A directory of this machine, on the file system that has the images.
#[derive(Debug)]
pub struct HostBed {
    dir: Scratch,
}

impl HostBed {
    /// Creates the directory.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn new() -> Result<HostBed> {
        let dir = Scratch::on_disk()?;
        Ok(HostBed { dir })
    }

    /// Returns the directory in which scripts run and may leave files.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Runs a script in the shell that guests have, and returns its output. Each command of the
    /// script must succeed.
    ///
    /// # Errors
    /// When the script fails, or does not end in time.
    pub fn check(&self, script: &str, timeout: Duration) -> Result<String> {
        self.shell(script, timeout)?.run()
    }

    /// Runs a load and meanwhile samples this machine and the device below the directory.
    ///
    /// # Errors
    /// When the script fails, or its output cannot be parsed.
    pub fn measure(&self, job: &Job) -> Result<Seen> {
        // `None` if the device is unknown, for example for a file on a network file system.
        let probe = tempfile::NamedTempFile::new_in(self.dir()).ok();
        let device = probe.and_then(|file| evidence::device_below(file.path()).ok()?);
        self.shell(job.script, job.timeout)?
            .measure(device, job.parse)
    }

    fn shell(&self, script: &str, timeout: Duration) -> Result<Program<'_>> {
        let mut command = Command::new(host::program("busybox")?);
        command.args(["sh", "-c", &format!("set -e\n{script}")]);
        command.current_dir(self.dir());
        Ok(Program {
            name: "a script on this machine",
            command,
            dir: self.dir(),
            timeout,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::Worked;

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
