//! `run.json`: everything about a run except its events.

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

/// Version of the run directories that this program writes, and the newest version that it reads.
pub const VERSION: u32 = 3;
/// Maximum number of event files of a round; the collectors create a dozen.
const MAX_STREAMS: usize = 64;

/// Returns the current time in seconds since 1970, for the start times of runs and cells.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |time| time.as_secs())
}

/// Origin of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunKind {
    /// An experiment, with its cells in [`Run::experiment`].
    Experiment,
    /// The wiki's experiment: guest and host, with rounds of every kind.
    Lab,
    /// `fathom breakdown`: a running QEMU or a server's disk, traced from the host only.
    Host,
    /// `fathom guest record`: the guest's part only.
    Guest,
    /// A host's run joined with its guest's run, or with the run of the host that receives its
    /// requests.
    Joined,
    /// `fathom breakdown --qemu-trace`: only QEMU's own trace.
    Qemu,
}

/// A run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// [`VERSION`] of the program that wrote the run.
    pub version: u32,
    /// Origin of the run, which decides how the report presents it.
    pub kind: RunKind,
    /// Title for users: `wiki, fathom, 4k read, depth 1`.
    pub title: String,
    /// Start time in seconds since 1970.
    pub created: u64,
    /// Since version 2.
    #[serde(default)]
    pub experiment: Option<Experiment>,
    /// Work that every round did; `None` if it is not known.
    pub scenario: Option<Scenario>,
    /// Machines and versions of the programs.
    pub environment: Environment,
    /// The guest's disks; `under_test` marks the disk that the run examines.
    pub disks: Vec<Disk>,
    /// Threads of QEMU and of the disk's server, as seen on the host.
    pub threads: Vec<Thread>,
    /// Rounds in the order in which they ran.
    pub rounds: Vec<Round>,
    /// Problems that did not end the run, one line each, for readers of the report.
    pub problems: Vec<String>,
}

/// The work that the guest or host did.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Scenario {
    /// `read`, `write`, `randread` or `randwrite`.
    pub rw: String,
    /// Size of a request in bytes.
    pub block_size: u64,
    /// Number of requests in flight.
    pub iodepth: u32,
    /// Number of virtqueues of the disk.
    pub queues: u32,
    /// Server of the disk: `fathom`, `qemu` or `qsd`.
    pub server: String,
    /// `io_uring`, `native` or `threads`.
    pub aio: String,
    /// `none`, `writeback`, ...
    pub cache: String,
    /// Whether the server polls.
    pub polling: bool,
}

/// The machines, for a report's environment block.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// Machine that runs QEMU and the server; its fields are empty if the run has no host's data.
    pub host: Machine,
    /// Virtual machine as its guest reports it; `None` without data from the guest.
    pub guest: Option<Machine>,
    /// The host that receives the requests. Since version 3.
    #[serde(default)]
    pub remote: Option<Machine>,
    /// `kvm` or `tcg`.
    pub accelerator: String,
    /// The version as QEMU prints it.
    pub qemu: Option<String>,
    /// Version of the `fathom` program that recorded the run.
    pub fathom: String,
    /// The host is itself emulated, so that times are stretched and say nothing about speed.
    pub stretched: bool,
}

/// A kernel and its hardware.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Kernel release, as in `uname -r`.
    pub kernel: String,
    /// Name of the CPU model.
    pub cpu: String,
    /// Number of CPUs that are online.
    pub cpus: u32,
    /// The kernel's clock source.
    pub clock_source: String,
    /// The trace clock in use.
    pub trace_clock: String,
}

/// A disk of the guest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Disk {
    /// QEMU's id or Fathom's name of the disk.
    pub name: String,
    /// Whether the run examines this disk.
    pub under_test: bool,
    /// `vhost-user-blk`, `virtio-blk`, ...
    pub device: String,
    /// Path of the image, if it is known.
    pub image: Option<PathBuf>,
    /// Id of the process that serves the disk.
    pub server_pid: Option<u32>,
    /// eventfd-ids of the kicks, with which the guest notifies the server, by queue.
    pub kick_eventfds: Vec<u64>,
    /// eventfd-ids of the calls, with which the server notifies the guest.
    pub call_eventfds: Vec<u64>,
    /// Whether places in these two lists are no numbers of queues, because some queues were idle.
    #[serde(default)]
    pub queues_unknown: bool,
    /// Guest-physical doorbell addresses, by queue.
    pub doorbells: Vec<u64>,
    /// (address, data) of the queues' MSI-X messages, by queue.
    pub msi: Vec<(u64, u64)>,
    /// How the device was identified: `eventfd-id` or `qmp`; None if it was not.
    pub identified_by: Option<String>,
    /// dev_t of the disk in the guest; None without data from the guest.
    pub guest_dev: Option<u64>,
    /// Name of the disk in the guest, such as `vda`.
    pub guest_name: Option<String>,
    /// Numbers of the disk's interrupts in the guest, by queue; a single number if queues share it.
    pub guest_irqs: Vec<u64>,
    /// Addresses of the virtqueues in the guest's kernel, by queue.
    pub guest_vqs: Vec<u64>,
    /// The host's block device below the image; None for memory and network.
    pub host: Option<BlockDevice>,
    /// Location of the image's bytes on that device. Empty if it is not known.
    pub extents: Vec<Extent>,
}

