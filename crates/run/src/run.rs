//! `run.json`: everything about a run but its events.

use std::fmt::Display;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::cell::Experiment;
use crate::clocks::{Clock, Clocks};
use crate::error::{Error, Result};
use crate::open::{MAX_EVENTS, MAX_RUN, RUN, is_name, open_file, open_within, replace};
use crate::stream::Stream;

/// The format of run directories that this program writes, and the newest that it reads.
pub const VERSION: u32 = 3;
/// Of a round; the collectors make a dozen.
const MAX_STREAMS: usize = 64;

/// Seconds since 1970, as runs and cells tell when they began.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |time| time.as_secs())
}

/// How a run came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunKind {
    /// An experiment: its cells, in [`Run::experiment`].
    Experiment,
    /// The wiki's experiment: guest and host, rounds of every sort.
    Lab,
    /// `fathom breakdown`: a running QEMU or a server's disk, from the host alone.
    Host,
    /// `fathom guest record`: the guest's share alone.
    Guest,
    /// A host's run joined with its guest's, or with that of the host to which its requests go on.
    Joined,
    /// `fathom breakdown --qemu-trace`: QEMU's own trace, and nothing else.
    Qemu,
}

/// One run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// [`VERSION`] of the program that wrote it.
    pub version: u32,
    pub kind: RunKind,
    /// For people: `wiki, fathom, 4k read, depth 1`.
    pub title: String,
    /// Seconds since 1970.
    pub created: u64,
    /// Since version 2.
    #[serde(default)]
    pub experiment: Option<Experiment>,
    pub scenario: Option<Scenario>,
    pub environment: Environment,
    /// The guest's disks; `under_test` marks the one that the run is about.
    pub disks: Vec<Disk>,
    pub threads: Vec<Thread>,
    pub rounds: Vec<Round>,
    /// What went wrong without ending the run, a line each, for the report's reader.
    pub problems: Vec<String>,
}

/// What the guest (or host) was made to do.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Scenario {
    /// `read`, `write`, `randread` or `randwrite`.
    pub rw: String,
    pub block_size: u64,
    pub iodepth: u32,
    pub queues: u32,
    /// Who serves the disk: `fathom`, `qemu` or `qsd`.
    pub server: String,
    /// `io_uring`, `native` or `threads`.
    pub aio: String,
    /// `none`, `writeback`, ...
    pub cache: String,
    /// Whether the server polls.
    pub polling: bool,
}

/// The machines, in a report's environment block.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    pub host: Machine,
    pub guest: Option<Machine>,
    /// The host to which requests go on. Since version 3.
    #[serde(default)]
    pub remote: Option<Machine>,
    /// `kvm` or `tcg`.
    pub accelerator: String,
    /// The version as QEMU prints it.
    pub qemu: Option<String>,
    pub fathom: String,
    /// The host is itself emulated: times are stretched and say nothing about speed.
    pub stretched: bool,
}

/// One kernel and what it runs on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// As `uname -r` says it.
    pub kernel: String,
    /// The model's name.
    pub cpu: String,
    pub cpus: u32,
    /// The kernel's clock source.
    pub clock_source: String,
    /// The trace clock in use.
    pub trace_clock: String,
}

/// A disk of the guest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Disk {
    /// QEMU's id or Fathom's name for it.
    pub name: String,
    pub under_test: bool,
    /// `vhost-user-blk`, `virtio-blk`, ...
    pub device: String,
    /// The image, where it is known.
    pub image: Option<PathBuf>,
    /// The process that serves it.
    pub server_pid: Option<u32>,
    /// eventfd-ids of its kicks, by queue, and of its calls.
    pub kick_eventfds: Vec<u64>,
    pub call_eventfds: Vec<u64>,
    /// Guest-physical doorbell addresses, by queue.
    pub doorbells: Vec<u64>,
    /// (address, data) of its queues' MSI-X messages, by queue.
    pub msi: Vec<(u64, u64)>,
    /// How the device was told from others: `eventfd-id`, `qmp`, or None: unidentified.
    pub identified_by: Option<String>,
    /// The guest's device: dev_t, name, interrupt numbers and virtqueue addresses by queue.
    pub guest_dev: Option<u64>,
    pub guest_name: Option<String>,
    pub guest_irqs: Vec<u64>,
    pub guest_vqs: Vec<u64>,
    /// The host's block device below the image; None for memory, network.
    pub host: Option<BlockDevice>,
    /// Where the image's bytes lie on it. Empty where it is not known.
    pub extents: Vec<Extent>,
}

