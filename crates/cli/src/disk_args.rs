//! A disk, as the command line describes it.

use crate::aio::AioArg;
use crate::values::{self, FormatParser};
use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use fathom_core::Polling;
use fathom_daemon::{Alarm, DiskTable, ExportOptions, Group, Mode, SocketSpec};
use fathom_filters::Spec;
use fathom_formats::Format;
use fathom_stack::{CpuList, KeySource};
use fathom_storage::cached::FetchRate;
use fathom_storage::{Cache, KINDS, Location};
use fathom_units::{Timeout, parse_size};
use std::ffi::OsString;
use std::path::PathBuf;

/// Options of a disk, except where its data is.
#[derive(Args, Debug)]
pub struct DiskArgs {
    /// Format of the image [default: raw, if the image does not look like another format]
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = FormatParser, help_heading = "Image")]
    pub format: Option<Format>,

    /// Let guests and clients only read
    #[arg(long, help_heading = "Image")]
    pub readonly: bool,

    /// Key that unlocks encrypted images, such as file:/etc/fathom/vm1.key; repeatable
    ///
    /// file:PATH, credential:NAME (a credential of systemd), fd:N, or command:PROGRAM, which prints the key.
    #[arg(long = "key", value_name = "SOURCE", help_heading = "Image")]
    pub keys: Vec<KeySource>,

    /// Directory with backing files and external data files that the image may read; repeatable
    ///
    /// [default: the directory of the image]
    #[arg(long = "allow-dir", value_name = "DIR", help_heading = "Image")]
    pub allow_dirs: Vec<PathBuf>,

    /// External data file of a qcow2 image, to be written
    ///
    /// The server writes to an external data file only if this option names it. Without the option the
    /// file that the image names is only read.
    #[arg(long, value_name = "FILE", help_heading = "Image")]
    pub data_file: Option<PathBuf>,

    /// Start of the disk in a raw image, in bytes; a multiple of 512 [default: 0]
    #[arg(long, value_name = "BYTES", value_parser = parse_size, help_heading = "Image")]
    pub offset: Option<u64>,

    /// Size of the disk in a raw image, such as 10G [default: up to the end of the image]
    #[arg(long, value_name = "BYTES", value_parser = parse_size, help_heading = "Image")]
    pub size: Option<u64>,

    /// Directory for the disk's dirty bitmaps [default: IMAGE.bitmaps]
    ///
    /// Each disk needs a directory of its own. Required for bitmaps of a disk that is not in a file.
    #[arg(long, value_name = "DIR", help_heading = "Image")]
    pub bitmaps: Option<PathBuf>,

    /// Read zeroes from clusters behind the end of a truncated image file
    ///
    /// Without this option such reads fail, and such an image is not opened for writing.
    #[arg(long, help_heading = "Image")]
    pub zero_missing_clusters: bool,

    /// Open the image for reading even if another process writes to it
    #[arg(long, requires = "readonly", help_heading = "Image")]
    pub force_share: bool,

    /// Write to the image even if a newer image has replaced it
    ///
    /// A snapshot on top of the image or the target of a mirror has replaced the image. The data that was
    /// written to the newer image is lost.
    #[arg(long, help_heading = "Image")]
    pub allow_superseded: bool,

    /// Socket for the virtual machine, such as /run/vm1.sock
    ///
    /// A path, or fd:N for an inherited listening socket.
    /// [default: none with --nbd, otherwise the socket that systemd passes]
    #[arg(long, value_name = "SOCKET", value_parser = socket_parser(), help_heading = "Connections")]
    pub vhost_user: Option<SocketSpec>,

    /// Serial number that the guest sees, at most 20 bytes
    #[arg(long, value_name = "STRING", value_parser = parse_serial, help_heading = "Connections")]
    pub serial: Option<String>,

    /// Do not offer discard to guests and clients
    #[arg(long, help_heading = "Connections")]
    pub no_discard: bool,

    /// Name of the disk for NBD clients, such as vm1
    #[arg(long, value_name = "NAME", value_parser = parse_export_string, help_heading = "NBD")]
    pub export_name: Option<String>,

    /// Description of the disk that NBD clients can list
    #[arg(long, value_name = "TEXT", value_parser = parse_export_string, help_heading = "NBD")]
    pub export_description: Option<String>,

    /// Number of threads that serve the queues, 1 to 256
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=256), help_heading = "Threads and I/O")]
    pub iothreads: u16,

    /// Maximum number of virtqueues, 1 to 256
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u16).range(1..=256), help_heading = "Threads and I/O")]
    pub queues: u16,

    /// CPUs to pin the threads to, such as 2-3,8 [default: no pinning]
    ///
    /// Each thread gets a part of the CPUs.
    #[arg(long, value_name = "LIST", help_heading = "Threads and I/O")]
    pub cpus: Option<CpuList>,

    #[command(flatten, next_help_heading = "Threads and I/O")]
    pub aio: AioArg,

    /// Time to poll for requests before sleeping, such as 20us
    ///
    /// auto: poll while that shortens requests considerably, at most 900 ms of each second. auto:TIME: the
    /// same, at most TIME of each second, such as auto:500ms. off: never poll. TIME: always poll for this time.
    #[arg(
        long,
        value_name = "auto|off|TIME",
        default_value = "auto",
        help_heading = "Threads and I/O"
    )]
    pub poll: Polling,

    /// Register guest memory with io_uring, which makes requests cheaper
    ///
    /// All of the guest's memory is pinned and counts as locked. Ballooning returns no memory to the host,
    /// and post-copy migration is not possible.
    #[arg(long, help_heading = "Threads and I/O")]
    pub register_memory: bool,

    /// Use of the host's page cache
    #[arg(long, value_name = "MODE", default_value = "none", value_parser = values::cache(),
          help_heading = "Cache")]
    pub cache: Cache,

    /// Memory limit for the tables of a qcow2 or qed image, at least 64k [default: 32M]
    ///
    /// 32M are enough for 256G in clusters of 64k.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Cache")]
    pub metadata_cache: Option<u64>,

    /// Timeout of a request to the NBD server that has the disk, or off [default: 60s]
    ///
    /// The server counts as dead if it sends nothing for this time while a request is in flight.
    #[arg(long, value_name = "TIME", help_heading = "Disk on an NBD server")]
    pub server_timeout: Option<Timeout>,

    /// Time that requests wait for an unreachable NBD server, or off [default: 60s]
    ///
    /// Requests that have waited for this time fail. off: requests fail immediately.
    #[arg(long, value_name = "TIME", help_heading = "Disk on an NBD server")]
    pub server_reconnect: Option<Timeout>,

    /// Number of connections of each I/O thread to the NBD server, 1 to 16 [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16),
          help_heading = "Disk on an NBD server")]
    pub server_connections: Option<u8>,

    /// Remote base image, such as https://example.com/base.qcow2
    ///
    /// https://..., s3://..., an NBD URI, rbd:... or a path. The disk's image has it as its backing image.
    /// The server fetches it as needed and caches it on this host (see `fathom base`).
    #[arg(long, value_name = "IMAGE", help_heading = "Remote base image")]
    pub base: Option<String>,

    /// Directory of the cache of base images [default: /var/cache/fathom for root]
    ///
    /// The default for other users is fathom in the user's own cache directory.
    #[arg(long, value_name = "DIR", help_heading = "Remote base image")]
    pub base_cache: Option<PathBuf>,

    /// Size limit of the cache of base images [default: 64G]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Remote base image")]
    pub base_cache_size: Option<u64>,

    /// Bytes per second to fetch in advance, or off [default: 64M]
    #[arg(long, value_name = "SIZE", help_heading = "Remote base image")]
    pub base_fetch: Option<FetchRate>,

    /// Manifest with checksums of the base image (see `fathom img manifest`)
    ///
    /// The server compares all fetched data with it.
    #[arg(long, value_name = "FILE", help_heading = "Remote base image")]
    pub base_manifest: Option<PathBuf>,

    /// Boot profile: the parts of the base image to fetch first (see `fathom base profile`)
    #[arg(long, value_name = "FILE", help_heading = "Remote base image")]
    pub base_profile: Option<PathBuf>,

    /// Allow another server to pull the disk (see --pull)
    ///
    /// NBD clients can only read, and stay connected when the guest disconnects.
    #[arg(long, help_heading = "Move and pull")]
    pub nbd_move: bool,

    /// Pull the disk from the server of this NBD URI
    ///
    /// The disk is copied while its guest runs on the other host, and taken over when the guest migrates to
    /// this host. The other server must serve the disk with --nbd-move.
    #[arg(long, value_name = "URI", help_heading = "Move and pull")]
    pub pull: Option<String>,

    /// File that records the progress of the pull [default: IMAGE.pull]
    #[arg(
        long,
        value_name = "FILE",
        requires = "pull",
        help_heading = "Move and pull"
    )]
    pub pull_record: Option<PathBuf>,

    /// Limit of the pull in bytes per second, such as 100M [default: none]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "pull",
          help_heading = "Move and pull")]
    pub pull_speed: Option<u64>,

    /// Take the disk over immediately and pull its data afterwards (raw images only)
    ///
    /// Data that the guest accesses is pulled first.
    #[arg(long, requires = "pull", help_heading = "Move and pull")]
    pub pull_post_copy: bool,

    /// Filter for all requests, such as throttle:iops-total=500; repeatable
    ///
    /// NAME or NAME:OPTION=VALUE,... The first filter is the one closest to the guest. `fathom filters` lists all filters and their options.
    #[arg(long = "filter", value_name = "FILTER", value_parser = parse_filter,
          help_heading = "Filters and limits")]
    pub filters: Vec<Spec>,

    /// Raise an alarm when requests take too long, such as p99=5ms; repeatable
    ///
    /// p99=5ms: the 99th percentile within 10 s; also p50, p90 and p999, and for one operation read:p99=5ms.
    /// older=10s: a request has been in flight for longer. An alarm is an event of the API, a log line and a
    /// metric, and names the slowest stage.
    #[arg(
        long = "alarm",
        value_name = "ALARM",
        help_heading = "Alarms and tracing"
    )]
    pub alarms: Vec<Alarm>,

    /// File for a trace of all requests, such as /dev/shm/vm1.trace (see `fathom trace`)
    ///
    /// A file in memory (tmpfs) costs the least.
    #[arg(long, value_name = "FILE", help_heading = "Alarms and tracing")]
    pub trace: Option<PathBuf>,

    /// Permissions of new Unix sockets, such as 660 [default: 660 less the umask]
    ///
    /// Users with write permission can connect. The default with --socket-group is 660.
    #[arg(long, value_name = "MODE", help_heading = "Security")]
    pub socket_mode: Option<Mode>,

    /// Group of new Unix sockets, such as kvm
    #[arg(long, value_name = "GROUP", help_heading = "Security")]
    pub socket_group: Option<Group>,
}

