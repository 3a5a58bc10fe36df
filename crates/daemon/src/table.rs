//! A disk as it is written in files and in messages: the command line's options, by their names.

pub(crate) mod changes;
mod pool;
mod pull;
mod specs;

use crate::access::{Group, Mode};
use crate::alarm::Alarm;
use crate::socket_spec::SocketSpec;
use crate::text;
use fathom_core::Polling;
use fathom_filters::Spec;
use fathom_formats::Format;
use fathom_stack::{CpuList, Description, KeySource, parse_format};
use fathom_storage::cached::FetchRate;
use fathom_storage::{Cache, CacheTerms, EngineKind, Location};
use fathom_units::Timeout;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use utoipa::ToSchema;

pub use pool::PoolTable;

/// Options of a disk: the keys of a `[[disk]]` in a configuration. An absent option has its default. The option
/// `--no-discard` of the command line is `discard` with the value `false` here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DiskTable {
    // (The API has it in the path, too, and a file that is kept is named after it.)
    /// Name of the disk. The body of a request may omit it, because the path names the disk.
    #[serde(default)]
    #[schema(pattern = "^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}$", required = false)]
    pub name: String,
    /// Location of the image: a path, `memory:SIZE`, `null:SIZE`, the URI of an NBD export, or `rbd:POOL/IMAGE`.
    #[serde(with = "text")]
    #[schema(value_type = String, examples("/srv/disk.qcow2", "memory:4G"))]
    pub image: Location,
    /// Socket for a virtual machine: a path, or `fd:N` for an inherited socket [default: none]
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub vhost_user: Option<SocketSpec>,
    /// Mode of the disk's sockets, such as "660" [default: 660 less the umask]
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub socket_mode: Option<Mode>,
    /// Group of the disk's sockets [default: the server's group]
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub socket_group: Option<Group>,
    /// Export the disk to NBD clients. A disk that the API adds while one of the listeners authenticates no client is
    /// exported only with `true` [default: true, if the server listens for NBD clients]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nbd: Option<bool>,
    /// Name of the NBD export [default: the disk's name]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub export_name: Option<String>,
    /// Allow another server to take the disk over. NBD clients can only read [default: false]
    #[serde(default, skip_serializing_if = "is_false")]
    pub nbd_move: bool,
    /// Description of the NBD export that clients can list [default: none]
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub export_description: String,
    /// Format of the image [default: raw, if the image does not look like another format]
    #[serde(
        default,
        deserialize_with = "format",
        serialize_with = "text::optional::serialize",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub format: Option<Format>,
    /// Start of the disk in a raw image, in bytes: a multiple of 512 [default: 0]
    #[serde(
        default,
        deserialize_with = "text::size",
        skip_serializing_if = "Option::is_none"
    )]
    pub offset: Option<u64>,
    /// Size of the disk in a raw image, in bytes [default: up to the end of the image]
    #[serde(
        default,
        deserialize_with = "text::size",
        skip_serializing_if = "Option::is_none"
    )]
    pub size: Option<u64>,
    /// Maximum memory for the tables of a qcow2 or QED image, in bytes: at least 64k [default: 32M]
    #[serde(
        default,
        deserialize_with = "text::size",
        skip_serializing_if = "Option::is_none"
    )]
    pub metadata_cache: Option<u64>,
    /// Read zeroes from clusters behind the end of a truncated image file. Without this option, such reads fail
    /// [default: false]
    #[serde(default, skip_serializing_if = "is_false")]
    pub zero_missing_clusters: bool,
    /// Directories in which the image may name files, besides the image's own directory [default: none]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub allow_dirs: Vec<PathBuf>,
    /// Path of the external data file of a qcow2 image, which is then written. Without this option, an image that has
    /// an external data file can only be read [default: none]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub data_file: Option<PathBuf>,
    /// Directory of the disk's dirty bitmaps [default: the path of the image with `.bitmaps` appended]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub bitmaps: Option<PathBuf>,
    /// Places of the keys that unlock encrypted images, such as `file:/etc/fathom/vm1.key` [default: none]
    #[serde(default, with = "text::list", skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub keys: Vec<KeySource>,
    /// Let guests and clients only read [default: false]
    #[serde(default, skip_serializing_if = "is_false")]
    pub readonly: bool,
    /// I/O engine: `io_uring`, `native` or `threads` [default: io_uring]
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub aio: Option<EngineKind>,
    /// Register the guest's memory with io_uring, which pins all of that memory [default: false]
    #[serde(default, skip_serializing_if = "is_false")]
    pub register_memory: bool,
    /// Cache mode: `none`, `writeback` or `writethrough` [default: none]
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub cache: Option<Cache>,
    /// For an image on an NBD server: time without a reply after which the NBD server counts as failed, or `off`
    /// [default: 60s]
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub server_timeout: Option<Timeout>,
    /// For an image on an NBD server: time that requests wait for an unreachable NBD server, or `off` [default: 60s]
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub server_reconnect: Option<Timeout>,
    /// For an image on an NBD server: number of connections of each I/O thread [default: 1]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 16)]
    pub server_connections: Option<u8>,
    /// Location of a remote base image, which becomes the backing image of the disk's image. The server fetches data
    /// from it as needed, and caches the data on this host [default: none]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// Directory of the cache of base images [default: `/var/cache/fathom` for root, `fathom` in the user's cache
    /// directory otherwise]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub base_cache: Option<PathBuf>,
    /// Maximum size of the cache of base images, in bytes [default: 64G]
    #[serde(
        default,
        deserialize_with = "text::size",
        skip_serializing_if = "Option::is_none"
    )]
    pub base_cache_size: Option<u64>,
    /// Number of bytes of the base image to fetch in advance per second, or `off` [default: 64M]
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub base_fetch: Option<FetchRate>,
    /// Path of a manifest with checksums of the base image [default: none]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub base_manifest: Option<PathBuf>,
    /// Path of a boot profile: the list of the parts of the base image to fetch first [default: none]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub base_profile: Option<PathBuf>,
    /// NBD URI of the server from which the disk moves to this server [default: none]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull: Option<String>,
    /// Path of the file that records the progress of the move [default: the path of the image with `.pull` appended]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub pull_record: Option<PathBuf>,
    /// Maximum number of bytes copied per second during the move [default: no limit]
    #[serde(
        default,
        deserialize_with = "text::size",
        skip_serializing_if = "Option::is_none"
    )]
    pub pull_speed: Option<u64>,
    /// Take the disk over at once, and copy its data while the guest runs here. Data that the guest accesses is copied
    /// first [default: false]
    #[serde(default, skip_serializing_if = "is_false")]
    pub pull_post_copy: bool,
    /// Open a read-only image even if another process writes to it [default: false]
    #[serde(default, skip_serializing_if = "is_false")]
    pub force_share: bool,
    /// Write to the image although a newer image has superseded it. All writes to the newer image are lost [default:
    /// false]
    #[serde(default, skip_serializing_if = "is_false")]
    pub allow_superseded: bool,
    /// Offer discard to guests and clients [default: true]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub discard: Option<bool>,
    /// Maximum number of virtqueues [default: 64]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 256)]
    pub queues: Option<u16>,
    /// Number of the disk's own threads [default: 1]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 256)]
    pub iothreads: Option<u16>,
    /// CPUs to which the disk's threads are pinned, such as "2-3,8" [default: no pinning]
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub cpus: Option<CpuList>,
    /// Time that a thread polls for requests before it sleeps, such as "20us", or `auto`, `auto:TIME` or `off`
    /// [default: auto]
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub poll: Option<Polling>,
    /// Name of the pool whose threads serve the disk [default: the disk has threads of its own]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Name of the tenant whose process serves the disk, in a server with tenants [default: the disk's name]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}$")]
    pub tenant: Option<String>,
    /// Serial number that the guest sees, at most 20 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Limits for the durations of requests, which raise an alarm: such as `p99=5ms`, `read:p50=1ms`, `older=10s`
    /// [default: none]
    #[serde(default, with = "text::list", skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub alarms: Vec<Alarm>,
    /// Path of the file to which requests are traced [default: none]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub trace: Option<PathBuf>,
    /// Filters for all requests, such as `throttle:iops-total=3000`, from the one closest to the guest to the one
    /// closest to the image [default: none]
    #[serde(
        default,
        deserialize_with = "specs::read",
        serialize_with = "specs::write",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schema(value_type = Vec<String>)]
    pub filters: Vec<Spec>,
}

