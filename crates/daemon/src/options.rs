//! What `fathom serve` is told.

use fathom_exports::Access;
use fathom_exports::nbd::{Address, TlsMode};
use fathom_stack::Description;
use fathom_units::parse_duration;
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
    pub fn new(disk: Description, socket: SocketSpec) -> ServeOptions {
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

/// One disk, and who may use it.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// What `fathom stats` and the like call it.
    pub name: String,
    pub disk: Description,
    /// None: no virtual machine.
    pub vhost_user: Option<SocketSpec>,
    /// Of that socket, if it is made here.
    pub access: Access,
    /// None: not by NBD.
    pub nbd: Option<ExportOptions>,
    /// The most virtqueues, 1 to 256.
    pub queues: u16,
    /// What the guest sees as the disk's serial.
    pub serial: Option<String>,
    /// Trace to this file from the start.
    pub trace: Option<PathBuf>,
}

impl DiskOptions {
    /// The defaults for this disk, which nobody can reach.
    pub fn new(disk: Description) -> DiskOptions {
        DiskOptions {
            name: disk.location.to_string(),
            disk,
            vhost_user: None,
            access: Access::default(),
            nbd: None,
            queues: 64,
            serial: None,
            trace: None,
        }
    }

    /// Refuses what does not go together.
    pub(crate) fn validate(&self, has_nbd: bool) -> Result<(), String> {
        if self.vhost_user.is_none() && !(has_nbd && self.nbd.is_some()) {
            return Err("nobody could connect to it: it needs --vhost-user or --nbd".into());
        }
        let is_path = matches!(self.vhost_user, Some(SocketSpec::Path(_)));
        check_access(self.access, is_path)?;
        self.disk.check()
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

impl FromStr for SocketSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<SocketSpec, String> {
        SocketSpec::parse(OsStr::new(text))
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

#[cfg(test)]
#[path = "options_tests.rs"]
mod tests;