impl DiskArgs {
    pub fn into_table(self, name: String, image: Location) -> DiskTable {
        DiskTable {
            vhost_user: self.vhost_user,
            socket_mode: self.socket_mode,
            socket_group: self.socket_group,
            export_name: self.export_name,
            nbd_move: self.nbd_move,
            export_description: self.export_description.unwrap_or_default(),
            format: self.format,
            offset: self.offset,
            size: self.size,
            metadata_cache: self.metadata_cache,
            zero_missing_clusters: self.zero_missing_clusters,
            allow_dirs: self.allow_dirs,
            data_file: self.data_file,
            bitmaps: self.bitmaps,
            keys: self.keys,
            readonly: self.readonly,
            aio: Some(self.aio.aio),
            register_memory: self.register_memory,
            cache: Some(self.cache),
            server_timeout: self.server_timeout,
            server_reconnect: self.server_reconnect,
            server_connections: self.server_connections,
            base: self.base,
            base_cache: self.base_cache,
            base_cache_size: self.base_cache_size,
            base_fetch: self.base_fetch,
            base_manifest: self.base_manifest,
            base_profile: self.base_profile,
            pull: self.pull,
            pull_record: self.pull_record,
            pull_speed: self.pull_speed,
            pull_post_copy: self.pull_post_copy,
            queues: Some(self.queues),
            iothreads: Some(self.iothreads),
            cpus: self.cpus,
            poll: Some(self.poll),
            serial: self.serial,
            alarms: self.alarms,
            trace: self.trace,
            filters: self.filters,
            force_share: self.force_share,
            allow_superseded: self.allow_superseded,
            discard: Some(!self.no_discard),
            ..DiskTable::new(name, image)
        }
    }
}

