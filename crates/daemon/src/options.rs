//! What `fathom serve` is told.

use crate::inject::Injection;
use crate::magic;
use fathom_core::Polling;
use fathom_exports::Access;
use fathom_exports::nbd::{Address, TlsMode};
use fathom_filters::Spec;
use fathom_formats::Format;
use fathom_formats::served::DEFAULT_METADATA_CACHE;
use fathom_storage::{Cache, EngineKind, NbdUri};
use fathom_units::{parse_duration, parse_size};
use std::ffi::OsStr;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// One daemon.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// At least one, each with a name of its own.
    pub disks: Vec<DiskOptions>,
    /// None: no NBD clients.
    pub nbd: Option<NbdOptions>,
    /// None: where [`crate::control::default_path`] says.
    pub control: Option<PathBuf>,
    /// How long stopping may take.
    pub stop_timeout: StopTimeout,
}

/// When what is still in flight after a request to stop is abandoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopTimeout(pub Duration);

impl Default for StopTimeout {
    fn default() -> StopTimeout {
        StopTimeout(Duration::from_secs(10))
    }
}

impl FromStr for StopTimeout {
    type Err = String;

    fn from_str(text: &str) -> Result<StopTimeout, String> {
        // Added to a point in time later.
        let is_short = |time: &Duration| *time <= Duration::from_secs(24 * 60 * 60);
        let time = parse_duration(text).ok().filter(is_short);
        let bad = || format!("'{text}' is not a time such as 10s, a day at most");
        time.map(StopTimeout).ok_or_else(bad)
    }
}

impl fmt::Display for StopTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl ServeOptions {
    /// One disk at one vhost-user socket.
    pub fn new(disk: DiskSpec, socket: SocketSpec) -> ServeOptions {
        let mut disk = DiskOptions::new(disk);
        disk.vhost_user = Some(socket);
        ServeOptions::of(disk)
    }

    /// One disk.
    pub fn of(disk: DiskOptions) -> ServeOptions {
        ServeOptions {
            disks: vec![disk],
            nbd: None,
            control: None,
            stop_timeout: StopTimeout::default(),
        }
    }

    /// Refuses what does not go together.
    pub(crate) fn validate(&self) -> Result<(), String> {
        let several = self.disks.len() > 1;
        if let Some(nbd) = &self.nbd {
            nbd.validate()?;
        }
        for (i, disk) in self.disks.iter().enumerate() {
            if self.disks[..i].iter().any(|other| other.name == disk.name) {
                return Err(format!("two disks have the name '{}'", disk.name));
            }
            let checked = disk.validate(self.nbd.is_some());
            checked.map_err(|problem| match several {
                true => format!("disk '{}': {problem}", disk.name),
                false => problem,
            })?;
        }
        Ok(())
    }
}

/// Who may connect by NBD, and how.
#[derive(Clone, Debug, Default)]
pub struct NbdOptions {
    /// At least one.
    pub listen: Vec<Address>,
    /// Of Unix sockets that are made here.
    pub access: Access,
    pub tls: Option<TlsOptions>,
    /// Connections at once, at least 1; None: as many as
    /// [`fathom_exports::nbd::Options`] has.
    pub max_connections: Option<usize>,
    /// Of these, of one user, address or virtual machine, at least 1.
    pub max_per_peer: Option<usize>,
    /// A connection without a request for so long is ended; None: never.
    pub idle_timeout: Option<Duration>,
}

impl NbdOptions {
    /// Refuses what does not go together.
    pub(crate) fn validate(&self) -> Result<(), String> {
        let is_unix = |address: &Address| matches!(address, Address::Unix(_));
        check_access(self.access, self.listen.iter().any(is_unix))
    }
}

/// TLS, with files as nbdkit and QEMU have them in one directory:
/// server-cert.pem, server-key.pem, ca-cert.pem.
#[derive(Clone, Debug)]
pub struct TlsOptions {
    pub mode: TlsMode,
    pub certificates: PathBuf,
    /// Clients need a certificate that is signed by ca-cert.pem.
    pub verify_peer: bool,
}

/// How NBD clients see a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportOptions {
    /// What clients ask for.
    pub name: String,
    /// For people.
    pub description: String,
}

impl ExportOptions {
    /// Refuses what cannot be a name or a description.
    pub fn check(text: &str) -> Result<(), String> {
        match text.len() {
            0..=4096 if !text.contains('\0') => Ok(()),
            0..=4096 => Err("it has a NUL byte in it".into()),
            n => Err(format!("it has {n} bytes; 4096 are the most")),
        }
    }
}

