//! Options of a load. Names follow fio where fio has the same concept.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::nbd::{NbdUri, Replies};

/// Options of a whole run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Server, export or file that receives the requests.
    pub target: Target,
    /// Requests to send, and for how long.
    pub load: Load,
}

/// The target of the requests.
#[derive(Clone, Debug)]
pub enum Target {
    /// Disk of a vhost-user-blk server.
    VhostUser(VhostUser),
    /// Export of an NBD server.
    Nbd(Nbd),
    /// File or block device on this host.
    File(File),
}

/// A vhost-user-blk server, and how to communicate with it.
#[derive(Clone, Debug)]
pub struct VhostUser {
    /// Path of the server's Unix socket.
    pub socket: PathBuf,
    /// Number of ring entries up to 1024, and a power of two unless the rings are packed. `None`:
    /// the smallest power of two that holds `iodepth`, but at least 128, as in guests.
    pub queue_size: Option<u16>,
    /// Use packed rings (VIRTIO_F_RING_PACKED).
    pub packed: bool,
    /// How a worker waits for completions.
    pub wait: Wait,
    /// Use indirect descriptors, so that each request takes one ring entry
    /// (VIRTIO_F_INDIRECT_DESC).
    pub indirect: bool,
    /// Use event indexes to suppress notifications (VIRTIO_F_EVENT_IDX).
    pub event_idx: bool,
    /// Maximum size of a data descriptor in bytes. `None`: one descriptor per buffer.
    pub segment_size: Option<u32>,
    /// Negotiate INFLIGHT_SHMFD.
    pub inflight: bool,
    /// Enable the dirty log, and check that it marks every written page.
    pub log: bool,
    /// Time to try reconnecting when the server dies. Needs `inflight`.
    pub reconnect: Option<Duration>,
    /// Process whose CPU time is reported. `None`: the process at the other end of the socket.
    pub backend_pid: Option<u32>,
}

/// An export of an NBD server.
#[derive(Clone, Debug)]
pub struct Nbd {
    /// Address of the server and name of the export.
    pub uri: NbdUri,
    /// Form of requests and replies. `None`: the best form that the server supports.
    pub replies: Option<Replies>,
    /// How a worker waits for replies.
    pub wait: Wait,
    /// Process whose CPU time is reported. `None`: the process at the other end of the socket.
    pub backend_pid: Option<u32>,
}

/// A file or block device on this host.
#[derive(Clone, Debug)]
pub struct File {
    /// Path of the file or block device.
    pub path: PathBuf,
    /// Use the file's bytes as they are, even if the file is an image.
    pub raw: bool,
    /// Allow overwriting the contents of the file.
    pub overwrite: bool,
    /// I/O interface for the requests.
    pub engine: Engine,
    /// Use the page cache instead of O_DIRECT.
    pub buffered: bool,
    /// Use registered buffers (io_uring only).
    pub fixedbufs: bool,
    /// Use a registered file (io_uring only).
    pub registerfiles: bool,
    /// How a worker waits for completions; polling needs io_uring.
    pub wait: Wait,
}

/// I/O interface for a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// Asynchronous I/O through io_uring.
    IoUring,
    /// Linux AIO, which is asynchronous only with direct I/O.
    Aio,
    /// Synchronous system calls, one request at a time.
    Psync,
}

impl Engine {
    /// Returns fio's name of the engine.
    pub fn name(self) -> &'static str {
        match self {
            Engine::IoUring => "io_uring",
            Engine::Aio => "libaio",
            Engine::Psync => "psync",
        }
    }
}

/// How a worker waits for completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Sleep until the call eventfd is signalled or, for NBD, until the socket has a reply.
    Interrupt,
    /// Poll the used ring with interrupts suppressed or, for NBD, poll the socket.
    Poll,
}

