//! Runs perf on the host and in a guest: records between start and stop, then prints the recording.

mod text;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, setpriority_process};

use crate::error::{Context, Error, Result};
use crate::guest::Guest;
use crate::host;
use crate::process::Process;

pub use text::{Head, Modules, Text};

/// Text of perf's log when the data has reached its size limit.
const FULL: &str = "size limit reached";
/// Text of perf's log when perf was too slow to take all events from the kernel.
const LOST: &str = " and lost ";
/// Size of the kernel's buffer per CPU of the host. The buffer holds the events of a busy machine
/// until perf gets a CPU.
const BUFFER: &str = "8M";
/// Nice value of the host's perf: above all ordinary processes.
const NICE: i32 = -20;
/// Program that perf starts when it records. The program creates a file as a signal, and ends when
/// perf ends.
const UNTIL_ITS_END: &str = r#": >"$0"; while kill -0 $PPID; do sleep 1; done"#;
/// Timeout for perf to start and to stop.
const PATIENCE: Duration = Duration::from_secs(60);
/// Timeout for a guest to print its recording.
const PRINTING: Duration = Duration::from_secs(300);

/// Specification of a recording of all CPUs.
#[derive(Clone, Debug)]
pub struct Recording {
    /// Base name of its files.
    pub name: &'static str,
    /// Words for perf's command line: the events, and the data that are recorded with each.
    pub words: Vec<String>,
    /// Fields that perf prints of each event.
    pub fields: &'static str,
    /// Whether the output also shows which process has started which.
    pub with_tasks: bool,
    /// Maximum sizes of perf's data: in the host's files, and in the guest's memory.
    pub most: [&'static str; 2],
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

    /// Returns perf's arguments to print the recording. An empty symbol file makes perf skip
    /// samples of guests.
    fn print(&self, data: &str) -> Vec<String> {
        let guests = "--guestkallsyms=/dev/null";
        let mut words = vec!["script", "--force", "--no-inline", guests];
        words.extend(self.with_tasks.then_some("--show-task-events"));
        words.extend(["-F", self.fields, "-i", data]);
        words.into_iter().map(str::to_owned).collect()
    }

    /// Returns a line about missing events, if perf's logs report any.
    fn missing(&self, log: &str) -> Option<String> {
        let name = self.name;
        if log.contains(FULL) {
            let text =
                "there were too many events: with a shorter --runtime they would be complete";
            return Some(format!("{name}: {text}"));
        }
        log.contains(LOST).then(|| {
            format!(
                "{name}: perf lost events, because this machine is too busy: counts are too low"
            )
        })
    }
}

/// Receives text in chunks.
pub type Sink<'a> = &'a mut dyn FnMut(&[u8]);

/// The host's perf, while it records or after it has stopped.
#[derive(Debug)]
pub struct OnHost {
    recording: Recording,
    perf: Process,
    data: PathBuf,
}

impl OnHost {
    /// Starts to record.
    ///
    /// # Errors
    /// A line with the remedy, when perf cannot record on this machine or for this user.
    pub fn start(dir: &Path, recording: &Recording) -> Result<OnHost> {
        let data = dir.join(recording.name);
        let began = data.with_extension("began");
        let mut command = Command::new(host::program("perf")?);
        command
            .args(recording.record(&data.to_string_lossy(), recording.most[0]))
            .arg(format!("--mmap-pages={BUFFER}"))
            .args(["--", "sh", "-c", UNTIL_ITS_END])
            .arg(&began)
            .stdout(Stdio::null());
        let perf = Process::spawn("perf record", command, &data.with_extension("log"))?;
        if let Ok(pid) = i32::try_from(perf.pid()) {
            // Only root may raise the priority. Without it, perf may lose events on a busy machine,
            // and reports the loss.
            let _ = setpriority_process(Pid::from_raw(pid), NICE);
        }
        let recording = recording.clone();
        let mut this = OnHost {
            recording,
            perf,
            data,
        };
        let deadline = Instant::now() + PATIENCE;
        while !began.exists() {
            if this.perf.try_wait()?.is_some() || Instant::now() > deadline {
                return Err(refused(&this.perf.log()));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(this)
    }

    /// Stops recording.
    ///
    /// # Errors
    /// When perf does not stop in time.
    pub fn stop(mut self) -> Result<OnHost> {
        // perf exits by itself when its data have reached the size limit.
        if self.perf.try_wait()?.is_none() {
            self.perf.signal(Signal::INT)?;
        }
        self.perf.wait(PATIENCE)?;
        Ok(self)
    }

    /// Prints the recording to `sink`. Returns a line about missing events, if there are any.
    ///
    /// # Errors
    /// When perf has recorded nothing, or cannot read the recording.
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
        let logs = self.perf.log() + &perf.log();
        Ok(self.recording.missing(&logs))
    }
}

/// A guest's perf, while it records or after it has stopped.
#[derive(Debug)]
pub struct InGuest {
    recording: Recording,
    log: String,
}

impl InGuest {
    /// Starts to record. perf runs until its child program ends. The child reads from a pipe until
    /// [`stop`](Self::stop) closes the pipe.
    ///
    /// # Errors
    /// When the guest has no perf, or its kernel does not allow it to record.
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