/// The longest name of a disk that is added.
const MAX_NAME: usize = 64;
/// The most virtqueues of a guest.
pub const DEFAULT_QUEUES: u16 = 64;
/// virtio-blk's GET_ID has room for so many bytes.
const MAX_SERIAL: usize = 20;

impl DiskTable {
    /// With nothing but defaults.
    pub fn new(name: String, image: Location) -> DiskTable {
        DiskTable {
            name,
            image,
            vhost_user: None,
            socket_mode: None,
            socket_group: None,
            nbd: None,
            export_name: None,
            nbd_move: false,
            export_description: String::new(),
            format: None,
            offset: None,
            size: None,
            metadata_cache: None,
            zero_missing_clusters: false,
            allow_dirs: Vec::new(),
            data_file: None,
            bitmaps: None,
            keys: Vec::new(),
            readonly: false,
            aio: None,
            register_memory: false,
            cache: None,
            server_timeout: None,
            server_reconnect: None,
            server_connections: None,
            base: None,
            base_cache: None,
            base_cache_size: None,
            base_fetch: None,
            base_manifest: None,
            base_profile: None,
            pull: None,
            pull_record: None,
            pull_speed: None,
            pull_post_copy: false,
            force_share: false,
            allow_superseded: false,
            discard: None,
            queues: None,
            iothreads: None,
            cpus: None,
            poll: None,
            pool: None,
            tenant: None,
            serial: None,
            alarms: Vec::new(),
            trace: None,
            filters: Vec::new(),
        }
    }

