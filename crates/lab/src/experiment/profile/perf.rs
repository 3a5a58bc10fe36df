//! perf on the host and in a guest: it records from a start to a stop, and prints what it has recorded.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::fold;
use crate::error::{Context, Error, Result};
use crate::guest::Guest;
use crate::host;
use crate::process::Process;
use crate::words::words;

/// What perf says when it had more.
const FULL: &str = "size limit reached";
/// For perf to begin and to end.
const PATIENCE: Duration = Duration::from_secs(60);
/// For a guest to print what it recorded.
const PRINTING: Duration = Duration::from_secs(300);

words! {
    /// Whether a sample has its callers.
    pub enum CallGraph {
        /// By frame pointers.
        Fp = "fp",
        None = "none",
    }
}

/// How CPUs are sampled.
#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    /// Samples of each CPU in a second.
    pub frequency: u32,
    pub graph: CallGraph,
}

/// What perf is to record, of all CPUs.
#[derive(Clone, Debug)]
pub struct Recording {
    /// Of its files.
    pub name: &'static str,
    /// Of perf's command line: the events, and what is recorded with each.
    pub words: Vec<String>,
    /// What is printed of them.
    pub fields: &'static str,
    /// Of perf's data, in the host's files and in the guest's memory.
    pub most: [&'static str; 2],
}

impl Sampling {
    /// A clock is the event that every machine has, also one without counters; `GH` is: a CPU that
    /// runs a guest's instructions, too.
    pub fn recording(self) -> Recording {
        let mut words = vec![
            "--event=cpu-clock:GH".to_owned(),
            format!("-F{}", self.frequency),
        ];
        if self.graph == CallGraph::Fp {
            words.push("--call-graph=fp".into());
        }
        Recording {
            name: "samples",
            words,
            fields: fold::FIELDS,
            most: ["1G", "96M"],
        }
    }
}

impl Recording {
    fn record(&self, data: &str, most: &str) -> Vec<String> {
        let size = format!("--max-size={most}");
        let words = ["record", "--all-cpus", "--no-buildid", &size, "-o", data].map(str::to_owned);
        words
            .into_iter()
            .chain(self.words.iter().cloned())
            .collect()
    }

    /// perf's arguments to print what was recorded. Samples of guests are left out without a file
    /// that could say what their kernels are.
    fn print(&self, data: &str) -> [String; 8] {
        let guests = "--guestkallsyms=/dev/null";
        [
            "script",
            "--force",
            "--no-inline",
            guests,
            "-F",
            self.fields,
            "-i",
            data,
        ]
        .map(str::to_owned)
    }

    /// That perf has given up before the end.
    fn cut(&self, log: &str) -> Option<String> {
        log.contains(FULL).then(|| {
            let name = self.name;
            format!("there were too many {name}: of a shorter --runtime they would be complete")
        })
    }
}

/// Takes text in pieces.
pub type Sink<'a> = &'a mut dyn FnMut(&[u8]);

/// The host's perf while it records, or has.
#[derive(Debug)]
pub struct OnHost {
    recording: Recording,
    perf: Process,
    data: PathBuf,
}

impl OnHost {
    /// Begins to record.
    ///
    /// # Errors
    /// In a line with what to do, when this machine or user must not.
    pub fn start(dir: &Path, recording: &Recording) -> Result<OnHost> {
        let data = dir.join(recording.name);
        let mut command = Command::new(host::program("perf")?);
        command
            .args(recording.record(&data.to_string_lossy(), recording.most[0]))
            .stdout(Stdio::null());
        let perf = Process::spawn("perf record", command, &data.with_extension("log"))?;
        let recording = recording.clone();
        let mut this = OnHost {
            recording,
            perf,
            data,
        };
        let deadline = Instant::now() + PATIENCE;
        while std::fs::metadata(&this.data).map_or(0, |data| data.len()) == 0 {
            if this.perf.try_wait()?.is_some() || Instant::now() > deadline {
                return Err(refused(&this.perf.log()));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(this)
    }

    /// Ends.
    ///
    /// # Errors
    /// When it does not end in time.
    pub fn stop(mut self) -> Result<OnHost> {
        // It may have ended by itself: when it has recorded all that it may.
        if self.perf.try_wait()?.is_none() {
            self.perf.signal(Signal::INT)?;
        }
        self.perf.wait(PATIENCE)?;
        Ok(self)
    }

    /// Prints what was recorded; returns a line about what is missing.
    ///
    /// # Errors
    /// When perf has recorded nothing, or cannot read it again.
    pub fn print(self, sink: Sink) -> Result<Option<String>> {
        let mut command = Command::new(host::program("perf")?);
        command
            .args(self.recording.print(&self.data.to_string_lossy()))
            .env("DEBUGINFOD_URLS", "")
            .stdout(Stdio::piped());
        let log = self.data.with_extension("print.log");
        let mut perf = Process::spawn("perf script", command, &log)?;
        if let Some(mut text) = perf.take_stdout() {
            let mut chunk = vec![0; 64 << 10];
            while let n @ 1.. = text
                .read(&mut chunk)
                .context(|| "cannot read perf".into())?
            {
                sink(&chunk[..n]);
            }
        }
        if !perf.wait(PATIENCE)?.success() {
            return Err(refused(&perf.log()));
        }
        Ok(self.recording.cut(&self.perf.log()))
    }
}

/// A guest's perf while it records, or has.
#[derive(Debug)]
pub struct InGuest {
    recording: Recording,
    log: String,
}

impl InGuest {
    /// Begins to record. perf runs for as long as a program that it has started: one that reads from
    /// a pipe into which nobody writes.
    ///
    /// # Errors
    /// When the guest has no perf, or its kernel does not let it record.
    pub fn start(guest: &mut Guest, recording: &Recording) -> Result<InGuest> {
        let file = format!("/tmp/{}", recording.name);
        let record = recording.record(&file, recording.most[1]).join(" ");
        let script = format!(
            "set -e\nmkfifo {file}.hold\n\
             {{ perf {record} -- sh -c 'echo >{file}.began; exec cat {file}.hold' || :
                echo >{file}.ended; }} >{file}.log 2>&1 </dev/null &\n\
             until [ -e {file}.began ]; do\n\
             \t[ ! -e {file}.ended ] || {{ cat {file}.log; exit 1; }}\n\tsleep 0.1\ndone"
        );
        let output = guest.run(&script, PATIENCE)?;
        match output.status {
            0 => Ok(InGuest {
                recording: recording.clone(),
                log: String::new(),
            }),
            _ => Err(refused(&output.text)),
        }
    }

