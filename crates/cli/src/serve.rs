//! `fathom serve`: a disk for a virtual machine.

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use fathom_daemon::size::parse_size;
use fathom_daemon::{
    Cache, CpuList, Daemon, DiskSpec, EngineKind, Format, Injection, Polling, ServeOptions,
    SocketSpec, parse_format,
};
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;

/// Serve a disk to a virtual machine by vhost-user-blk
///
/// Runs until SIGTERM or SIGINT; then it finishes what is in flight and prints
/// where the requests spent their time.
#[derive(Args, Debug)]
pub struct ServeArgs {
    /// An image file or block device, memory:SIZE or null:SIZE
    #[arg(value_name = "DISK", value_parser = disk_parser())]
    disk: DiskSpec,

    /// Where the virtual machine connects: a path, or fd:N for a listening
    /// socket that is inherited [default: the one from systemd]
    #[arg(long, value_name = "SOCKET", value_parser = socket_parser())]
    vhost_user: Option<SocketSpec>,

    /// Format of the image: raw, qcow2 or qed [default: raw, but refuse what
    /// looks like another]
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,

    /// Where in a raw image the disk starts, in bytes: a multiple of 512
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    offset: Option<u64>,

    /// Size of the disk in a raw image [default: up to its end]
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    size: Option<u64>,

    /// Most memory for the tables of a qcow2 or qed image, at least 64k
    /// [default: 32M, enough for 256G in clusters of 64k]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    metadata_cache: Option<u64>,

    /// Let the image use files in this directory as its backing file or its
    /// external data file; repeatable [default: the image's own directory]
    #[arg(long = "allow-dir", value_name = "DIR")]
    allow_dirs: Vec<PathBuf>,

    /// Let the guest read only
    #[arg(long)]
    readonly: bool,

    /// How I/O is done: io_uring, native (Linux AIO) or threads
    #[arg(long, value_name = "ENGINE", default_value = "io_uring")]
    aio: EngineKind,

    /// Register guest memory with io_uring: cheaper requests, but all of the
    /// guest's memory is pinned and counts as locked, ballooning gives
    /// nothing back, and post-copy migration cannot be used
    #[arg(long)]
    register_memory: bool,

    /// Host page cache: none (O_DIRECT), writeback, or writethrough (every
    /// write is durable when it completes)
    #[arg(long, value_name = "MODE", default_value = "none")]
    cache: Cache,

    /// Most virtqueues that the guest may use
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u16).range(1..=256))]
    queues: u16,

    /// Threads that serve the queues
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=256))]
    iothreads: u16,

    /// CPUs for these threads, such as 2-3,8, shared out among them
    #[arg(long, value_name = "LIST")]
    cpus: Option<CpuList>,

    /// Spin for requests before sleeping: auto (while it pays), off, or a
    /// time such as 20us
    #[arg(long, value_name = "auto|off|DURATION", default_value = "auto")]
    poll: Polling,

    /// Serial number that the guest sees (at most 20 bytes)
    #[arg(long, value_name = "STRING", value_parser = parse_serial)]
    serial: Option<String>,

    /// Trace every request to this file, best on tmpfs such as /dev/shm (see
    /// `fathom trace`)
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    /// Delay every other request, to check what measures where time goes:
    /// storage=TIME, queue=TIME or notify=TIME
    #[arg(long, value_name = "PLACE=TIME", hide_short_help = true)]
    inject: Option<Injection>,

    /// Socket for `fathom stats` and the like [default:
    /// $XDG_RUNTIME_DIR/fathom/PID.sock, for root /run/fathom/PID.sock]
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,

    /// Read an image that others may be writing
    #[arg(long, requires = "readonly")]
    force_share: bool,

    /// Do not let the guest discard
    #[arg(long)]
    no_discard: bool,

    /// Print the times at the end as JSON
    #[arg(long)]
    json: bool,

    /// What to log: error, warn, info, debug, trace, or MODULE=LEVEL,...
    /// [default: $FATHOM_LOG, or info]
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
}

fn disk_parser() -> impl TypedValueParser<Value = DiskSpec> {
    OsStringValueParser::new().try_map(|text: OsString| DiskSpec::parse(&text))
}

fn socket_parser() -> impl TypedValueParser<Value = SocketSpec> {
    OsStringValueParser::new().try_map(|text: OsString| SocketSpec::parse(&text))
}

/// virtio-blk's GET_ID has room for 20 bytes.
fn parse_serial(text: &str) -> Result<String, String> {
    if text.len() > 20 {
        return Err(format!("it has {} bytes; 20 are the most", text.len()));
    }
    Ok(text.to_owned())
}

impl ServeArgs {
    fn into_options(self) -> ServeOptions {
        ServeOptions {
            disk: self.disk,
            socket: self.vhost_user.unwrap_or(SocketSpec::Activated),
            format: self.format,
            offset: self.offset,
            size: self.size,
            metadata_cache: self.metadata_cache,
            allow_dirs: self.allow_dirs,
            read_only: self.readonly,
            engine: self.aio,
            register_memory: self.register_memory,
            cache: self.cache,
            force_share: self.force_share,
            discard: !self.no_discard,
            queues: self.queues,
            iothreads: self.iothreads.into(),
            cpus: self.cpus.unwrap_or_default(),
            polling: self.poll,
            serial: self.serial,
            trace: self.trace,
            inject: self.inject,
            control: self.control,
        }
    }
}

pub fn run(args: ServeArgs) -> anyhow::Result<()> {
    let json = args.json;
    let outcome = Daemon::start(args.into_options())?.run()?;
    let mut out = std::io::stdout().lock();
    if json {
        writeln!(out, "{}", serde_json::to_string(&outcome)?)?;
    } else {
        write!(out, "{}", outcome.summary)?;
        if let Some(injected) = &outcome.injected {
            writeln!(out, "{injected}")?;
        }
    }
    Ok(())
}