    /// The same, with nothing said that goes without saying.
    pub(crate) fn without_defaults(mut self) -> DiskTable {
        fn drop_default<T: PartialEq>(value: &mut Option<T>, default: T) {
            value.take_if(|value| *value == default);
        }
        let new = Description::new(self.image.clone());
        drop_default(&mut self.aio, new.engine);
        drop_default(&mut self.cache, new.cache);
        drop_default(&mut self.discard, new.discard);
        drop_default(&mut self.iothreads, new.iothreads as u16);
        drop_default(&mut self.poll, new.polling);
        drop_default(&mut self.queues, DEFAULT_QUEUES);
        drop_default(&mut self.export_name, self.name.clone());
        drop_default(&mut self.tenant, self.name.clone());
        self
    }

    /// Names the format of the image, as the file of a persistent disk does: a guest may write to a raw disk what
    /// looks like another format, and the disk is served again when the server restarts.
    pub(crate) fn with_format(mut self) -> DiskTable {
        self.format.get_or_insert(Format::Raw);
        self
    }

    /// With another image, of the same disk.
    pub(crate) fn on(self, image: Location, format: Option<Format>) -> DiskTable {
        let has_tables = format.is_some_and(Format::has_tables);
        DiskTable {
            format,
            metadata_cache: self.metadata_cache.filter(|_| has_tables),
            zero_missing_clusters: false,
            // What was said of the one that there was.
            offset: None,
            size: None,
            allow_dirs: Vec::new(),
            data_file: None,
            bitmaps: None,
            server_timeout: None,
            server_reconnect: None,
            server_connections: None,
            base: None,
            base_cache: None,
            base_cache_size: None,
            base_fetch: None,
            base_manifest: None,
            base_profile: None,
            pull: None,
            pull_record: None,
            pull_speed: None,
            pull_post_copy: false,
            allow_superseded: false,
            ..DiskTable { image, ..self }
        }
    }

    /// How base images are kept on this host.
    pub(crate) fn cache_terms(&self) -> CacheTerms {
        let new = CacheTerms::default();
        CacheTerms {
            dir: self.base_cache.clone().unwrap_or(new.dir),
            size: self.base_cache_size.unwrap_or(new.size),
            rate: self.base_fetch.map_or(new.rate, |rate| rate.0),
            manifest: self.base_manifest.clone(),
            profile: self.base_profile.clone(),
        }
    }

    /// Whether an NBD server is needed for the disk.
    pub(crate) fn is_server(&self, uri: &str) -> bool {
        self.image.to_string() == uri || self.pull.as_deref() == Some(uri)
    }

