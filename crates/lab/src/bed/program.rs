//! A program of this machine that does the work without a guest, observed like work in a guest.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::Seen;
use crate::error::{Context, Error, Result};
use crate::evidence::{Kind, Sampler, Watch, Watched};
use crate::process::{Process, tail_of};
use crate::work::Worked;

/// Maximum size of the work's output in bytes.
const MAX_OUTPUT: u64 = 16 << 20;

/// A program of this machine that does the work.
pub struct Program<'a> {
    pub name: &'a str,
    /// The command, whose standard output is parsed.
    pub command: Command,
    /// Folder for the output and the log.
    pub dir: &'a Path,
    pub timeout: Duration,
}

impl Program<'_> {
    /// Runs the program to its end and returns its output.
    ///
    /// # Errors
    /// When the program does not start, fails, or does not end in time; the error has its last
    /// messages.
    pub fn run(self) -> Result<String> {
        self.around(|process, timeout| process.wait(timeout).map(drop))
    }

    /// Like [`run`](Self::run), and samples the program and the block device meanwhile.
    ///
    /// # Errors
    /// Those of [`run`](Self::run), and when the output cannot be parsed.
    pub fn measure(
        self,
        device: Option<String>,
        parse: &dyn Fn(&str) -> Result<Worked>,
    ) -> Result<Seen> {
        let mut seen = Seen::default();
        let text = self.around(|process, timeout| {
            let sampler = Sampler::start(Watch {
                processes: vec![Watched::new(process.pid(), Kind::Load)],
                device,
                ..Watch::default()
            })?;
            let ended = process.wait(timeout);
            (seen.evidence, seen.series) = sampler.stop();
            ended.map(drop)
        })?;
        let worked = parse(&text)?;
        (seen.measures, seen.evidence.load) = (worked.measures, worked.load);
        Ok(seen)
    }

    /// Starts the program and calls `wait`, which must wait for its end.
    fn around(mut self, wait: impl FnOnce(&mut Process, Duration) -> Result<()>) -> Result<String> {
        let path = self.dir.join("out");
        let what = || format!("cannot create {}", path.display());
        self.command.stdout(File::create(&path).context(what)?);
        let mut process = Process::spawn(self.name, self.command, &self.dir.join("log"))?;
        wait(&mut process, self.timeout)?;
        let text = printed(&path)?;
        match process.try_wait()? {
            Some(status) if status.success() => Ok(text),
            status => Err(Error::Program {
                program: self.name.to_owned(),
                status: status.map_or_else(String::new, |status| status.to_string()),
                tail: tail_of(&format!("{text}\n{}", process.log())),
            }),
        }
    }
}

fn printed(path: &Path) -> Result<String> {
    let what = || format!("cannot read {}", path.display());
    let mut bytes = Vec::new();
    let file = fs::File::open(path).context(what)?;
    file.take(MAX_OUTPUT)
        .read_to_end(&mut bytes)
        .context(what)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_run::evidence::{Load, ThreadRole};

    fn job<'a>(script: &str, dir: &'a tempfile::TempDir) -> Program<'a> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Program {
            name: "sh",
            command,
            dir: dir.path(),
            timeout: Duration::from_secs(60),
        }
    }

    #[test]
    fn work_on_the_host_is_seen_as_the_load_that_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let spin = "i=0; while [ $i -lt 200000 ]; do i=$((i + 1)); done; echo 7";
        let parse = |text: &str| {
            let requests = text.trim().parse().unwrap();
            Ok(Worked {
                load: Load {
                    requests,
                    ..Load::default()
                },
                ..Worked::default()
            })
        };
        let seen = job(spin, &dir).measure(None, &parse).unwrap();
        assert_eq!(seen.evidence.load.requests, 7);
        let load = seen.evidence.threads.iter();
        let busy: f64 = { load.filter(|one| one.role == ThreadRole::Load) }
            .map(|one| one.cpu)
            .sum();
        assert!(busy > 0.0, "{:?}", seen.evidence);
    }

    #[test]
    fn work_that_fails_tells_all_that_it_said() {
        let dir = tempfile::tempdir().unwrap();
        let error = job("echo half; echo broken >&2; exit 3", &dir).run();
        let error = error.unwrap_err().to_string();
        for word in ["sh failed", "3", "half", "broken"] {
            assert!(error.contains(word), "{error}");
        }
        assert_eq!(job("echo done", &dir).run().unwrap(), "done\n");
    }
}
