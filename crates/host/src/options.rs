//! The options of `fathom serve`.

use crate::access::access;
use crate::error::Error;
use crate::pull_terms::pull_terms;
use crate::stop_timeout::StopTimeout;
use crate::tenancy::Tenancy;
use fathom_api::ApiOptions;
use fathom_exports::nbd::{Address, TlsMode};
use fathom_jobs::pull;
use fathom_metrics::Events;
use fathom_sandbox::Mode;
use fathom_sockets::Access;
use fathom_spec::{Alarm, DEFAULT_QUEUES, DiskSpec, SocketSpec, check_text};
use fathom_stack::{Description, KeyRing, PoolOptions};
use fathom_storage::OnSuperseded;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// The options of one server.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Disks, each with a unique name.
    pub disks: Vec<DiskOptions>,
    /// Pools of threads that disks share, each with a unique name.
    pub pools: Vec<PoolOptions>,
    /// None: the server has no NBD clients.
    pub nbd: Option<NbdOptions>,
    /// Where the API listens, and which clients it accepts.
    pub api: ApiOptions,
    /// The configuration file, from which these options come and which is read again on request.
    /// None: the server has no configuration file.
    pub config: Option<PathBuf>,
    /// The directory of the definitions of persistent disks. None: added disks are lost when the
    /// server stops.
    pub kept: Option<PathBuf>,
    /// Whether each tenant has a process of its own.
    pub tenants: bool,
    /// Users and resource limits of tenants.
    pub tenancy: Tenancy,
    /// Receives the server's events.
    pub events: Events,
    /// Restricts what compromised threads can do.
    pub sandbox: Mode,
    /// Time that stopping may take.
    pub stop_timeout: StopTimeout,
    /// This process's arguments, with which a successor is started.
    pub arguments: Vec<OsString>,
}

impl ServeOptions {
    /// Returns options with one disk, and defaults for everything else.
    pub fn of(disk: DiskOptions) -> ServeOptions {
        ServeOptions {
            disks: vec![disk],
            pools: Vec::new(),
            nbd: None,
            api: ApiOptions::default(),
            config: None,
            kept: None,
            tenants: false,
            tenancy: Tenancy::default(),
            events: Events::default(),
            sandbox: Mode::default(),
            stop_timeout: StopTimeout::default(),
            arguments: Vec::new(),
        }
    }

    /// Rejects options that exclude each other.
    pub fn validate(&self) -> Result<(), String> {
        let several = self.disks.len() > 1;
        if let Some(nbd) = &self.nbd {
            nbd.validate()?;
        }
        for (i, disk) in self.disks.iter().enumerate() {
            if self.disks[..i].iter().any(|other| other.name == disk.name) {
                return Err(format!(
                    "two disks are named '{}'; rename one of them",
                    disk.name
                ));
            }
            let checked = disk.validate(self.nbd.is_some());
            let checked = checked.and_then(|()| match (&disk.fuse, self.tenants) {
                (Some(_), true) => {
                    Err("fuse: a server with tenants mounts no files; remove it".into())
                }
                _ => Ok(()),
            });
            checked.map_err(|problem| match several {
                true => format!("disk '{}': {problem}", disk.name),
                false => problem,
            })?;
        }
        Ok(())
    }
}

/// Where and how NBD clients may connect.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NbdOptions {
    /// Addresses, at least one.
    pub listen: Vec<Address>,
    /// Permissions of Unix sockets that the server creates.
    pub access: Access,
    /// TLS for NBD clients. `None`: connections are not encrypted.
    pub tls: Option<TlsOptions>,
    /// Maximum number of connections, at least 1. None: the default of
    /// [`fathom_exports::nbd::Options`].
    pub max_connections: Option<usize>,
    /// Maximum number of connections of one user, address or virtual machine, at least 1. None: the
    /// default of [`fathom_exports::nbd::Options`].
    pub max_per_peer: Option<usize>,
    /// Time after which a connection without a request is closed. None: never.
    pub idle_timeout: Option<Duration>,
}

impl NbdOptions {
    /// Rejects options that exclude each other.
    pub fn validate(&self) -> Result<(), String> {
        let is_unix = |address: &Address| matches!(address, Address::Unix(_));
        check_access(self.access, self.listen.iter().any(is_unix))
    }
}

/// TLS. Names of files in the directory are those of nbdkit and QEMU: server-cert.pem,
/// server-key.pem, ca-cert.pem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsOptions {
    /// Whether clients can use TLS, or must use it.
    pub mode: TlsMode,
    /// Directory of the certificates and the key.
    pub certificates: PathBuf,
    /// Clients need a certificate that is signed by ca-cert.pem.
    pub verify_peer: bool,
}

impl TlsOptions {
    /// Whether every client must show a certificate.
    pub fn authenticates(&self) -> bool {
        self.verify_peer && matches!(self.mode, TlsMode::Require)
    }
}

/// How NBD clients see a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportOptions {
    /// The export's name in the NBD protocol.
    pub name: String,
    /// A description, for people.
    pub description: String,
    /// Whether another server may take the disk over. Clients can only read.
    pub may_be_moved: bool,
}

impl ExportOptions {
    /// Returns a disk's export. None: the disk has no export.
    fn of(table: &DiskSpec) -> Result<Option<ExportOptions>, String> {
        if table.nbd == Some(false) {
            return Ok(None);
        }
        let name = table.export_name.clone();
        let export = ExportOptions {
            name: name.unwrap_or_else(|| table.name.clone()),
            description: table.export_description.clone(),
            may_be_moved: table.nbd_move,
        };
        for (key, text) in [
            ("export-name", &export.name),
            ("export-description", &export.description),
        ] {
            check_text(text).map_err(|problem| format!("{key}: {problem}"))?;
        }
        Ok(Some(export))
    }
}