    /// Change options of a filter; an empty value is the option's default.
    pub(crate) fn set_filter(&mut self, index: usize, options: &BTreeMap<String, String>) {
        let Some(filter) = self.filters.get_mut(index) else {
            return;
        };
        for (key, value) in options {
            filter.options.retain(|(other, _)| other != key);
            if !value.is_empty() {
                filter.options.push((key.clone(), value.clone()));
            }
        }
    }

    /// Refuses paths that depend on whose working directory is meant.
    pub(crate) fn check_paths(&self) -> Result<(), String> {
        let socket = match &self.vhost_user {
            Some(SocketSpec::Path(path)) => Some(&**path),
            _ => None,
        };
        let files = [
            &self.data_file,
            &self.bitmaps,
            &self.trace,
            &self.pull_record,
        ];
        let files = files.into_iter().flatten();
        let files = files.chain(&self.allow_dirs).map(PathBuf::as_path);
        let mut all = files.chain(self.image.path()).chain(socket);
        all.try_for_each(check_path)?;
        self.check_keys()
    }

    /// Likewise of its keys; and those that only a process has that was started with them.
    pub(crate) fn check_keys(&self) -> Result<(), String> {
        let mut paths = self.keys.iter().filter_map(KeySource::path);
        paths.try_for_each(check_path)?;
        match self.keys.iter().find(|key| !key.is_anywhere()) {
            None => Ok(()),
            Some(key) => Err(format!(
                "{key}: only the server's command line accepts such a key; use file:PATH or \
                 credential:NAME"
            )),
        }
    }

    /// Refuses what does not go together.
    pub(crate) fn check(&self, has_nbd: bool) -> Result<(), String> {
        if self.nbd == Some(true) && !has_nbd {
            return Err("nbd = true: needs a table [nbd]".into());
        }
        if self.force_share && !self.readonly {
            return Err("force-share: needs readonly = true".into());
        }
        for (option, value) in [("queues", self.queues), ("iothreads", self.iothreads)] {
            if value.is_some_and(|n| !(1..=256).contains(&n)) {
                return Err(format!("{option}: not a number from 1 to 256"));
            }
        }
        self.check_pool()?;
        if let Some(tenant) = &self.tenant {
            check_name(tenant).map_err(|_| {
                "tenant: not 1 to 64 letters, digits, -, _ and ., not beginning with a dot"
                    .to_owned()
            })?;
        }
        match &self.serial {
            Some(serial) if serial.len() > MAX_SERIAL => {
                Err(format!("serial: longer than {MAX_SERIAL} bytes"))
            }
            _ => Ok(()),
        }
    }

    /// Refuses what is the pool's to say.
    fn check_pool(&self) -> Result<(), String> {
        let Some(pool) = &self.pool else {
            return Ok(());
        };
        let given = [
            ("aio", self.aio.is_some()),
            ("iothreads", self.iothreads.is_some()),
            ("cpus", self.cpus.is_some()),
            ("poll", self.poll.is_some()),
        ];
        match given.iter().find(|(_, is_given)| *is_given) {
            Some((option, _)) => Err(format!(
                "{option}: excluded by pool = {pool:?}, whose table sets it for all disks of the \
                 pool; remove one of the two"
            )),
            None => Ok(()),
        }
    }
}

/// Refuses a name that cannot be a file's and a directory's, too: those of disks that are added, of
/// tenants and of pools.
pub fn check_name(name: &str) -> Result<(), String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    match (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(is_plain) {
        true => check_first(name),
        false => Err(format!(
            "'{name}' is not a disk's name, which has 1 to {MAX_NAME} letters, digits, -, _ and ."
        )),
    }
}

/// Refuses a name that begins with a dot: such a file in disks-dir is hidden, or not finished.
pub fn check_first(name: &str) -> Result<(), String> {
    match name.starts_with('.') {
        true => Err(format!(
            "not a disk's name, which does not begin with a dot; call it '{}', for example",
            name.trim_start_matches('.')
        )),
        false => Ok(()),
    }
}

/// A path from another process has to be absolute.
pub fn check_path(path: &Path) -> Result<(), String> {
    match path.is_absolute() {
        true => Ok(()),
        false => Err(format!("{}: not an absolute path", path.display())),
    }
}

fn is_false(value: &bool) -> bool {
    !value
}

fn format<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Format>, D::Error> {
    text::optional::parse(from, parse_format)
}
