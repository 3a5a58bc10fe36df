//! A disk's options, as the command line, files and messages have them.

use crate::access::{Group, Mode};
use crate::alarm::Alarm;
use crate::export::parse_text;
use crate::socket::{SocketSpec, socket_parser};
use crate::values::{self, FormatParser};
use crate::{filters, text};
use clap::Args;
use fathom_core::Polling;
use fathom_filters::Spec;
use fathom_formats::Format;
use fathom_stack::{CpuList, Description, KeySource, parse_format};
use fathom_storage::cached::FetchRate;
use fathom_storage::{Cache, CacheTerms, EngineKind, Location};
use fathom_units::{Timeout, parse_size};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use utoipa::ToSchema;

/// Options of a disk: the options of `fathom serve` and `fathom disk add`, the keys of a `[[disk]]`
/// in a configuration and of a disk's file in `disks-dir`, and the body of a request that adds a
/// disk. An absent option has its default.
///
/// In files and requests, `--no-discard` is `discard` with the value `false`, and repeatable
/// options are lists: `allow-dirs`, `keys`, `filters` and `alarms`.
///
/// `x-change` (of a list: that of its items) says which options can change while the disk is in
/// use: `live` options can. `data` options decide which data the disk has. A change of a `fixed`
/// option would be noticed by guests or clients, or have no effect.
#[derive(Args, Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DiskSpec {
    // (The API has the name in the path, too, and the file of a persistent disk is named after it.)
    /// Name of the disk. The body of a request may omit it, because the path names the disk.
    #[arg(skip)]
    #[serde(default)]
    #[schema(pattern = "^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}$", required = false, extensions(("x-change" = json!("fixed"))))]
    pub name: String,
    /// Location of the image: a path, `memory:SIZE`, `null:SIZE`, the URI of an NBD export, or
    /// `rbd:POOL/IMAGE`.
    #[arg(skip = Location::file(""))]
    #[serde(with = "text")]
    #[schema(value_type = String, examples("/srv/disk.qcow2", "memory:4G"), extensions(("x-change" = json!("data"))))]
    pub image: Location,

    /// Format of the image [default: raw, if the image does not look like another format]
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = FormatParser, help_heading = "Image")]
    #[serde(
        default,
        deserialize_with = "format",
        serialize_with = "text::optional::serialize",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>, extensions(("x-change" = json!("data"))))]
    pub format: Option<Format>,
    /// Let guests and clients only read
    #[arg(long, help_heading = "Image")]
    #[serde(default, skip_serializing_if = "is_false")]
    #[schema(extensions(("x-change" = json!("live"))))]
    pub readonly: bool,
    /// Key that unlocks encrypted images, such as file:/etc/fathom/vm1.key; repeatable
    ///
    /// file:PATH, credential:NAME (a credential of systemd), fd:N, or command:PROGRAM, which prints
    /// the key.
    #[arg(long = "key", value_name = "SOURCE", help_heading = "Image")]
    #[serde(default, with = "text::list", skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>, extensions(("x-change" = json!("live"))))]
    pub keys: Vec<KeySource>,
    /// Directory with backing files and external data files that the image may read; repeatable
    ///
    /// [default: the directory of the image]
    #[arg(long = "allow-dir", value_name = "DIR", help_heading = "Image")]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>, extensions(("x-change" = json!("live"))))]
    pub allow_dirs: Vec<PathBuf>,
    /// External data file of a qcow2 image, to be written
    ///
    /// The server writes to an external data file only if this option names it. Without the option
    /// the file that the image names is only read.
    #[arg(long, value_name = "FILE", help_heading = "Image")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, extensions(("x-change" = json!("data"))))]
    pub data_file: Option<PathBuf>,
    /// Start of the disk in a raw image, in bytes; a multiple of 512 [default: 0]
    #[arg(long, value_name = "BYTES", value_parser = parse_size, help_heading = "Image")]
    #[serde(
        default,
        deserialize_with = "text::size",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(extensions(("x-change" = json!("data"))))]
    pub offset: Option<u64>,
    /// Size of the disk in a raw image, such as 10G [default: up to the end of the image]
    #[arg(long, value_name = "BYTES", value_parser = parse_size, help_heading = "Image")]
    #[serde(
        default,
        deserialize_with = "text::size",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(extensions(("x-change" = json!("data"))))]
    pub size: Option<u64>,
    /// Directory for the disk's dirty bitmaps [default: IMAGE.bitmaps]
    ///
    /// Each disk needs a directory of its own. Required for bitmaps of a disk that is not in a
    /// file.
    #[arg(long, value_name = "DIR", help_heading = "Image")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, extensions(("x-change" = json!("fixed"))))]
    pub bitmaps: Option<PathBuf>,
    /// Read zeroes from clusters behind the end of a truncated image file
    ///
    /// Without this option such reads fail, and such an image is not opened for writing.
    #[arg(long, help_heading = "Image")]
    #[serde(default, skip_serializing_if = "is_false")]
    #[schema(extensions(("x-change" = json!("live"))))]
    pub zero_missing_clusters: bool,
    /// Open the image for reading even if another process writes to it
    #[arg(long, requires = "readonly", help_heading = "Image")]
    #[serde(default, skip_serializing_if = "is_false")]
    #[schema(extensions(("x-change" = json!("fixed"))))]
    pub force_share: bool,
    /// Write to the image even if a newer image has replaced it
    ///
    /// A snapshot on top of the image or the target of a mirror has replaced the image. The data
    /// that was written to the newer image is lost.
    #[arg(long, help_heading = "Image")]
    #[serde(default, skip_serializing_if = "is_false")]
    #[schema(extensions(("x-change" = json!("live"))))]
    pub allow_superseded: bool,

    /// Socket for the virtual machine, such as /run/vm1.sock
    ///
    /// A path, or fd:N for an inherited listening socket.
    /// [default: none with --nbd or --fuse, otherwise the socket that systemd passes]
    #[arg(long, value_name = "SOCKET", value_parser = socket_parser(), help_heading = "Connections")]
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>, extensions(("x-change" = json!("fixed"))))]
    pub vhost_user: Option<SocketSpec>,
    /// Serial number that the guest sees, at most 20 bytes
    #[arg(long, value_name = "STRING", value_parser = parse_serial, help_heading = "Connections")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(extensions(("x-change" = json!("fixed"))))]
    pub serial: Option<String>,
    /// Offer discard to guests and clients [default: true]
    #[arg(
        long = "no-discard",
        num_args = 0,
        default_missing_value = "false",
        help_heading = "Connections",
        help = "Do not offer discard to guests and clients"
    )]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(extensions(("x-change" = json!("live"))))]
    pub discard: Option<bool>,
    /// Existing file that shows the disk's contents, by FUSE, such as /run/vm1.raw
    ///
    /// The disk is mounted over this file, which must exist. Programs read the disk there as a raw
    /// image.
    #[arg(long, value_name = "FILE", help_heading = "Connections")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, extensions(("x-change" = json!("fixed"))))]
    pub fuse: Option<PathBuf>,
    /// Let programs also write to the file of --fuse
    #[arg(long, requires = "fuse", help_heading = "Connections")]
    #[serde(default, skip_serializing_if = "is_false")]
    #[schema(extensions(("x-change" = json!("fixed"))))]
    pub fuse_writable: bool,

    /// Export the disk to NBD clients. A disk that the API adds while one of the listeners
    /// authenticates no client is exported only with `true` [default: true, if the server listens
    /// for NBD clients]
    #[arg(skip)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(extensions(("x-change" = json!("fixed"))))]
    pub nbd: Option<bool>,
    /// Name of the disk for NBD clients, such as vm1
    ///
    /// [default: the name of the disk]
    #[arg(long, value_name = "NAME", value_parser = parse_text, help_heading = "NBD")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(extensions(("x-change" = json!("fixed"))))]
    pub export_name: Option<String>,
    /// Description of the disk that NBD clients can list
    #[arg(long, value_name = "TEXT", value_parser = parse_text, default_value = "",
          hide_default_value = true, help_heading = "NBD")]
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schema(extensions(("x-change" = json!("live"))))]
    pub export_description: String,

    /// Number of threads that serve the queues, 1 to 256 [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256),
          help_heading = "Threads and I/O")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 256, extensions(("x-change" = json!("live"))))]
    pub iothreads: Option<u16>,
    /// Maximum number of virtqueues, 1 to 256 [default: 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256),
          help_heading = "Threads and I/O")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 256, extensions(("x-change" = json!("fixed"))))]
    pub queues: Option<u16>,
    /// Offer packed virtqueues to guests, a more compact layout of the rings
    ///
    /// The guest's driver uses them if the virtual machine offers them as well: packed=on of QEMU.
    #[arg(long, help_heading = "Threads and I/O")]
    #[serde(default, skip_serializing_if = "is_false")]
    #[schema(extensions(("x-change" = json!("fixed"))))]
    pub packed: bool,
    /// CPUs to pin the threads to, such as 2-3,8 [default: no pinning]
    ///
    /// Each thread gets a part of the CPUs.
    #[arg(long, value_name = "LIST", help_heading = "Threads and I/O")]
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>, extensions(("x-change" = json!("live"))))]
    pub cpus: Option<CpuList>,
    /// How to do I/O [default: io_uring]
    #[arg(long, value_name = "ENGINE", value_parser = values::engine(), help_heading = "Threads and I/O")]
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>, extensions(("x-change" = json!("live"))))]
    pub aio: Option<EngineKind>,
    /// Time to poll for requests before sleeping, such as 20us [default: auto]
    ///
    /// auto: poll while that shortens requests considerably, at most 900 ms of each second.
    /// auto:TIME: the same, at most TIME of each second, such as auto:500ms. off: never poll. TIME:
    /// always poll for this time.
    #[arg(long, value_name = "auto|off|TIME", help_heading = "Threads and I/O")]
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>, extensions(("x-change" = json!("live"))))]
    pub poll: Option<Polling>,
    /// Name of the pool whose threads serve the disk [default: the disk has threads of its own]
    #[arg(skip)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(extensions(("x-change" = json!("live"))))]
    pub pool: Option<String>,
    /// Register guest memory with io_uring, which makes requests cheaper
    ///
    /// All of the guest's memory is pinned and counts as locked. Ballooning returns no memory to
    /// the host, and post-copy migration is not possible.
    #[arg(long, help_heading = "Threads and I/O")]
    #[serde(default, skip_serializing_if = "is_false")]
    #[schema(extensions(("x-change" = json!("live"))))]
    pub register_memory: bool,

    /// Use of the host's page cache [default: none]
    #[arg(long, value_name = "MODE", value_parser = values::cache(), help_heading = "Cache")]
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>, extensions(("x-change" = json!("live"))))]
    pub cache: Option<Cache>,
    /// Memory limit for the tables of a qcow2 or qed image, at least 64k [default: 32M]
    ///
    /// 32M are enough for 256G in clusters of 64k.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Cache")]
    #[serde(
        default,
        deserialize_with = "text::size",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(extensions(("x-change" = json!("live"))))]
    pub metadata_cache: Option<u64>,

    /// Timeout of a request to the NBD server that has the disk, or off [default: 60s]
    ///
    /// The server counts as dead if it sends nothing for this time while a request is in flight.
    #[arg(long, value_name = "TIME", help_heading = "Disk on an NBD server")]
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>, extensions(("x-change" = json!("live"))))]
    pub server_timeout: Option<Timeout>,
    /// Time that requests wait for an unreachable NBD server, or off [default: 60s]
    ///
    /// Requests that have waited for this time fail. off: requests fail immediately.
    #[arg(long, value_name = "TIME", help_heading = "Disk on an NBD server")]
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>, extensions(("x-change" = json!("live"))))]
    pub server_reconnect: Option<Timeout>,
    /// Number of connections of each I/O thread to the NBD server, 1 to 16 [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16),
          help_heading = "Disk on an NBD server")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 16, extensions(("x-change" = json!("live"))))]
    pub server_connections: Option<u8>,

    /// Remote base image, such as https://example.com/base.qcow2
    ///
    /// https://..., s3://..., an NBD URI, rbd:... or a path. The disk's image has it as its backing
    /// image. The server fetches it as needed and caches it on this host (see `fathom base`).
    #[arg(long, value_name = "IMAGE", help_heading = "Remote base image")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(extensions(("x-change" = json!("data"))))]
    pub base: Option<String>,
    /// Directory of the cache of base images [default: /var/cache/fathom for root]
    ///
    /// The default for other users is fathom in the user's own cache directory.
    #[arg(long, value_name = "DIR", help_heading = "Remote base image")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, extensions(("x-change" = json!("fixed"))))]
    pub base_cache: Option<PathBuf>,
    /// Size limit of the cache of base images [default: 64G]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Remote base image")]
    #[serde(
        default,
        deserialize_with = "text::size",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(extensions(("x-change" = json!("fixed"))))]
    pub base_cache_size: Option<u64>,
    /// Bytes per second to fetch in advance, or off [default: 64M]
    #[arg(long, value_name = "SIZE", help_heading = "Remote base image")]
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>, extensions(("x-change" = json!("fixed"))))]
    pub base_fetch: Option<FetchRate>,
    /// Manifest with checksums of the base image (see `fathom img manifest`)
    ///
    /// The server compares all fetched data with it.
    #[arg(long, value_name = "FILE", help_heading = "Remote base image")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, extensions(("x-change" = json!("fixed"))))]
    pub base_manifest: Option<PathBuf>,
    /// Boot profile: the parts of the base image to fetch first (see `fathom base profile`)
    #[arg(long, value_name = "FILE", help_heading = "Remote base image")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, extensions(("x-change" = json!("fixed"))))]
    pub base_profile: Option<PathBuf>,

    /// Allow another server to pull the disk (see --pull)
    ///
    /// NBD clients can only read, and stay connected when the guest disconnects.
    #[arg(long, help_heading = "Move and pull")]
    #[serde(default, skip_serializing_if = "is_false")]
    #[schema(extensions(("x-change" = json!("fixed"))))]
    pub nbd_move: bool,
    /// Pull the disk from the server of this NBD URI
    ///
    /// The disk is copied while its guest runs on the other host, and taken over when the guest
    /// migrates to this host. The other server must serve the disk with --nbd-move.
    #[arg(long, value_name = "URI", help_heading = "Move and pull")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(extensions(("x-change" = json!("data"))))]
    pub pull: Option<String>,
    /// File that records the progress of the pull [default: IMAGE.pull]
    #[arg(
        long,
        value_name = "FILE",
        requires = "pull",
        help_heading = "Move and pull"
    )]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, extensions(("x-change" = json!("fixed"))))]
    pub pull_record: Option<PathBuf>,
    /// Limit of the pull in bytes per second, such as 100M [default: none]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "pull", help_heading = "Move and pull")]
    #[serde(
        default,
        deserialize_with = "text::size",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(extensions(("x-change" = json!("fixed"))))]
    pub pull_speed: Option<u64>,
    /// Take the disk over immediately and pull its data afterwards (raw images only)
    ///
    /// Data that the guest accesses is pulled first.
    #[arg(long, requires = "pull", help_heading = "Move and pull")]
    #[serde(default, skip_serializing_if = "is_false")]
    #[schema(extensions(("x-change" = json!("fixed"))))]
    pub pull_post_copy: bool,

    /// Filter for all requests, such as throttle:iops-total=500; repeatable
    ///
    /// NAME or NAME:OPTION=VALUE,... The first filter is the one closest to the guest.
    /// `fathom filters` lists all filters and their options.
    #[arg(long = "filter", value_name = "FILTER", value_parser = filters::parse, help_heading = "Filters and limits")]
    #[serde(
        default,
        deserialize_with = "filters::read",
        serialize_with = "filters::write",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schema(value_type = Vec<String>, extensions(("x-change" = json!("live"))))]
    pub filters: Vec<Spec>,

    /// Raise an alarm when requests take too long, such as p99=5ms; repeatable
    ///
    /// p99=5ms: the 99th percentile within 10 s; also p50, p90 and p999, and for one operation
    /// read:p99=5ms. older=10s: a request has been in flight for longer. An alarm is an event of
    /// the API, a log line and a metric, and names the slowest stage.
    #[arg(
        long = "alarm",
        value_name = "ALARM",
        help_heading = "Alarms and tracing"
    )]
    #[serde(default, with = "text::list", skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>, extensions(("x-change" = json!("live"))))]
    pub alarms: Vec<Alarm>,
    /// File for a trace of all requests, such as /dev/shm/vm1.trace (see `fathom trace`)
    ///
    /// A file in memory (tmpfs) costs the least.
    #[arg(long, value_name = "FILE", help_heading = "Alarms and tracing")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, extensions(("x-change" = json!("fixed"))))]
    pub trace: Option<PathBuf>,

    /// Name of the tenant whose process serves the disk, in a server with tenants [default: the
    /// name of the disk]
    #[arg(skip)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}$", extensions(("x-change" = json!("fixed"))))]
    pub tenant: Option<String>,
    /// Permissions of new Unix sockets, such as 660 [default: 660 less the umask]
    ///
    /// Users with write permission can connect. The default with --socket-group is 660.
    #[arg(long, value_name = "MODE", help_heading = "Security")]
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>, extensions(("x-change" = json!("fixed"))))]
    pub socket_mode: Option<Mode>,
    /// Group of new Unix sockets, such as kvm [default: the group of the server]
    #[arg(long, value_name = "GROUP", help_heading = "Security")]
    #[serde(
        default,
        with = "text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>, extensions(("x-change" = json!("fixed"))))]
    pub socket_group: Option<Group>,
}