/// The requests to send, and for how long.
#[derive(Clone, Debug)]
pub struct Load {
    /// Kinds of requests and order of their offsets.
    pub rw: Rw,
    /// Percentage of reads in the mixed modes; the rest are writes.
    pub rwmixread: u8,
    /// Percentage of discards among all requests except flushes. Rejected if the mode only reads.
    pub rwmixtrim: u8,
    /// Percentage of write-zeroes among all requests except flushes. Rejected if the mode only
    /// reads.
    pub rwmixzero: u8,
    /// Size of a request in bytes.
    pub bs: u32,
    /// Number of requests in flight per queue.
    pub iodepth: u16,
    /// Number of virtqueues, NBD connections, or workers on a file. Each has its own thread.
    pub queues: u16,
    /// Duration of the measurement. `None`: until `number_ios` is reached.
    pub runtime: Option<Duration>,
    /// Duration of the load before the measurement, which is not counted.
    pub ramp: Duration,
    /// Offset of the used range in bytes.
    pub offset: u64,
    /// Length of the used range in bytes. `None`: up to the end of the disk.
    pub size: Option<u64>,
    /// Number of requests per queue after which the run stops.
    pub number_ios: Option<u64>,
    /// Number of writes per queue after which a flush is sent. 0: no flushes.
    pub fsync: u32,
    /// Write verifiable contents, check every read, and check the used range at the end.
    pub verify: bool,
    /// File that keeps the expected contents of each block for a later run.
    pub verify_state: Option<PathBuf>,
    /// Send no load, and only check the contents recorded in `verify_state`.
    pub verify_only: bool,
    /// Seed of operations, offsets and, without verification, written data.
    pub seed: u64,
    /// CPUs for the workers: worker i is pinned to the i-th CPU, round robin. Empty: not pinned.
    pub cpus: Vec<usize>,
    /// Count failed requests instead of stopping at the first failure.
    pub continue_on_error: bool,
    /// Reject any load that would change the disk.
    pub readonly: bool,
    /// Fail if requests are in flight and none completes for this long.
    pub timeout: Duration,
    /// Set by any thread to end the run early. The report covers the time until then.
    pub stop: Arc<AtomicBool>,
}

/// fio's `rw`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rw {
    /// Sequential reads.
    Read,
    /// Sequential writes.
    Write,
    /// Sequential discards.
    Trim,
    /// Reads at random offsets.
    RandRead,
    /// Writes at random offsets.
    RandWrite,
    /// Discards at random offsets.
    RandTrim,
    /// Reads and writes in one sequence, in the proportion of [`Load::rwmixread`].
    ReadWrite,
    /// Reads and writes at random offsets, in the proportion of [`Load::rwmixread`].
    RandRw,
}

impl Rw {
    /// All variants.
    pub const ALL: [Rw; 8] = [
        Rw::Read,
        Rw::Write,
        Rw::Trim,
        Rw::RandRead,
        Rw::RandWrite,
        Rw::RandTrim,
        Rw::ReadWrite,
        Rw::RandRw,
    ];

    /// Returns whether offsets are random instead of sequential.
    pub fn is_random(self) -> bool {
        matches!(
            self,
            Rw::RandRead | Rw::RandWrite | Rw::RandTrim | Rw::RandRw
        )
    }

    /// Returns whether the mode sends only reads.
    pub fn is_read_only(self) -> bool {
        matches!(self, Rw::Read | Rw::RandRead)
    }

    /// Returns fio's name of the mode.
    pub fn name(self) -> &'static str {
        match self {
            Rw::Read => "read",
            Rw::Write => "write",
            Rw::Trim => "trim",
            Rw::RandRead => "randread",
            Rw::RandWrite => "randwrite",
            Rw::RandTrim => "randtrim",
            Rw::ReadWrite => "rw",
            Rw::RandRw => "randrw",
        }
    }
}

impl fmt::Display for Rw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Rw {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Rw, String> {
        let text = if text == "readwrite" { "rw" } else { text };
        let found = Rw::ALL.into_iter().find(|rw| rw.name() == text);
        found.ok_or_else(|| format!("'{text}' is none of {}", Rw::ALL.map(Rw::name).join(", ")))
    }
}

