//! `fathom serve`: disks for virtual machines and for NBD clients.

use crate::aio::AioArg;
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, ValueEnum};
use fathom_core::Polling;
use fathom_daemon::{
    Daemon, DiskOptions, ExportOptions, NbdOptions, Outcome, ServeOptions, SocketSpec, StopTimeout,
    TlsOptions, parse_group, parse_mode, read_config,
};
use fathom_exports::Access;
use fathom_exports::nbd::{Address, TlsMode};
use fathom_filters::Spec;
use fathom_formats::Format;
use fathom_stack::{CpuList, Description, Injection, parse_format};
use fathom_storage::{Cache, KINDS, Location};
use fathom_units::{Timeout, parse_size};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;

/// What a configuration says by itself.
const ONE_DISK: [&str; 36] = [
    "disk",
    "vhost_user",
    "socket_mode",
    "socket_group",
    "nbd",
    "export_name",
    "export_description",
    "tls",
    "tls_certificates",
    "tls_verify_peer",
    "nbd_connections",
    "nbd_connections_per_client",
    "nbd_idle_timeout",
    "format",
    "offset",
    "size",
    "metadata_cache",
    "allow_dirs",
    "data_file",
    "readonly",
    "aio",
    "register_memory",
    "cache",
    "server_timeout",
    "queues",
    "iothreads",
    "cpus",
    "poll",
    "serial",
    "trace",
    "inject",
    "filters",
    "control",
    "stop_timeout",
    "force_share",
    "no_discard",
];

