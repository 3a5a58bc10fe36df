//! perf on the host and in a guest: CPUs are sampled from a start to a stop, and the samples folded.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

use fathom_run::Folded;
use rustix::process::Signal;

use super::fold::{FIELDS, Folder, Known};
use crate::error::{Context, Error, Result};
use crate::guest::Guest;
use crate::host;
use crate::process::Process;

/// Of what perf records, in the host's files and in the guest's memory.
const MOST_ON_HOST: &str = "1G";
const MOST_IN_GUEST: &str = "96M";
/// What perf says when it had more.
const FULL: &str = "size limit reached";
/// For perf to begin and to end.
const PATIENCE: Duration = Duration::from_secs(60);
/// For a guest to print what it recorded.
const PRINTING: Duration = Duration::from_secs(300);

/// Whether a sample has its callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallGraph {
    /// By frame pointers.
    Fp,
    None,
}

impl FromStr for CallGraph {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<CallGraph, String> {
        match text {
            "fp" => Ok(CallGraph::Fp),
            "none" => Ok(CallGraph::None),
            _ => Err(format!("'{text}' is neither fp nor none")),
        }
    }
}

/// How CPUs are sampled.
#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    /// Samples of each CPU in a second.
    pub frequency: u32,
    pub graph: CallGraph,
}

impl Sampling {
    /// perf's arguments. A clock is the event that every machine has, also one without counters;
    /// `GH` is: a CPU that runs a guest's instructions, too.
    fn record(self, data: &str, most: &str) -> Vec<String> {
        let frequency = self.frequency.to_string();
        let mut words = vec![
            "record",
            "--all-cpus",
            "--event=cpu-clock:GH",
            "-F",
            &frequency,
        ];
        if self.graph == CallGraph::Fp {
            words.push("--call-graph=fp");
        }
        let size = format!("--max-size={most}");
        words.extend(["--no-buildid", &size, "-o", data]);
        words.into_iter().map(str::to_owned).collect()
    }
}

/// perf's arguments to print what was recorded. Samples of guests are left out without a file that
/// could say what their kernels are.
fn script(data: &str) -> [String; 8] {
    [
        "script",
        "--force",
        "--no-inline",
        "--guestkallsyms=/dev/null",
        "-F",
        FIELDS,
        "-i",
        data,
    ]
    .map(str::to_owned)
}

/// Stacks, and a line about what is missing of them.
pub type Profile = (Folded, Option<String>);

/// The host's perf while it records.
#[derive(Debug)]
pub struct OnHost {
    perf: Process,
    data: PathBuf,
}

impl OnHost {
    /// Begins to sample all CPUs.
    ///
    /// # Errors
    /// In a line with what to do, when this machine or user must not sample.
    pub fn start(dir: &Path, sampling: Sampling) -> Result<OnHost> {
        let data = dir.join("host.perf");
        let mut command = Command::new(host::program("perf")?);
        command
            .args(sampling.record(&data.to_string_lossy(), MOST_ON_HOST))
            .stdout(Stdio::null());
        let perf = Process::spawn("perf record", command, &dir.join("perf.log"))?;
        let mut recording = OnHost { perf, data };
        let deadline = Instant::now() + PATIENCE;
        while std::fs::metadata(&recording.data).map_or(0, |data| data.len()) == 0 {
            if recording.perf.try_wait()?.is_some() || Instant::now() > deadline {
                return Err(refused(&recording.perf.log()));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(recording)
    }

    /// Ends.
    ///
    /// # Errors
    /// When it does not end in time.
    pub fn stop(mut self) -> Result<Recorded> {
        // It may have ended by itself: when it has recorded all that it may.
        if self.perf.try_wait()?.is_none() {
            self.perf.signal(Signal::INT)?;
        }
        self.perf.wait(PATIENCE)?;
        Ok(Recorded {
            data: self.data,
            log: self.perf.log(),
        })
    }
}

/// What the host's perf has recorded.
#[derive(Debug)]
pub struct Recorded {
    data: PathBuf,
    log: String,
}

impl Recorded {
    /// Folds it; some processes' threads have a word before their names.
    ///
    /// # Errors
    /// When perf has recorded nothing, or cannot read it again.
    pub fn fold(self, known: Vec<Known>) -> Result<Profile> {
        let mut command = Command::new(host::program("perf")?);
        command
            .args(script(&self.data.to_string_lossy()))
            .env("DEBUGINFOD_URLS", "")
            .stdout(Stdio::piped());
        let mut perf = Process::spawn("perf script", command, &self.data.with_extension("log"))?;
        let mut folder = Folder::new(known);
        if let Some(mut text) = perf.take_stdout() {
            let mut chunk = vec![0; 64 << 10];
            while let n @ 1.. = text
                .read(&mut chunk)
                .context(|| "cannot read perf".into())?
            {
                folder.push(&chunk[..n]);
            }
        }
        if !perf.wait(PATIENCE)?.success() {
            return Err(refused(&perf.log()));
        }
        Ok((folder.finish(), cut(&self.log, "host")))
    }
}

/// Begins to sample a guest's CPUs. perf runs for as long as a program that it has started: one that
/// reads from a pipe into which nobody writes.
///
/// # Errors
/// When the guest has no perf, or its kernel does not let it sample.
pub fn start_in_guest(guest: &mut Guest, sampling: Sampling) -> Result<()> {
    let record = sampling.record("/tmp/guest.perf", MOST_IN_GUEST).join(" ");
    let script = format!(
        "mkfifo /tmp/perf.hold\n\
         {{ perf {record} -- sh -c 'echo >/tmp/perf.began; exec cat /tmp/perf.hold' || :
            echo >/tmp/perf.ended; }} >/tmp/perf.log 2>&1 </dev/null &\n\
         until [ -e /tmp/perf.began ]; do\n\
         \t[ ! -e /tmp/perf.ended ] || {{ cat /tmp/perf.log; exit 1; }}\n\tsleep 0.1\ndone"
    );
    let output = guest.run(&format!("set -e\n{script}"), PATIENCE)?;
    match output.status {
        0 => Ok(()),
        _ => Err(refused(&output.text)),
    }
}

