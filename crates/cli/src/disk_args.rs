//! A disk, as the command line describes it.

use crate::aio::AioArg;
use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use fathom_core::Polling;
use fathom_daemon::{Alarm, DiskTable, ExportOptions, Group, Mode, SocketSpec};
use fathom_filters::Spec;
use fathom_formats::Format;
use fathom_stack::{CpuList, KeySource, parse_format};
use fathom_storage::cached::FetchRate;
use fathom_storage::{Cache, KINDS, Location};
use fathom_units::{Timeout, parse_size};
use std::ffi::OsString;
use std::path::PathBuf;

/// All but where it is.
#[derive(Args, Debug)]
pub struct DiskArgs {
    /// Where the virtual machine connects: a path, or fd:N for a listening
    /// socket that is inherited [default without --nbd: the one from systemd]
    #[arg(long, value_name = "SOCKET", value_parser = socket_parser())]
    pub vhost_user: Option<SocketSpec>,

    /// Permissions of the Unix sockets that are made, such as 660: who may
    /// write may connect [default: 660 less the umask; with --socket-group 660]
    #[arg(long, value_name = "MODE")]
    pub socket_mode: Option<Mode>,

    /// Group of the Unix sockets that are made
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<Group>,

    /// The disk's name for NBD clients, who get it without a name, too
    #[arg(long, value_name = "NAME", value_parser = parse_export_string)]
    pub export_name: Option<String>,

    /// What NBD clients are told about the disk, for people
    #[arg(long, value_name = "TEXT", value_parser = parse_export_string)]
    pub export_description: Option<String>,

    /// Let another server take the disk over (see --pull): NBD clients only read, and stay when the guest
    /// leaves
    #[arg(long)]
    pub nbd_move: bool,

    /// Format of the image: raw, qcow2, qed or luks, and with --readonly vmdk, vhdx, vdi or vpc [default: raw, but refuse what
    /// looks like another]
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    pub format: Option<Format>,

    /// Where in a raw image the disk starts, in bytes: a multiple of 512
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    pub offset: Option<u64>,

    /// Size of the disk in a raw image [default: up to its end]
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    pub size: Option<u64>,

    /// Most memory for the tables of a qcow2 or qed image, at least 64k
    /// [default: 32M, enough for 256G in clusters of 64k]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub metadata_cache: Option<u64>,

    /// Read zeroes where the image's tables name clusters behind the end of
    /// its file, which was cut off. Without this option such reads fail, and
    /// such an image is not opened for writing
    #[arg(long)]
    pub zero_missing_clusters: bool,

    /// Let the image use files in this directory as its backing file or its
    /// external data file, to read them; repeatable [default: the image's own
    /// directory]
    #[arg(long = "allow-dir", value_name = "DIR")]
    pub allow_dirs: Vec<PathBuf>,

    /// The external data file of a qcow2 image: it is written to only if it is
    /// named here, whatever the image calls it
    #[arg(long, value_name = "FILE")]
    pub data_file: Option<PathBuf>,

    /// Keep the disk's dirty bitmaps in this directory, which no other disk has: needed if the disk is not in a
    /// file [default: IMAGE.bitmaps]
    #[arg(long, value_name = "DIR")]
    pub bitmaps: Option<PathBuf>,

    /// What unlocks encrypted images, as LUKS has it: file:PATH, credential:NAME (systemd's), fd:N or
    /// command:PROGRAM, which prints it; may be given several times
    #[arg(long = "key", value_name = "SOURCE")]
    pub keys: Vec<KeySource>,

    /// Let the guest read only
    #[arg(long)]
    pub readonly: bool,

    #[command(flatten)]
    pub aio: AioArg,

    /// Register guest memory with io_uring: cheaper requests, but all of the
    /// guest's memory is pinned and counts as locked, ballooning gives
    /// nothing back, and post-copy migration cannot be used
    #[arg(long)]
    pub register_memory: bool,

    /// Host page cache: none (O_DIRECT), writeback, or writethrough (every
    /// write is durable when it completes)
    #[arg(long, value_name = "MODE", default_value = "none")]
    pub cache: Cache,

    /// Give up on an NBD server that has the disk when it says nothing of a
    /// request for this long, or off [default: 60s]
    #[arg(long, value_name = "DURATION")]
    pub server_timeout: Option<Timeout>,

    /// How long requests wait for an NBD server that is away before they fail,
    /// or off: they fail at once [default: 60s]
    #[arg(long, value_name = "DURATION")]
    pub server_reconnect: Option<Timeout>,