    /// Stops recording.
    ///
    /// # Errors
    /// When the guest does not respond.
    pub fn stop(mut self, guest: &mut Guest) -> Result<InGuest> {
        let file = format!("/tmp/{}", self.recording.name);
        let end = format!(
            "[ -e {file}.ended ] || : >{file}.hold\n\
             until [ -e {file}.ended ]; do sleep 0.1; done\ncat {file}.log"
        );
        self.log = guest.check(&end, PATIENCE)?;
        Ok(self)
    }

    /// Prints the recording to `sink`. Returns a line about missing events, if there are any.
    ///
    /// # Errors
    /// When the guest does not respond, or perf there cannot read the recording.
    pub fn print(self, guest: &mut Guest, sink: Sink) -> Result<Option<String>> {
        let data = format!("/tmp/{}", self.recording.name);
        let text = format!("perf {}", self.recording.print(&data).join(" "));
        let output = guest.stream(&text, PRINTING, &mut |chunk| {
            sink(chunk);
            Ok(())
        })?;
        match output.status {
            0 => Ok(self.recording.missing(&self.log)),
            _ => Err(guest.agent().failed(&text, &output)),
        }
    }
}

/// Returns the error of a perf that does not run: perf's own message, and the remedy.
fn refused(log: &str) -> Error {
    let is_said = |line: &&str| !matches!(line.trim(), "" | "Error:");
    // perf continues after such a warning.
    let is_error = |line: &&str| is_said(line) && !line.trim_end().ends_with("Ignoring.");
    let line = { log.lines().find(is_error) }
        .or_else(|| log.lines().find(is_said))
        .unwrap_or("perf ended without a message");
    let line: String = line
        .trim()
        .chars()
        .filter(|c| !c.is_control())
        .take(200)
        .collect();
    Error::Protocol(format!(
        "perf does not record: {line} (it needs root, or kernel.perf_event_paranoid=-1 and \
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
        assert!(refused("").to_string().contains("without a message"));
        let log = "'trace' not valid for hardware events. Ignoring.\ncannot write: disk full\n";
        assert!(refused(log).to_string().contains("disk full"));
    }

    #[test]
    fn lost_events_are_reported() {
        let recording = Recording {
            name: "path",
            words: Vec::new(),
            fields: "",
            with_tasks: false,
            most: ["1G", "64M"],
        };
        let log = "[ perf record: Captured and wrote 3.1 MB path ]\n";
        assert_eq!(recording.missing(log), None);
        let lost =
            "Warning:\nProcessed 12345 events and lost 3 chunks!\n\nCheck IO/CPU overload!\n";
        assert!(
            recording
                .missing(&format!("{log}{lost}"))
                .unwrap()
                .contains("lost events")
        );
        let full = "[ perf record: perf size limit reached (1024 MB), stopping session ]\n";
        assert!(recording.missing(full).unwrap().contains("too many"));
    }
}