/// Ends; returns what perf said.
///
/// # Errors
/// When the guest does not answer.
pub fn stop_in_guest(guest: &mut Guest) -> Result<String> {
    let end = "[ -e /tmp/perf.ended ] || : >/tmp/perf.hold\n\
               until [ -e /tmp/perf.ended ]; do sleep 0.1; done\ncat /tmp/perf.log";
    guest.check(end, PATIENCE)
}

/// Folds what the guest's perf has recorded.
///
/// # Errors
/// When the guest does not answer, or perf there cannot read what it has recorded.
pub fn fold_in_guest(guest: &mut Guest, log: &str) -> Result<Profile> {
    let mut folder = Folder::default();
    let text = format!("perf {}", script("/tmp/guest.perf").join(" "));
    let output = guest.stream(&text, PRINTING, &mut |chunk| {
        folder.push(chunk);
        Ok(())
    })?;
    if output.status != 0 {
        return Err(guest.failed(&text, &output));
    }
    Ok((folder.finish(), cut(log, "guest")))
}

/// That perf has given up before the end.
fn cut(log: &str, side: &str) -> Option<String> {
    log.contains(FULL).then(|| {
        format!(
            "the {side}'s samples were too many: a lower --frequency or --runtime has all of them"
        )
    })
}

/// Why perf does not run, in its own words, and what to do.
fn refused(log: &str) -> Error {
    let is_said = |line: &&str| !matches!(line.trim(), "" | "Error:");
    let line = log
        .lines()
        .find(is_said)
        .unwrap_or("it ended without a word");
    let line: String = line
        .trim()
        .chars()
        .filter(|c| !c.is_control())
        .take(200)
        .collect();
    Error::Protocol(format!(
        "perf does not sample the CPUs: {line} (it needs root, or kernel.perf_event_paranoid=-1 and \
         kernel.kptr_restrict=0)"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_one_line_with_what_to_do() {
        let log = "Error:\nAccess to performance monitoring and observability operations is limited.\n\
                   Consider adjusting /proc/sys/kernel/perf_event_paranoid setting to open\n";
        let said = refused(log).to_string();
        assert_eq!(said.lines().count(), 1);
        assert!(
            said.contains("operations is limited. (it needs root"),
            "{said}"
        );
        assert!(refused("").to_string().contains("without a word"));
    }

    /// The oracle is what a thread of this program does.
    #[test]
    fn a_busy_thread_is_seen_with_its_name_and_function() {
        #[inline(never)]
        fn spin_in_a_function_of_its_own(until: Instant) -> u64 {
            let mut turns = 0;
            while Instant::now() < until {
                for _ in 0..10_000 {
                    turns = std::hint::black_box(turns + 1);
                }
            }
            turns
        }
        let dir = tempfile::tempdir().unwrap();
        let sampling = Sampling {
            frequency: 499,
            graph: CallGraph::Fp,
        };
        let recording = OnHost::start(dir.path(), sampling)
            .unwrap_or_else(|error| panic!("this test samples the CPUs: {error}"));
        let until = Instant::now() + Duration::from_secs(1);
        let spin = move || spin_in_a_function_of_its_own(until);
        let thread = std::thread::Builder::new().name("busy one".into());
        thread.spawn(spin).unwrap().join().unwrap();
        let (folded, _) = recording
            .stop()
            .unwrap()
            .fold(vec![(std::process::id(), "server: ")])
            .unwrap();
        let lines = folded.lines();
        let seen = lines.iter().filter(|line| {
            line.starts_with("server: busy one;") && line.contains("spin_in_a_function_of_its_own")
        });
        let seen: u64 = seen
            .map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap())
            .sum();
        // Of 499, on a machine that may be busy with other work.
        assert!((50..=600).contains(&seen), "{seen}: {lines:#?}");
    }
}