/// Serve a disk to a virtual machine by vhost-user-blk, to others by NBD
///
/// Runs until SIGTERM or SIGINT; then it finishes what is in flight, if that
/// takes no longer than --stop-timeout, and prints where the requests spent their time.
#[derive(Args, Debug)]
pub struct ServeArgs {
    #[arg(value_name = "DISK", value_parser = disk_parser(), help = disk_help(),
          required_unless_present = "config")]
    disk: Option<Location>,

    /// Serve the disks that this file lists (see the README); of the other
    /// options only --json and --log go with it
    #[arg(long, value_name = "FILE", conflicts_with_all = ONE_DISK)]
    config: Option<PathBuf>,

    /// Where the virtual machine connects: a path, or fd:N for a listening
    /// socket that is inherited [default without --nbd: the one from systemd]
    #[arg(long, value_name = "SOCKET", value_parser = socket_parser())]
    vhost_user: Option<SocketSpec>,

    /// Where NBD clients connect: unix:PATH, tcp:HOST:PORT, vsock:CID:PORT,
    /// fd:N for a listening socket that is inherited, or systemd; repeatable
    #[arg(long, value_name = "ADDRESS", value_parser = address_parser())]
    nbd: Vec<Address>,

    /// Permissions of the Unix sockets that are made, such as 660: who may
    /// write may connect [default: 660 less the umask; with --socket-group 660]
    #[arg(long, value_name = "MODE", value_parser = parse_mode)]
    socket_mode: Option<u32>,

    /// Group of the Unix sockets that are made
    #[arg(long, value_name = "GROUP", value_parser = parse_group)]
    socket_group: Option<u32>,

    /// The disk's name for NBD clients, who get it without a name, too
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true,
          requires = "nbd", value_parser = parse_export_string)]
    export_name: String,

    /// What NBD clients are told about the disk, for people
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true,
          requires = "nbd", value_parser = parse_export_string)]
    export_description: String,

    /// TLS for NBD clients: off, on (for those who want it) or require
    /// [default: off, with --tls-certificates require]
    #[arg(long, value_name = "MODE", requires = "nbd")]
    tls: Option<Tls>,

    /// Directory with server-cert.pem and server-key.pem, and ca-cert.pem for
    /// --tls-verify-peer
    #[arg(long, value_name = "DIR", requires = "nbd")]
    tls_certificates: Option<PathBuf>,

    /// Demand a certificate of NBD clients that ca-cert.pem has signed
    #[arg(long, requires = "tls_certificates")]
    tls_verify_peer: bool,

    /// Most NBD connections at once [default: 256]
    #[arg(long, value_name = "N", requires = "nbd",
          value_parser = clap::value_parser!(u32).range(1..=65536))]
    nbd_connections: Option<u32>,

    /// Most of these for one client: a user (of a Unix socket), an address or a
    /// virtual machine [default: half of all, but 16 at least]
    #[arg(long, value_name = "N", requires = "nbd",
          value_parser = clap::value_parser!(u32).range(1..=65536))]
    nbd_connections_per_client: Option<u32>,

    /// End an NBD connection that had no request for so long, such as 30s, or
    /// off (machines that are gone are noticed in any case)
    #[arg(long, value_name = "TIME", requires = "nbd", default_value = "off")]
    nbd_idle_timeout: Timeout,

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
    /// external data file, to read them; repeatable [default: the image's own
    /// directory]
    #[arg(long = "allow-dir", value_name = "DIR")]
    allow_dirs: Vec<PathBuf>,

    /// The external data file of a qcow2 image: it is written to only if it is
    /// named here, whatever the image calls it
    #[arg(long, value_name = "FILE")]
    data_file: Option<PathBuf>,

    /// Let the guest read only
    #[arg(long)]
    readonly: bool,

    #[command(flatten)]
    aio: AioArg,

    /// Register guest memory with io_uring: cheaper requests, but all of the
    /// guest's memory is pinned and counts as locked, ballooning gives
    /// nothing back, and post-copy migration cannot be used
    #[arg(long)]
    register_memory: bool,

    /// Host page cache: none (O_DIRECT), writeback, or writethrough (every
    /// write is durable when it completes)
    #[arg(long, value_name = "MODE", default_value = "none")]
    cache: Cache,

    /// Give up on an NBD server that has the disk when it says nothing of a
    /// request for this long, or off [default: 60s]
    #[arg(long, value_name = "DURATION")]
    server_timeout: Option<Timeout>,

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

    /// Spin for requests before sleeping: auto (while it saves a good part of
    /// what a request takes, at most 900ms of a second), auto:500ms (at most
    /// so much of a second), off, or always, for a time such as 20us
    #[arg(long, value_name = "auto|off|DURATION", default_value = "auto")]
    poll: Polling,

    /// Serial number that the guest sees (at most 20 bytes)
    #[arg(long, value_name = "STRING", value_parser = parse_serial)]
    serial: Option<String>,

    /// Trace every request to this file, best on tmpfs such as /dev/shm (see
    /// `fathom trace`)
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    /// A filter between the disk and whoever uses it, such as
    /// delay:read=10ms,write=20ms; repeatable, the first is nearest to the
    /// user (see `fathom filters`)
    #[arg(long = "filter", value_name = "NAME[:OPTION=VALUE,...]", value_parser = parse_filter)]
    filters: Vec<Spec>,

    /// Delay every other request, to check what measures where time goes:
    /// storage=TIME, queue=TIME or notify=TIME
    #[arg(long, value_name = "PLACE=TIME", hide_short_help = true)]
    inject: Option<Injection>,

    /// Socket for `fathom stats` and the like [default:
    /// $XDG_RUNTIME_DIR/fathom/control/PID.sock, for root
    /// /run/fathom/control/PID.sock]
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,

    /// Once asked to end, wait this long for what is in flight; then abandon it
    /// and exit with status 1
    #[arg(long, value_name = "DURATION", default_value_t)]
    stop_timeout: StopTimeout,

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

fn disk_parser() -> impl TypedValueParser<Value = Location> {
    OsStringValueParser::new().try_map(|text: OsString| Location::parse(&text))
}

fn disk_help() -> String {
    let forms: Vec<_> = KINDS.iter().map(|kind| kind.form).collect();
    format!("Where the disk is: {}", forms.join(", "))
}

fn socket_parser() -> impl TypedValueParser<Value = SocketSpec> {
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

fn address_parser() -> impl TypedValueParser<Value = Address> {
    OsStringValueParser::new().try_map(|text: OsString| Address::parse(&text))
}

/// NBD's strings.
fn parse_export_string(text: &str) -> Result<String, String> {
    ExportOptions::check(text).map(|()| text.to_owned())
}

/// nbdkit's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Tls {
    Off,
    On,
    Require,
}