/// The lowest traced block device of the host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BlockDevice {
    /// dev_t of the whole disk (major << 20 | minor).
    pub dev: u64,
    /// Name of the device in `/sys/block`.
    pub name: String,
    /// Name of the device's I/O scheduler, such as `none`.
    pub scheduler: String,
}

/// Bytes of an image that are contiguous on the host's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// Offset in the image in bytes.
    pub offset: u64,
    /// Offset on the device of [`Disk::host`] in bytes.
    pub physical: u64,
    /// Length in bytes.
    pub length: u64,
}

/// Role of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Thread that runs a virtual CPU.
    Vcpu,
    /// QEMU's main loop.
    Main,
    /// An I/O thread of QEMU, or a worker of the disk's server.
    Io,
    /// A pool thread that makes blocking calls.
    Pool,
    /// Thread of none of the other roles.
    Other,
}

/// A thread of QEMU or of the disk's server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Thread {
    /// Process id on the host.
    pub pid: u32,
    /// Thread id on the host.
    pub tid: u32,
    /// Thread's name in the kernel.
    pub name: String,
    /// Role of the thread in the handling of requests.
    pub role: Role,
    /// Number of the vCPU.
    pub vcpu: Option<u32>,
}

/// A round: the same work, traced in one way.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// Name of the round's folder.
    pub name: String,
    /// Names of the collectors that traced the round: `guest`, `kvm`, `block`, `fathom`,
    /// `syscalls`, `qemu`, `futex`. Empty for the control round, which is not traced.
    pub traced: Vec<String>,
    /// The work runs on the host itself, without a guest.
    pub on_host: bool,
    /// Results that the benchmark reported.
    pub benchmark: Option<Benchmark>,
    /// Clocks of the round, and how they relate.
    pub clocks: Clocks,
    /// Event files in the round's folder.
    pub streams: Vec<StreamInfo>,
}

/// The benchmark's own results for a round, in ns of the clock where it ran.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Benchmark {
    /// Number of operations, including failed ones.
    pub operations: u64,
    /// Time from before the first operation to after the last, divided by their number, as in the
    /// wiki.
    pub mean_ns: f64,
    /// Time from before the first operation to after the last, in ns.
    pub wall_ns: u64,
    /// Number of operations that failed or transferred less than a block.
    pub errors: u64,
    /// `read`, `pread`, ...
    pub call: String,
}

/// An event file in a round's folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamInfo {
    /// Name of the stream; its file is `NAME.events`.
    pub name: String,
    /// Clock of the times in the file.
    pub clock: Clock,
    /// Number of events in the file.
    pub events: u64,
    /// Number of events dropped by the kernel or the ring; None if the source cannot tell.
    pub lost: Option<u64>,
}

impl Run {
    /// Creates a run that starts now, without any other data.
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
    /// The file cannot be written; an older `run.json` is then unchanged.
    pub fn save(&self, dir: &Path) -> Result<()> {
        replace(&dir.join(RUN), self)
    }

    /// Reads the `run.json` of a run directory.
    ///
    /// # Errors
    /// The file does not exist, is damaged or of a newer version, or contains names that could
    /// leave the directory.
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

    /// Returns the disk that the run examines.
    pub fn disk(&self) -> Option<&Disk> {
        self.disks.iter().find(|disk| disk.under_test)
    }
}

impl Round {
    /// Opens one of the round's event files; `dir` is the run directory.
    ///
    /// # Errors
    /// The file cannot be read, or does not lie in that directory.
    pub fn open(&self, dir: &Path, stream: &StreamInfo) -> Result<Stream> {
        let file = self.file(dir, stream)?;
        Stream::read(file, &dir.join(&self.name).join(stream.file_name()))
    }

    /// Opens the same file without decoding it.
    ///
    /// # Errors
    /// Like [`open`](Self::open).
    pub fn file(&self, dir: &Path, stream: &StreamInfo) -> Result<File> {
        let name = stream.file_name();
        let file = open_within(dir, &[&self.name], &name, MAX_EVENTS);
        file.map_err(|error| Error::io(&dir.join(&self.name).join(name))(error))
    }

    /// Checks that names, which become paths, cannot leave the run directory.
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
    /// Returns the name of the event file.
    pub fn file_name(&self) -> String {
        format!("{}.events", self.name)
    }
}

/// The field that run.json has in every version.
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