    /// Connections of each I/O thread to an NBD server that has the disk
    /// [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    pub server_connections: Option<u8>,

    /// Where the image below comes from, if it is far away: https://..., s3://..., an NBD URI,
    /// rbd:... or a path. It is kept on this host, and fetched as it is needed (see `fathom base`)
    #[arg(long, value_name = "IMAGE")]
    pub base: Option<String>,

    /// The directory where such images are kept [default: /var/cache/fathom, or a user's own]
    #[arg(long, value_name = "DIR")]
    pub base_cache: Option<PathBuf>,

    /// How much all of them may take there [default: 64G]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub base_cache_size: Option<u64>,

    /// How much a second is fetched before it is asked for, or off [default: 64M]
    #[arg(long, value_name = "SIZE")]
    pub base_fetch: Option<FetchRate>,

    /// A manifest of the image (see `fathom img manifest`), to check by what is fetched
    #[arg(long, value_name = "FILE")]
    pub base_manifest: Option<PathBuf>,

    /// What boots of the image read first, to be fetched first (see `fathom base profile`)
    #[arg(long, value_name = "FILE")]
    pub base_profile: Option<PathBuf>,

    /// The disk comes from this server, an NBD URI, where its guest runs: it is copied, and taken over when
    /// the guest comes here by live migration. There it is served with --nbd-move
    #[arg(long, value_name = "URI")]
    pub pull: Option<String>,

    /// Where it is noted how far the disk has come [default: beside the image, with .pull behind its name]
    #[arg(long, value_name = "FILE", requires = "pull")]
    pub pull_record: Option<PathBuf>,

    /// How much a second is copied [default: as much as there can be]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "pull")]
    pub pull_speed: Option<u64>,

    /// The guest goes on here at once, and the disk follows: what the guest touches first. (Raw images only)
    #[arg(long, requires = "pull")]
    pub pull_post_copy: bool,

    /// Most virtqueues that the guest may use
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u16).range(1..=256))]
    pub queues: u16,

    /// Threads that serve the queues
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=256))]
    pub iothreads: u16,

    /// CPUs for these threads, such as 2-3,8, shared out among them
    #[arg(long, value_name = "LIST")]
    pub cpus: Option<CpuList>,

    /// Spin for requests before sleeping: auto (while it saves a good part of
    /// what a request takes, at most 900ms of a second), auto:500ms (at most
    /// so much of a second), off, or always, for a time such as 20us
    #[arg(long, value_name = "auto|off|DURATION", default_value = "auto")]
    pub poll: Polling,

    /// Serial number that the guest sees (at most 20 bytes)
    #[arg(long, value_name = "STRING", value_parser = parse_serial)]
    pub serial: Option<String>,

    /// Tell who watches when requests take too long (an event of the API, a line of log, a metric),
    /// with the stage that is to blame: p99=5ms in 10 s (also p50, p90, p999; read:p99=5ms for one
    /// operation), or older=10s for one that is in flight for longer; may be given several times
    #[arg(long = "alarm", value_name = "ALARM")]
    pub alarms: Vec<Alarm>,

    /// Trace every request to this file, best on tmpfs such as /dev/shm (see
    /// `fathom trace`)
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,

    /// A filter between the disk and whoever uses it, such as
    /// delay:read=10ms,write=20ms; repeatable, the first is nearest to the
    /// user (see `fathom filters`)
    #[arg(long = "filter", value_name = "NAME[:OPTION=VALUE,...]", value_parser = parse_filter)]
    pub filters: Vec<Spec>,

    /// Read an image that others may be writing
    #[arg(long, requires = "readonly")]
    pub force_share: bool,

    /// Write to the image although a newer one has superseded it (a snapshot on top, the target of a mirror): what was
    /// written to that one since is lost
    #[arg(long)]
    pub allow_superseded: bool,

    /// Do not let the guest discard
    #[arg(long)]
    pub no_discard: bool,
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

/// For where it is.
pub fn location_parser() -> impl TypedValueParser<Value = Location> {
    OsStringValueParser::new().try_map(|text: OsString| Location::parse(&text))
}

pub fn location_help() -> String {
    let forms: Vec<_> = KINDS.iter().map(|kind| kind.form).collect();
    format!("Where the disk is: {}", forms.join(", "))
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
        return Err(format!("it has {} bytes; 20 are the most", text.len()));
    }
    Ok(text.to_owned())
}

/// NBD's strings.
fn parse_export_string(text: &str) -> Result<String, String> {
    ExportOptions::check(text).map(|()| text.to_owned())
}