/// Parses the location of a disk.
pub fn location_parser() -> impl TypedValueParser<Value = Location> {
    OsStringValueParser::new().try_map(|text: OsString| Location::parse(&text))
}

/// Help of the location of a disk, for `-h`.
pub const LOCATION_HELP: &str =
    "Image file, block device, or URI such as nbd://HOST/EXPORT (see --help)";

/// The same for `--help`: all kinds of locations.
pub fn location_help() -> String {
    let forms: Vec<_> = KINDS.iter().map(|kind| kind.form).collect();
    format!("Location of the disk's data: {}", forms.join(", "))
}

pub fn socket_parser() -> impl TypedValueParser<Value = SocketSpec> {
    OsStringValueParser::new().try_map(|text: OsString| SocketSpec::parse(&text))
}

fn parse_filter(text: &str) -> Result<Spec, String> {
    let spec: Spec = text.parse()?;
    fathom_filters::find(&spec.name)?.check(&spec.options)?;
    Ok(spec)
}

/// virtio-blk's GET_ID has room for 20 bytes.
fn parse_serial(text: &str) -> Result<String, String> {
    if text.len() > 20 {
        return Err(format!("{} bytes; the maximum is 20", text.len()));
    }
    Ok(text.to_owned())
}

/// NBD's strings.
fn parse_export_string(text: &str) -> Result<String, String> {
    ExportOptions::check(text).map(|()| text.to_owned())
}