/// The most virtqueues of a guest.
pub const DEFAULT_QUEUES: u16 = 64;
/// Maximum length of a serial number in bytes: the room in the reply to virtio-blk's GET_ID.
pub(crate) const MAX_SERIAL: usize = 20;

impl DiskSpec {
    /// Returns a disk with default options.
    pub fn new(name: String, image: Location) -> DiskSpec {
        let required = json!({ "name": name, "image": "null:512" });
        let spec: DiskSpec = serde_json::from_value(required).expect("all others have defaults");
        DiskSpec { image, ..spec }
    }

    /// The same, with nothing said that goes without saying.
    pub fn without_defaults(mut self) -> DiskSpec {
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

    /// Names the format of the image, as the file of a persistent disk does: a guest may write to a
    /// raw disk what looks like another format, and the disk is served again when the server
    /// restarts.
    pub fn with_format(mut self) -> DiskSpec {
        self.format.get_or_insert(Format::Raw);
        self
    }

    /// With another image, of the same disk.
    pub fn on(self, image: Location, format: Option<Format>) -> DiskSpec {
        let has_tables = format.is_some_and(Format::has_tables);
        DiskSpec {
            format,
            metadata_cache: self.metadata_cache.filter(|_| has_tables),
            zero_missing_clusters: false,
            // These options described the previous image.
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
            ..DiskSpec { image, ..self }
        }
    }

    /// How base images are kept on this host.
    pub fn cache_terms(&self) -> CacheTerms {
        let new = CacheTerms::default();
        CacheTerms {
            dir: self.base_cache.clone().unwrap_or(new.dir),
            size: self.base_cache_size.unwrap_or(new.size),
            rate: self.base_fetch.map_or(new.rate, |rate| rate.0),
            manifest: self.base_manifest.clone(),
            profile: self.base_profile.clone(),
        }
    }

    /// Returns the path of the record of the disk's move. None: the disk is not in a file.
    pub fn pull_record_path(&self) -> Option<PathBuf> {
        let beside = |path: &Path| {
            let mut name = path.as_os_str().to_owned();
            name.push(".pull");
            PathBuf::from(name)
        };
        let own = || {
            let path = self.image.path()?;
            let is_device = path.starts_with("/dev") && !path.starts_with("/dev/shm");
            (!is_device).then(|| beside(path))
        };
        self.pull_record.clone().or_else(own)
    }

    /// Whether an NBD server is needed for the disk.
    pub fn is_server(&self, uri: &str) -> bool {
        self.image.to_string() == uri || self.pull.as_deref() == Some(uri)
    }

    /// Change options of a filter; an empty value is the option's default.
    pub fn set_filter(&mut self, index: usize, options: &BTreeMap<String, String>) {
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
}

fn is_false(value: &bool) -> bool {
    !value
}

fn format<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Format>, D::Error> {
    text::optional::parse(from, parse_format)
}

/// Parses `--serial`. virtio-blk's GET_ID has room for [`MAX_SERIAL`] bytes.
fn parse_serial(text: &str) -> Result<String, String> {
    match text.len() {
        0..=MAX_SERIAL => Ok(text.to_owned()),
        len => Err(format!("{len} bytes; the maximum is {MAX_SERIAL}")),
    }
}