/// Maximum number of ring entries, which is also the maximum of real drivers.
pub const MAX_QUEUE_SIZE: u16 = 1024;
/// Sector size of virtio-blk in bytes, the unit of offsets in requests.
pub const SECTOR: u32 = 512;

impl Default for Load {
    fn default() -> Self {
        Load {
            rw: Rw::RandRead,
            rwmixread: 50,
            rwmixtrim: 0,
            rwmixzero: 0,
            bs: 4096,
            iodepth: 1,
            queues: 1,
            runtime: Some(Duration::from_secs(10)),
            ramp: Duration::from_secs(1),
            offset: 0,
            size: None,
            number_ios: None,
            fsync: 0,
            verify: false,
            verify_state: None,
            verify_only: false,
            seed: 0x0066_6174_686f_6d00,
            cpus: Vec::new(),
            continue_on_error: false,
            readonly: false,
            timeout: Duration::from_secs(30),
            stop: Arc::default(),
        }
    }
}

impl VhostUser {
    /// Returns the default options for the server at `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        VhostUser {
            socket: socket.into(),
            queue_size: None,
            packed: false,
            wait: Wait::Interrupt,
            indirect: true,
            event_idx: true,
            segment_size: None,
            inflight: false,
            log: false,
            reconnect: None,
            backend_pid: None,
        }
    }
}

impl Nbd {
    /// Returns the default options for an export.
    pub fn new(uri: NbdUri) -> Self {
        Nbd {
            uri,
            replies: None,
            wait: Wait::Interrupt,
            backend_pid: None,
        }
    }
}

impl File {
    /// Returns the default options for the file at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        File {
            path: path.into(),
            raw: false,
            overwrite: false,
            engine: Engine::IoUring,
            buffered: false,
            fixedbufs: false,
            registerfiles: false,
            wait: Wait::Interrupt,
        }
    }
}

fn refuse(text: impl Into<String>) -> Result<()> {
    Err(Error::Options(text.into()))
}

impl Options {
    /// Rejects options that are invalid for any disk.
    pub fn validate(&self) -> Result<()> {
        self.load.validate()?;
        match &self.target {
            Target::VhostUser(v) => v.validate(&self.load),
            Target::Nbd(_) => Ok(()),
            Target::File(f) => f.validate(&self.load),
        }
    }
}

impl Load {
    fn validate(&self) -> Result<()> {
        if self.bs == 0 || !self.bs.is_multiple_of(SECTOR) {
            return refuse(format!(
                "--bs must be a multiple of {SECTOR}, not {}",
                self.bs
            ));
        }
        if self.bs > 64 << 20 {
            return refuse("--bs is at most 64M");
        }
        if self.iodepth == 0 || self.iodepth > MAX_QUEUE_SIZE {
            return refuse(format!("--iodepth must be 1 to {MAX_QUEUE_SIZE}"));
        }
        if self.queues == 0 || self.queues > 256 {
            return refuse("--queues must be 1 to 256");
        }
        if u32::from(self.rwmixread) > 100
            || u32::from(self.rwmixtrim) + u32::from(self.rwmixzero) > 100
        {
            return refuse("percentages must not pass 100");
        }
        for (option, share) in [
            ("--rwmixtrim", self.rwmixtrim),
            ("--rwmixzero", self.rwmixzero),
        ] {
            if share > 0 && self.rw.is_read_only() {
                return refuse(format!(
                    "{option} would change the disk, and --rw {} only reads: use --rw {}",
                    self.rw,
                    if self.rw.is_random() { "randrw" } else { "rw" }
                ));
            }
        }
        if !self.offset.is_multiple_of(u64::from(SECTOR)) {
            return refuse(format!("--offset must be a multiple of {SECTOR}"));
        }
        if self.runtime.is_none() && self.number_ios.is_none() {
            return refuse("give --runtime or --number-ios");
        }
        if self.readonly && self.writes() {
            return refuse(format!("--readonly with --rw {}", self.rw.name()));
        }
        if self.verify_state.is_some() && !self.verify {
            return refuse("--verify-state needs --verify");
        }
        if self.verify_only && self.verify_state.is_none() {
            return refuse("--verify-only needs --verify-state");
        }
        Ok(())
    }