/// One disk.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// What `fathom stats` and the like call it.
    pub name: String,
    pub disk: DiskSpec,
    /// None: no virtual machine.
    pub vhost_user: Option<SocketSpec>,
    /// Of that socket, if it is made here.
    pub access: Access,
    /// None: not by NBD.
    pub nbd: Option<ExportOptions>,
    /// None: raw, unless the image looks like something else.
    pub format: Option<Format>,
    /// Of a raw image: where the disk starts in it, and the disk's size.
    pub offset: Option<u64>,
    pub size: Option<u64>,
    /// Bytes of a qcow2 or QED image's tables in memory.
    pub metadata_cache: Option<u64>,
    /// Where the files that a qcow2 or QED image names may be, beside its own
    /// directory.
    pub allow_dirs: Vec<PathBuf>,
    /// The external data file of a qcow2 image, whatever the image calls it;
    /// None: what it calls it, to be read only.
    pub data_file: Option<PathBuf>,
    pub read_only: bool,
    pub engine: EngineKind,
    /// Pin guest memory, so that io_uring need not map it for each request.
    pub register_memory: bool,
    pub cache: Cache,
    /// How long the NBD server that has the disk may say nothing of a request
    /// before it is taken for dead; None: the default.
    pub server_timeout: Option<Timeout>,
    /// Read an image that others may be writing. Needs `read_only`.
    pub force_share: bool,
    /// The guest may discard.
    pub discard: bool,
    /// The most virtqueues, 1 to 256.
    pub queues: u16,
    /// Number of workers, at least 1.
    pub iothreads: usize,
    /// The CPUs that the workers may use, shared out among them; empty: any.
    pub cpus: CpuList,
    pub polling: Polling,
    /// What the guest sees as the disk's serial.
    pub serial: Option<String>,
    /// Trace to this file from the start.
    pub trace: Option<PathBuf>,
    /// Delay requests on purpose.
    pub inject: Option<Injection>,
    /// Filters around the disk, the first nearest to whoever uses it.
    pub filters: Vec<Spec>,
}

impl DiskOptions {
    /// The defaults for this disk, which nobody can reach.
    pub fn new(disk: DiskSpec) -> DiskOptions {
        DiskOptions {
            name: disk.to_string(),
            disk,
            vhost_user: None,
            access: Access::default(),
            nbd: None,
            format: None,
            offset: None,
            size: None,
            metadata_cache: None,
            allow_dirs: Vec::new(),
            data_file: None,
            read_only: false,
            engine: EngineKind::default(),
            register_memory: false,
            cache: Cache::default(),
            server_timeout: None,
            force_share: false,
            discard: true,
            queues: 64,
            iothreads: 1,
            cpus: CpuList::default(),
            polling: Polling::default(),
            serial: None,
            trace: None,
            inject: None,
            filters: Vec::new(),
        }
    }

    /// Refuses what does not go together.
    pub(crate) fn validate(&self, has_nbd: bool) -> Result<(), String> {
        if self.vhost_user.is_none() && !(has_nbd && self.nbd.is_some()) {
            return Err("nobody could connect to it: it needs --vhost-user or --nbd".into());
        }
        let is_path = matches!(self.vhost_user, Some(SocketSpec::Path(_)));
        check_access(self.access, is_path)?;
        if self.server_timeout.is_some() && !matches!(self.disk, DiskSpec::Nbd(_)) {
            return Err("--server-timeout is for disks of NBD servers (nbd://...)".into());
        }
        let format = self.format.unwrap_or(Format::Raw);
        let is_raw = format == Format::Raw;
        let window = [("--offset", self.offset), ("--size", self.size)];
        if !matches!(self.disk, DiskSpec::File(_)) {
            if !is_raw {
                return Err(format!("--format {format} is for images in files"));
            }
            if window.iter().any(|(_, value)| value.is_some()) {
                return Err("--offset and --size are for images in files".into());
            }
        }
        if !is_raw && window.iter().any(|(_, value)| value.is_some()) {
            return Err(format!(
                "--offset and --size are for raw images: a {format} image has a size of its own"
            ));
        }
        for (option, value) in window {
            if value.is_some_and(|value| !value.is_multiple_of(512)) {
                return Err(format!("{option} is not a multiple of 512"));
            }
        }
        if self.size == Some(0) {
            return Err("--size 0: a disk needs 512 bytes at least".into());
        }
        if is_raw && self.metadata_cache.is_some() {
            return Err("--metadata-cache is for qcow2 and qed images (--format)".into());
        }
        if self
            .metadata_cache
            .is_some_and(|size| size < MIN_METADATA_CACHE)
        {
            return Err("--metadata-cache needs 64k at least".into());
        }
        if is_raw && !self.allow_dirs.is_empty() {
            return Err("--allow-dir is for qcow2 and qed images (--format)".into());
        }
        if self.data_file.is_some() && format != Format::Qcow2 {
            return Err("--data-file is for qcow2 images (--format)".into());
        }
        Ok(())
    }

    /// See [`DiskOptions::metadata_cache`].
    pub(crate) fn metadata_cache(&self) -> u64 {
        self.metadata_cache.unwrap_or(DEFAULT_METADATA_CACHE)
    }
}

/// Inherited sockets are who made them's, and others have no permissions.
fn check_access(access: Access, is_made_here: bool) -> Result<(), String> {
    match access == Access::default() || is_made_here {
        true => Ok(()),
        false => {
            Err("--socket-mode and --socket-group are for Unix sockets given by a path".into())
        }
    }
}

/// The formats keep this much in any case.
const MIN_METADATA_CACHE: u64 = 64 << 10;