impl ServeArgs {
    fn into_options(self) -> Result<ServeOptions, String> {
        let tls = self.tls_options()?;
        let disk = self.disk.expect("clap demands a disk");
        let vhost_user = match self.vhost_user {
            // Else nobody could connect, of which the user is told.
            None if self.nbd.is_empty() && std::env::var_os("LISTEN_FDS").is_some() => {
                Some(SocketSpec::Activated)
            }
            socket => socket,
        };
        let access = Access {
            mode: self.socket_mode,
            group: self.socket_group,
        };
        let is_path = matches!(vhost_user, Some(SocketSpec::Path(_)));
        let is_unix = |address: &Address| matches!(address, Address::Unix(_));
        let has_unix = self.nbd.iter().any(is_unix);
        let where_made = |made: bool| match made || !is_path && !has_unix {
            true => access,
            false => Access::default(),
        };
        let export = ExportOptions {
            name: self.export_name,
            description: self.export_description,
        };
        let disk = Description {
            format: self.format,
            offset: self.offset,
            size: self.size,
            metadata_cache: self.metadata_cache,
            allow_dirs: self.allow_dirs,
            data_file: self.data_file,
            read_only: self.readonly,
            engine: self.aio.aio,
            register_memory: self.register_memory,
            cache: self.cache,
            server_timeout: self.server_timeout,
            force_share: self.force_share,
            discard: !self.no_discard,
            iothreads: self.iothreads.into(),
            cpus: self.cpus.unwrap_or_default(),
            polling: self.poll,
            inject: self.inject,
            filters: self.filters,
            ..Description::new(disk)
        };
        let disk = DiskOptions {
            access: where_made(is_path),
            vhost_user,
            nbd: (!self.nbd.is_empty()).then_some(export),
            queues: self.queues,
            serial: self.serial,
            trace: self.trace,
            ..DiskOptions::new(disk)
        };
        let nbd = NbdOptions {
            access: where_made(has_unix),
            listen: self.nbd,
            tls,
            max_connections: self.nbd_connections.map(|n| n as usize),
            max_per_peer: self.nbd_connections_per_client.map(|n| n as usize),
            idle_timeout: self.nbd_idle_timeout.0,
        };
        Ok(ServeOptions {
            disks: vec![disk],
            nbd: (!nbd.listen.is_empty()).then_some(nbd),
            control: self.control,
            stop_timeout: self.stop_timeout,
        })
    }

    fn tls_options(&self) -> Result<Option<TlsOptions>, String> {
        let mode = match (self.tls, &self.tls_certificates) {
            (Some(Tls::Off), _) | (None, None) => return Ok(None),
            (Some(Tls::On), _) => TlsMode::On,
            (Some(Tls::Require) | None, _) => TlsMode::Require,
        };
        let certificates = self.tls_certificates.clone();
        let certificates = certificates.ok_or("--tls needs --tls-certificates")?;
        Ok(Some(TlsOptions {
            mode,
            certificates,
            verify_peer: self.tls_verify_peer,
        }))
    }
}

pub fn run(args: ServeArgs) -> anyhow::Result<()> {
    let json = args.json;
    let options = match &args.config {
        Some(file) => read_config(file)?,
        None => args.into_options().map_err(anyhow::Error::msg)?,
    };
    let ended = Daemon::start(options)?.run()?;
    let mut out = std::io::stdout().lock();
    match &ended.outcomes[..] {
        [(_, outcome)] if json => writeln!(out, "{}", serde_json::to_string(outcome)?)?,
        [(_, outcome)] => print(&mut out, outcome)?,
        several if json => {
            let by_name: BTreeMap<_, _> = several.iter().map(|(name, o)| (name, o)).collect();
            writeln!(out, "{}", serde_json::to_string(&by_name)?)?;
        }
        several => {
            for (name, outcome) in several {
                writeln!(out, "{name}:")?;
                print(&mut out, outcome)?;
            }
        }
    }
    Ok(ended.stopped?)
}

fn print(out: &mut impl Write, outcome: &Outcome) -> std::io::Result<()> {
    write!(out, "{}", outcome.summary)?;
    match &outcome.injected {
        Some(injected) => writeln!(out, "{injected}"),
        None => Ok(()),
    }
}