    /// Returns whether any request changes the disk.
    pub fn writes(&self) -> bool {
        !self.verify_only && !self.rw.is_read_only()
    }
}

impl VhostUser {
    fn validate(&self, load: &Load) -> Result<()> {
        if let Some(size) = self.queue_size {
            let is_allowed = self.packed || size.is_power_of_two();
            if !is_allowed || !(2..=MAX_QUEUE_SIZE).contains(&size) {
                return refuse(format!(
                    "--queue-size must be from 2 to {MAX_QUEUE_SIZE}, and a power of two without \
                     --packed on"
                ));
            }
        }
        if let Some(segment) = self.segment_size
            && (segment == 0 || !segment.is_multiple_of(SECTOR))
        {
            return refuse(format!("--segment-size must be a multiple of {SECTOR}"));
        }
        let needed = u32::from(load.iodepth) * self.entries_per_request(load);
        let size = u32::from(self.ring_size(load)?);
        if needed > size {
            return refuse(format!(
                "--iodepth {} needs a ring of {needed} entries, --queue-size is {size}",
                load.iodepth
            ));
        }
        Ok(())
    }

    /// Returns the number of data descriptors of a request.
    pub fn segments(&self, load: &Load) -> u32 {
        load.bs.div_ceil(self.segment_size.unwrap_or(load.bs))
    }

    /// Returns the number of ring entries that a request takes.
    pub fn entries_per_request(&self, load: &Load) -> u32 {
        if self.indirect {
            1
        } else {
            self.segments(load) + 2
        }
    }

    /// Returns the number of ring entries.
    pub fn ring_size(&self, load: &Load) -> Result<u16> {
        if let Some(size) = self.queue_size {
            return Ok(size);
        }
        let needed = u32::from(load.iodepth) * self.entries_per_request(load);
        let size = needed.next_power_of_two().max(128);
        match u16::try_from(size) {
            Ok(size) if size <= MAX_QUEUE_SIZE => Ok(size),
            _ => Err(Error::Options(format!(
                "--iodepth {} without indirect descriptors needs a ring of {needed} entries, \
                 more than {MAX_QUEUE_SIZE}",
                load.iodepth
            ))),
        }
    }
}

impl File {
    fn validate(&self, load: &Load) -> Result<()> {
        if self.engine == Engine::Psync && load.iodepth > 1 {
            return refuse("--engine psync has one request in flight; use --queues instead");
        }
        let registered = self.fixedbufs || self.registerfiles;
        if self.engine != Engine::IoUring && (registered || self.wait == Wait::Poll) {
            return refuse("--fixedbufs, --registerfiles and --wait poll need io_uring");
        }
        if self.engine == Engine::Aio {
            if self.buffered {
                return refuse("libaio through the page cache waits in each call: use io_uring");
            }
            let trims = matches!(load.rw, Rw::Trim | Rw::RandTrim);
            if trims || load.rwmixtrim + load.rwmixzero > 0 {
                return refuse("libaio has no discards and no zeroes: use io_uring or psync");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_that_only_reads_changes_nothing() {
        let options = |rw, rwmixtrim, rwmixzero| Options {
            target: Target::File(File::new("/nowhere")),
            load: Load {
                rw,
                rwmixtrim,
                rwmixzero,
                ..Load::default()
            },
        };
        let refusal = |rw, trim, zero| {
            let error = options(rw, trim, zero).validate().unwrap_err();
            error.to_string()
        };
        let error = refusal(Rw::RandRead, 10, 0);
        assert!(
            error.contains("--rwmixtrim") && error.contains("randrw"),
            "{error}"
        );
        assert!(refusal(Rw::Read, 0, 1).contains("--rwmixzero"));
        options(Rw::RandRead, 0, 0).validate().unwrap();
        options(Rw::RandRw, 10, 10).validate().unwrap();
        options(Rw::RandTrim, 0, 10).validate().unwrap();
    }
}