/// The file by which programs use a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FuseOptions {
    /// The mount point, an existing regular file.
    pub file: PathBuf,
    /// Whether programs may write.
    pub is_writable: bool,
}

/// The options of one disk.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// The disk's name in commands such as `fathom stats`.
    pub name: String,
    /// Location, format and access method of the disk's data.
    pub disk: Description,
    /// Socket of vhost-user front-ends. None: no virtual machine uses the disk.
    pub vhost_user: Option<SocketSpec>,
    /// Permissions of that socket, if the server creates it.
    pub access: Access,
    /// None: the disk has no NBD export.
    pub nbd: Option<ExportOptions>,
    /// The file over which the disk is mounted. None: the disk has no such file.
    pub fuse: Option<FuseOptions>,
    /// Maximum number of virtqueues, 1 to 256.
    pub queues: u16,
    /// Offer packed virtqueues.
    pub packed: bool,
    /// The disk's serial number, as the guest sees it.
    pub serial: Option<String>,
    /// File for a trace of requests, which begins when the disk is opened.
    pub trace: Option<PathBuf>,
    /// Conditions under which the server reports slow requests.
    pub alarms: Vec<Alarm>,
    /// Terms on which the disk is moved here from another server. None: the disk does not move.
    pub pull: Option<pull::Terms>,
    /// The definition that these options come from, without options at their defaults.
    pub spec: Box<DiskSpec>,
    /// `FILE:LINE` of its definition, if a configuration defines it.
    pub defined_at: Option<String>,
}

impl DiskOptions {
    /// Converts a definition to options, and checks them. The error is one line for the user.
    pub fn of(table: DiskSpec, has_nbd: bool) -> Result<DiskOptions, String> {
        let export = ExportOptions::of(&table)?;
        table.check(has_nbd)?;
        let spec = Box::new(table.clone().without_defaults());
        let base_cache = table.cache_terms();
        let pull = pull_terms(&table)?;
        let fuse = table.fuse.map(|file| FuseOptions {
            file,
            is_writable: table.fuse_writable,
        });
        let new = Description::new(table.image);
        let disk = Description {
            base_cache,
            base: table.base,
            format: table.format,
            offset: table.offset,
            size: table.size,
            metadata_cache: table.metadata_cache,
            zero_missing_clusters: table.zero_missing_clusters,
            allow_dirs: table.allow_dirs,
            data_file: table.data_file,
            bitmaps: table.bitmaps,
            keys: KeyRing::new(table.keys),
            read_only: table.readonly,
            engine: table.aio.unwrap_or(new.engine),
            register_memory: table.register_memory,
            cache: table.cache.unwrap_or(new.cache),
            server_timeout: table.server_timeout,
            server_reconnect: table.server_reconnect,
            server_connections: table.server_connections,
            force_share: table.force_share,
            succeeds: false,
            superseded: match table.allow_superseded {
                true => OnSuperseded::Take,
                false => OnSuperseded::Refuse,
            },
            discard: table.discard.unwrap_or(new.discard),
            iothreads: table.iothreads.map_or(new.iothreads, usize::from),
            cpus: table.cpus.unwrap_or_default(),
            polling: table.poll.unwrap_or(new.polling),
            pool: table.pool,
            filters: table.filters,
            ..new
        };
        let options = DiskOptions {
            name: table.name,
            disk,
            vhost_user: table.vhost_user,
            access: access(table.socket_mode, table.socket_group),
            nbd: export.filter(|_| has_nbd),
            fuse,
            queues: table.queues.unwrap_or(DEFAULT_QUEUES),
            packed: table.packed,
            serial: table.serial,
            trace: table.trace,
            alarms: table.alarms,
            pull,
            spec,
            defined_at: None,
        };
        options.validate(has_nbd)?;
        Ok(options)
    }

    /// Whether the server may start without the disk, and opens it later: a configuration defines
    /// it, and it needs no socket that is passed at the start.
    pub fn can_be_opened_later(&self) -> bool {
        let is_passed = !matches!(self.vhost_user, None | Some(SocketSpec::Path(_)));
        self.defined_at.is_some() && !is_passed
    }

    /// Adds the disk's name and the place of its definition to an error, if a configuration defines
    /// the disk.
    pub fn blame(&self, error: Error) -> Error {
        match &self.defined_at {
            Some(place) => Error::Options(format!("{place}: disk '{}': {error}", self.name)),
            None => error,
        }
    }

    /// Rejects options that exclude each other.
    pub fn validate(&self, has_nbd: bool) -> Result<(), String> {
        let has_nbd = has_nbd && self.nbd.is_some();
        if self.vhost_user.is_none() && !has_nbd && self.fuse.is_none() {
            return Err(
                "no client could connect to the disk; add --vhost-user, --nbd or --fuse".into(),
            );
        }
        let is_path = matches!(self.vhost_user, Some(SocketSpec::Path(_)));
        check_access(self.access, is_path)?;
        self.disk.check()
    }
}

/// Rejects permissions without a socket that the server creates: inherited sockets belong to the
/// process that created them, and TCP sockets have no permissions.
fn check_access(access: Access, is_made_here: bool) -> Result<(), String> {
    match access == Access::default() || is_made_here {
        true => Ok(()),
        false => Err(
            "--socket-mode and --socket-group apply only to Unix sockets given by a path".into(),
        ),
    }
}

#[cfg(test)]
#[path = "options_tests.rs"]
mod tests;