/// A block device of the host, the lowest that is traced.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BlockDevice {
    /// dev_t of the whole disk (major << 20 | minor).
    pub dev: u64,
    pub name: String,
    pub scheduler: String,
}

/// Bytes of an image that lie together on the host's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// In the image, bytes.
    pub offset: u64,
    /// On the device of [`Disk::host`], bytes.
    pub physical: u64,
    pub length: u64,
}

/// What a thread is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    Vcpu,
    /// QEMU's main loop.
    Main,
    /// An I/O thread of QEMU, or a worker of the disk's server.
    Io,
    /// A thread of a pool that makes blocking calls.
    Pool,
    Other,
}

/// A thread of QEMU or of the disk's server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Thread {
    pub pid: u32,
    pub tid: u32,
    pub name: String,
    pub role: Role,
    /// The vCPU's number.
    pub vcpu: Option<u32>,
}

/// One round: the same work, watched in one way.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// Its folder.
    pub name: String,
    /// What was traced: `guest`, `kvm`, `block`, `fathom`, `syscalls`, `qemu`, `futex`. Empty: the
    /// control, untraced.
    pub traced: Vec<String>,
    /// Runs on the host itself, without a guest.
    pub on_host: bool,
    /// What the benchmark itself reported.
    pub benchmark: Option<Benchmark>,
    pub clocks: Clocks,
    pub streams: Vec<StreamInfo>,
}

/// The benchmark's own figures for a round, in ns of the clock where it ran.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Benchmark {
    pub operations: u64,
    /// From before the first operation to after the last, divided by their number: the wiki's way.
    pub mean_ns: f64,
    pub wall_ns: u64,
    pub errors: u64,
    /// `read`, `pread`, ...
    pub call: String,
}

/// A file of events in a round's folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamInfo {
    /// Its file is `NAME.events`.
    pub name: String,
    pub clock: Clock,
    pub events: u64,
    /// Events dropped by the kernel or the ring; None: the source cannot tell.
    pub lost: Option<u64>,
}

impl Run {
    /// A run that begins now, of which nothing else is known yet.
    pub fn new(kind: RunKind, title: impl Into<String>) -> Run {
        Run {
            version: VERSION,
            kind,
            title: title.into(),
            created: now(),
            experiment: None,
            scenario: None,
            environment: Environment::default(),
            disks: Vec::new(),
            threads: Vec::new(),
            rounds: Vec::new(),
            problems: Vec::new(),
        }
    }

    /// Writes `run.json` into an existing directory.
    ///
    /// # Errors
    /// When it cannot be written; an older `run.json` is then still whole.
    pub fn save(&self, dir: &Path) -> Result<()> {
        replace(&dir.join(RUN), self)
    }

    /// Reads a run directory's `run.json`.
    ///
    /// # Errors
    /// When there is none, or it is damaged or of a newer version, or names what cannot be its own.
    pub fn load(dir: &Path) -> Result<Run> {
        let path = dir.join(RUN);
        let text = open_file(&path, MAX_RUN).and_then(io::read_to_string);
        let text = text.map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => {
                Error::unusable(dir, "not a run directory: it has no run.json")
            }
            _ => Error::io(&path)(source),
        })?;
        let damaged = |problem: &dyn Display| Error::unusable(&path, format!("damaged: {problem}"));
        let Versioned { version } = serde_json::from_str(&text).map_err(|error| damaged(&error))?;
        if version == 0 || version > u64::from(VERSION) {
            let problem = format!("version {version}; this fathom reads 1 to {VERSION}");
            return Err(Error::unusable(&path, problem));
        }
        let run: Run = serde_json::from_str(&text).map_err(|error| damaged(&error))?;
        run.rounds
            .iter()
            .try_for_each(Round::check)
            .and_then(|()| run.experiment.as_ref().map_or(Ok(()), Experiment::check))
            .map_err(|problem| damaged(&problem))?;
        Ok(run)
    }

    /// The disk that the run is about.
    pub fn disk(&self) -> Option<&Disk> {
        self.disks.iter().find(|disk| disk.under_test)
    }
}