    /// Ends.
    ///
    /// # Errors
    /// When the guest does not answer.
    pub fn stop(mut self, guest: &mut Guest) -> Result<InGuest> {
        let file = format!("/tmp/{}", self.recording.name);
        let end = format!(
            "[ -e {file}.ended ] || : >{file}.hold\n\
             until [ -e {file}.ended ]; do sleep 0.1; done\ncat {file}.log"
        );
        self.log = guest.check(&end, PATIENCE)?;
        Ok(self)
    }

    /// Prints what was recorded; returns a line about what is missing.
    ///
    /// # Errors
    /// When the guest does not answer, or perf there cannot read what it has recorded.
    pub fn print(self, guest: &mut Guest, sink: Sink) -> Result<Option<String>> {
        let data = format!("/tmp/{}", self.recording.name);
        let text = format!("perf {}", self.recording.print(&data).join(" "));
        let output = guest.stream(&text, PRINTING, &mut |chunk| {
            sink(chunk);
            Ok(())
        })?;
        match output.status {
            0 => Ok(self.recording.cut(&self.log)),
            _ => Err(guest.agent().failed(&text, &output)),
        }
    }
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
    use super::super::fold::Folder;
    use super::super::frame::Modules;
    use super::*;
    use rustix::time::{ClockId, clock_gettime};

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
        fn spin_in_a_function_of_its_own(until: Instant) -> f64 {
            let mut turns = 0_u64;
            while Instant::now() < until {
                for _ in 0..10_000 {
                    turns = std::hint::black_box(turns + 1);
                }
            }
            let spent = clock_gettime(ClockId::ThreadCPUTime);
            spent.tv_sec as f64 + spent.tv_nsec as f64 / 1e9
        }
        let dir = tempfile::tempdir().unwrap();
        let sampling = Sampling {
            frequency: 499,
            graph: CallGraph::Fp,
        };
        let perf = OnHost::start(dir.path(), &sampling.recording())
            .unwrap_or_else(|error| panic!("this test samples the CPUs: {error}"));
        let until = Instant::now() + Duration::from_secs(1);
        let spin = move || spin_in_a_function_of_its_own(until);
        let thread = std::thread::Builder::new().name("busy one".into());
        let spent = thread.spawn(spin).unwrap().join().unwrap();
        let known = vec![(std::process::id(), "server: ")];
        let mut folder = Folder::new(known, Modules::of_host());
        let missing = perf.stop().unwrap().print(&mut |chunk| folder.push(chunk));
        assert_eq!(missing.unwrap(), None);
        let folded = folder.finish();
        let lines = folded.lines();
        let seen = lines.iter().filter(|line| {
            line.starts_with("server: busy one;") && line.contains("spin_in_a_function_of_its_own")
        });
        let seen: f64 = seen
            .map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap())
            .sum();
        let wanted = spent * f64::from(sampling.frequency);
        // A few come late, where others use the CPUs, too.
        let range = wanted * 0.5 - 5.0..wanted * 1.3 + 5.0;
        assert!(range.contains(&seen), "{seen}, not {wanted}: {lines:#?}");
    }
}
