//! What to run. Names follow fio where fio has the same notion.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::nbd::{NbdUri, Replies};

/// A whole run.
#[derive(Clone, Debug)]
pub struct Options {
    pub target: Target,
    pub load: Load,
}

/// Where the requests go.
#[derive(Clone, Debug)]
pub enum Target {
    VhostUser(VhostUser),
    Nbd(Nbd),
    File(File),
}

/// A vhost-user-blk server and how to talk to it.
#[derive(Clone, Debug)]
pub struct VhostUser {
    pub socket: PathBuf,
    /// Ring size, a power of two up to 1024; `None` takes the smallest that
    /// holds `iodepth`, and at least 128 as guests do.
    pub queue_size: Option<u16>,
    pub wait: Wait,
    /// One ring entry per request (VIRTIO_F_INDIRECT_DESC).
    pub indirect: bool,
    /// VIRTIO_F_EVENT_IDX.
    pub event_idx: bool,
    /// Largest data descriptor in bytes; `None` describes a buffer by one.
    pub segment_size: Option<u32>,
    /// Negotiate INFLIGHT_SHMFD.
    pub inflight: bool,
    /// Switch the dirty log on, and check that it names every written page.
    pub log: bool,
    /// When the server dies: try to reconnect for this long. Needs `inflight`.
    pub reconnect: Option<Duration>,
    /// Process whose CPU time is reported instead of the socket's peer.
    pub backend_pid: Option<u32>,
}

/// An export of an NBD server.
#[derive(Clone, Debug)]
pub struct Nbd {
    pub uri: NbdUri,
    /// The form of requests and replies; `None`: the best that the server has.
    pub replies: Option<Replies>,
    pub wait: Wait,
    /// Process whose CPU time is reported instead of the socket's peer.
    pub backend_pid: Option<u32>,
}

/// A file or block device on this host.
#[derive(Clone, Debug)]
pub struct File {
    pub path: PathBuf,
    /// The bytes of an image's file are loaded as they are.
    pub raw: bool,
    /// What the file holds may be overwritten.
    pub overwrite: bool,
    pub engine: Engine,
    /// Through the page cache instead of O_DIRECT.
    pub buffered: bool,
    /// io_uring only: registered buffers.
    pub fixedbufs: bool,
    /// io_uring only: registered file.
    pub registerfiles: bool,
    pub wait: Wait,
}

/// How a file is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    IoUring,
    /// Linux AIO; needs direct I/O to be asynchronous.
    Aio,
    /// One call after another.
    Psync,
}

impl Engine {
    /// fio's name.
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
    /// Sleep until the interrupt (the call eventfd), or until the socket has a reply.
    Interrupt,
    /// Spin on the used ring, interrupts suppressed, or on the socket.
    Poll,
}

/// The requests and how long to send them.
#[derive(Clone, Debug)]
pub struct Load {
    pub rw: Rw,
    /// Percentage of reads in the mixed modes; the rest are writes.
    pub rwmixread: u8,
    /// Percentage of all requests that are discards, in any mode but pure reads.
    pub rwmixtrim: u8,
    /// Percentage of all requests that are write-zeroes, in any mode but pure reads.
    pub rwmixzero: u8,
    /// Bytes per request.
    pub bs: u32,
    /// Requests in flight per queue.
    pub iodepth: u16,
    /// Virtqueues, connections, or workers on a file; one thread each.
    pub queues: u16,
    /// Measured time; `None`: until `number_ios`.
    pub runtime: Option<Duration>,
    /// Load before the measurement, not counted.
    pub ramp: Duration,
    /// First byte used.
    pub offset: u64,
    /// Bytes used from `offset`; `None`: up to the end of the disk.
    pub size: Option<u64>,
    /// Stop after this many requests per queue.
    pub number_ios: Option<u64>,
    /// One flush after this many writes per queue; 0: none.
    pub fsync: u32,
    pub verify: bool,
    /// Keeps what each block should contain, for a later run.
    pub verify_state: Option<PathBuf>,
    /// Send no writes and only check what `verify_state` says.
    pub verify_only: bool,
    pub seed: u64,
    /// Pin worker i to the i-th of these CPUs, round robin; empty: not pinned.
    pub cpus: Vec<usize>,
    /// Count failed requests instead of stopping at the first.
    pub continue_on_error: bool,
    /// Refuse any load that would change the disk.
    pub readonly: bool,
    /// Give up when requests are in flight and none completes for this long.
    pub timeout: Duration,
    /// Set by anybody: ends the run early, with what was measured until then.
    pub stop: Arc<AtomicBool>,
}

/// fio's `rw`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rw {
    Read,
    Write,
    Trim,
    RandRead,
    RandWrite,
    RandTrim,
    ReadWrite,
    RandRw,
}

impl Rw {
    /// All of them.
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

    /// Offsets drawn at random instead of following each other.
    pub fn is_random(self) -> bool {
        matches!(
            self,
            Rw::RandRead | Rw::RandWrite | Rw::RandTrim | Rw::RandRw
        )
    }

    /// Sends nothing but reads.
    pub fn is_read_only(self) -> bool {
        matches!(self, Rw::Read | Rw::RandRead)
    }

    /// fio's spelling.
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

/// The largest ring that is used; real drivers stop here too.
pub const MAX_QUEUE_SIZE: u16 = 1024;
/// VIRTIO_BLK sector, the unit of offsets on the wire.
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
    /// The defaults for a server at `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        VhostUser {
            socket: socket.into(),
            queue_size: None,
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
    /// The defaults for an export.
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
    /// The defaults for a file at `path`.
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
    /// Refuses what cannot work whatever the disk is.
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

    /// Whether any request changes the disk.
    pub fn writes(&self) -> bool {
        !self.verify_only && (!self.rw.is_read_only() || self.rwmixtrim + self.rwmixzero > 0)
    }
}

impl VhostUser {
    fn validate(&self, load: &Load) -> Result<()> {
        if let Some(size) = self.queue_size
            && (!size.is_power_of_two() || !(2..=MAX_QUEUE_SIZE).contains(&size))
        {
            return refuse(format!(
                "--queue-size must be a power of two from 2 to {MAX_QUEUE_SIZE}"
            ));
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

    /// Data descriptors of one request.
    pub fn segments(&self, load: &Load) -> u32 {
        load.bs.div_ceil(self.segment_size.unwrap_or(load.bs))
    }

    /// Ring entries that one request takes.
    pub fn entries_per_request(&self, load: &Load) -> u32 {
        if self.indirect {
            1
        } else {
            self.segments(load) + 2
        }
    }

    /// The ring size in entries.
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