impl Round {
    /// Opens one of the round's files of events; `dir` is the run's directory.
    ///
    /// # Errors
    /// When it cannot be read, or is none of that directory's files.
    pub fn open(&self, dir: &Path, stream: &StreamInfo) -> Result<Stream> {
        let file = self.file(dir, stream)?;
        Stream::read(file, &dir.join(&self.name).join(stream.file_name()))
    }

    /// The same file as it is.
    ///
    /// # Errors
    /// Like [`open`](Self::open).
    pub fn file(&self, dir: &Path, stream: &StreamInfo) -> Result<File> {
        let name = stream.file_name();
        let file = open_within(dir, &[&self.name], &name, MAX_EVENTS);
        file.map_err(|error| Error::io(&dir.join(&self.name).join(name))(error))
    }

    /// Names become paths: they must not lead anywhere else.
    fn check(&self) -> std::result::Result<(), String> {
        let names = self.streams.iter().map(|stream| &stream.name);
        if let Some(name) = names.chain([&self.name]).find(|name| !is_name(name)) {
            return Err(format!("{name:?} is no name of a round or of its events"));
        }
        if self.streams.len() > MAX_STREAMS {
            let (name, count) = (&self.name, self.streams.len());
            return Err(format!(
                "{count} files of events in round {name:?}; {MAX_STREAMS} are the most"
            ));
        }
        Ok(())
    }
}

impl StreamInfo {
    /// The name of its file.
    pub fn file_name(&self) -> String {
        format!("{}.events", self.name)
    }
}

/// What every version's run.json says.
#[derive(Deserialize)]
struct Versioned {
    #[serde(default)]
    version: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn run() -> Run {
        Run {
            version: VERSION,
            kind: RunKind::Lab,
            title: "a run".into(),
            created: 1_790_000_000,
            experiment: Some(Experiment::default()),
            scenario: Some(Scenario::default()),
            environment: Environment::default(),
            disks: vec![Disk {
                name: "d".into(),
                under_test: true,
                ..Disk::default()
            }],
            threads: Vec::new(),
            rounds: vec![Round {
                name: "traced".into(),
                ..Round::default()
            }],
            problems: Vec::new(),
        }
    }

    #[test]
    fn a_run_is_read_as_it_was_saved() {
        let dir = tempfile::tempdir().unwrap();
        run().save(dir.path()).unwrap();
        assert_eq!(Run::load(dir.path()).unwrap(), run());
    }

    #[test]
    fn a_run_of_version_1_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let text = r#"{"version": 1, "kind": "lab", "title": "old", "created": 1,
            "scenario": null, "environment": {"host": {"kernel": "6.1", "cpu": "c", "cpus": 1,
            "clock_source": "tsc", "trace_clock": "x86-tsc"}, "guest": null, "accelerator": "kvm",
            "qemu": null, "fathom": "0.1", "stretched": false}, "disks": [], "threads": [],
            "rounds": [], "problems": []}"#;
        fs::write(dir.path().join(RUN), text).unwrap();
        let run = Run::load(dir.path()).unwrap();
        assert_eq!((run.version, run.experiment), (1, None));
    }

    #[test]
    fn what_is_no_run_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let message = |dir: &Path| Run::load(dir).unwrap_err().to_string();
        assert!(message(dir.path()).contains("not a run directory"));
        let newer = Run {
            version: VERSION + 1,
            ..run()
        };
        newer.save(dir.path()).unwrap();
        assert!(message(dir.path()).contains("version 4; this fathom reads 1 to 3"));
        fs::write(dir.path().join(RUN), "{").unwrap();
        assert!(message(dir.path()).contains("damaged"));
    }
}