/// Where the disk's bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskSpec {
    File(PathBuf),
    /// Bytes.
    Memory(u64),
    /// Bytes.
    Null(u64),
    /// An NBD server has them.
    Nbd(NbdUri),
}

impl DiskSpec {
    /// A path, `memory:SIZE`, `null:SIZE` or an NBD URI. (A file with such a
    /// name is written `./memory:4G`.)
    pub fn parse(text: &OsStr) -> Result<DiskSpec, String> {
        let Some((kind, size)) = text.to_str().and_then(|text| text.split_once(':')) else {
            return Ok(DiskSpec::File(text.into()));
        };
        if let Some(uri) = text.to_str().filter(|text| NbdUri::is_one(text)) {
            return uri.parse().map(DiskSpec::Nbd);
        }
        let make = match kind {
            "memory" => DiskSpec::Memory,
            "null" => DiskSpec::Null,
            scheme if size.starts_with("//") => {
                return Err(format!(
                    "disks are not served from {scheme}://, but from nbd://, nbd+unix:// and \
                     nbd+vsock:// (a file of that name is written ./{scheme}:...)"
                ));
            }
            _ => return Ok(DiskSpec::File(text.into())),
        };
        match parse_size(size)? {
            0..512 => Err("a disk needs 512 bytes at least".into()),
            size if size > i64::MAX as u64 => Err(format!("'{size}' is too large for a disk")),
            size => Ok(make(size)),
        }
    }
}

impl fmt::Display for DiskSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DiskSpec::File(path) => write!(f, "{}", path.display()),
            DiskSpec::Memory(size) => write!(f, "memory:{size}"),
            DiskSpec::Null(size) => write!(f, "null:{size}"),
            DiskSpec::Nbd(uri) => write!(f, "{uri}"),
        }
    }
}

/// A time to wait for something at most; None: for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeout(pub Option<Duration>);

impl FromStr for Timeout {
    type Err = String;

    /// A time such as `30s`, or `off`.
    fn from_str(text: &str) -> Result<Timeout, String> {
        match text {
            "off" => Ok(Timeout(None)),
            _ => match parse_duration(text).ok().filter(|time| !time.is_zero()) {
                Some(time) => Ok(Timeout(Some(time))),
                None => Err(format!("'{text}' is not off, or a time such as 30s")),
            },
        }
    }
}

/// Where front-ends connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SocketSpec {
    Path(PathBuf),
    /// A listening socket inherited under this number.
    Fd(i32),
    /// The socket that a service manager passes (sd_listen_fds(3)).
    Activated,
}

impl SocketSpec {
    /// A path or `fd:N`.
    pub fn parse(text: &OsStr) -> Result<SocketSpec, String> {
        let Some(number) = text.to_str().and_then(|text| text.strip_prefix("fd:")) else {
            return Ok(SocketSpec::Path(text.into()));
        };
        match number.parse() {
            Ok(fd) if fd >= 0 => Ok(SocketSpec::Fd(fd)),
            _ => Err(format!("'{number}' is not the number of a file descriptor")),
        }
    }
}

impl fmt::Display for SocketSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SocketSpec::Path(path) => write!(f, "{}", path.display()),
            SocketSpec::Fd(fd) => write!(f, "fd:{fd}"),
            SocketSpec::Activated => f.write_str("from the service manager"),
        }
    }
}

/// The format of that name.
pub fn parse_format(text: &str) -> Result<Format, String> {
    match Format::from_name(text) {
        Err(_) if fathom_files::magic::FORMATS.contains(&text) => Err(magic::unsupported(text)),
        other => other.map_err(|error| error.to_string()),
    }
}

/// CPU numbers as taskset(1) writes them: `0`, `2-5`, `0,4-7`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuList(Vec<usize>);

impl CpuList {
    /// The share of worker `worker` of `workers`: every CPU goes to one
    /// worker while there are enough of them, else workers share CPUs.
    pub fn share(&self, worker: usize, workers: usize) -> Vec<usize> {
        let CpuList(cpus) = self;
        if cpus.len() < workers {
            let turn = cpus.iter().cycle().nth(worker);
            return turn.copied().into_iter().collect();
        }
        cpus.iter().skip(worker).step_by(workers).copied().collect()
    }

    /// One that the other list does not have.
    pub(crate) fn first_not_in(&self, other: &CpuList) -> Option<usize> {
        let mut cpus = self.0.iter().copied();
        cpus.find(|cpu| !other.0.contains(cpu))
    }
}

impl FromStr for CpuList {
    type Err = String;

    fn from_str(text: &str) -> Result<CpuList, String> {
        let bad = || format!("'{text}' is not a list of CPUs like 0,2-3");
        // What sched_setaffinity(2) takes in a cpu_set_t.
        let cpu = |number: &str| number.parse().ok().filter(|cpu: &usize| *cpu < 1024);
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            match (cpu(first), cpu(last)) {
                (Some(first), Some(last)) if first <= last => cpus.extend(first..=last),
                _ => return Err(bad()),
            }
        }
        cpus.sort_unstable();
        cpus.dedup();
        Ok(CpuList(cpus))
    }
}

#[cfg(test)]
#[path = "options_tests.rs"]
mod tests;
