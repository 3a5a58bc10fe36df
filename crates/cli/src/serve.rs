//! `fathom serve`: disks for virtual machines and for NBD clients.

use crate::disk_args::{DiskArgs, location_help, location_parser, socket_parser};
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, ValueEnum};
use fathom_daemon::{
    ApiOptions, Daemon, DiskOptions, Events, Group, NbdOptions, Outcome, RemoteOptions,
    SandboxMode, ServeOptions, SocketSpec, StopTimeout, Tenancy, TlsOptions, access, groups,
    read_config,
};
use fathom_exports::nbd::{Address, TlsMode};
use fathom_stack::Injection;
use fathom_storage::Location;
use fathom_units::{Timeout, redacted};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write;
use std::os::fd::AsFd;
use std::path::PathBuf;

/// What a configuration says by itself.
const ONE_DISK: [&str; 60] = [
    "disk",
    "vhost_user",
    "socket_mode",
    "socket_group",
    "nbd",
    "export_name",
    "export_description",
    "nbd_move",
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
    "zero_missing_clusters",
    "allow_dirs",
    "data_file",
    "bitmaps",
    "keys",
    "readonly",
    "aio",
    "register_memory",
    "cache",
    "server_timeout",
    "server_reconnect",
    "server_connections",
    "base",
    "base_cache",
    "base_cache_size",
    "base_fetch",
    "base_manifest",
    "base_profile",
    "pull",
    "pull_post_copy",
    "pull_record",
    "pull_speed",
    "queues",
    "iothreads",
    "cpus",
    "poll",
    "serial",
    "alarms",
    "trace",
    "inject",
    "filters",
    "api",
    "api_group",
    "api_read_group",
    "http",
    "api_listen",
    "api_certificates",
    "stop_timeout",
    "sandbox",
    "force_share",
    "allow_superseded",
    "no_discard",
];

/// Serve a disk to a virtual machine by vhost-user-blk, to others by NBD
///
/// Runs until SIGTERM or SIGINT; then it finishes what is in flight, if that
/// takes no longer than --stop-timeout, and prints where the requests spent their time.
#[derive(Args, Debug)]
#[command(mut_arg("export_name", |arg| arg.requires("nbd")))]
#[command(mut_arg("export_description", |arg| arg.requires("nbd")))]
#[command(mut_arg("nbd_move", |arg| arg.requires("nbd")))]
pub struct ServeArgs {
    #[arg(value_name = "DISK", value_parser = location_parser(), help = location_help(),
          required_unless_present = "config")]
    disk: Option<Location>,

    /// Serve the disks that this file lists (see fathom.toml(5)); of the other
    /// options only --json and --log go with it
    #[arg(long, value_name = "FILE", conflicts_with_all = ONE_DISK)]
    config: Option<PathBuf>,

    #[command(flatten)]
    of_disk: DiskArgs,

    /// Where NBD clients connect: unix:PATH, tcp:HOST:PORT, vsock:CID:PORT,
    /// fd:N for a listening socket that is inherited, or systemd; repeatable
    #[arg(long, value_name = "ADDRESS", value_parser = address_parser())]
    nbd: Vec<Address>,

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

    /// Delay every other request, to check what measures where time goes:
    /// storage=TIME, queue=TIME or notify=TIME
    #[arg(long, value_name = "PLACE=TIME", hide_short_help = true)]
    inject: Option<Injection>,

    /// Socket of the API: HTTP and JSON, as /openapi.json there describes it; `fathom stats` and
    /// the like use it, too [default: $XDG_RUNTIME_DIR/fathom/control/PID.sock, for root
    /// /run/fathom/control/PID.sock]; fd:N: a listening socket that is inherited
    #[arg(long, value_name = "SOCKET", value_parser = socket_parser())]
    api: Option<SocketSpec>,

    /// Group whose members may use the API beside root and this user
    #[arg(long, value_name = "GROUP", requires = "api")]
    api_group: Option<Group>,

    /// Group whose members may look at everything by the API, and change nothing
    #[arg(long, value_name = "GROUP", requires = "api")]
    api_read_group: Option<Group>,

    /// Address (host:port) where anybody who can reach it may see what is counted, and change
    /// nothing: /metrics for Prometheus, and / for a browser, a page of what goes on right now
    #[arg(long, value_name = "ADDRESS")]
    http: Option<String>,

    /// Address (host:port) where clients from other hosts may look at everything by the API, and change
    /// nothing: `fathom fleet`, Prometheus; by TLS, with certificates
    #[arg(long, value_name = "ADDRESS", requires = "api_certificates")]
    api_listen: Option<String>,

    /// Directory with server-cert.pem and server-key.pem for that, and ca-cert.pem, by which clients'
    /// certificates have to be signed
    #[arg(long, value_name = "DIR", requires = "api_listen")]
    api_certificates: Option<PathBuf>,

    /// What holds back a thread that a guest, a client or an image has taken over: off; log (the
    /// kernel logs system calls that it has no need of); on (they end the server)
    #[arg(long, value_name = "MODE", default_value_t)]
    sandbox: SandboxMode,

    /// Once asked to end, wait this long for what is in flight; then abandon it
    /// and exit with status 1
    #[arg(long, value_name = "DURATION", default_value_t)]
    stop_timeout: StopTimeout,

    /// Take over from the server at the other end of standard input
    #[arg(long, hide = true)]
    take_over: bool,

    /// Print the times at the end as JSON
    #[arg(long)]
    json: bool,

    /// What to log: error, warn, info, debug, trace, or MODULE=LEVEL,...
    /// [default: $FATHOM_LOG, or info]
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
}

fn address_parser() -> impl TypedValueParser<Value = Address> {
    OsStringValueParser::new().try_map(|text: OsString| Address::parse(&text))
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
        let vhost_user = match self.of_disk.vhost_user.clone() {
            // Else nobody could connect, of which the user is told.
            None if self.nbd.is_empty() && std::env::var_os("LISTEN_FDS").is_some() => {
                Some(SocketSpec::Activated)
            }
            socket => socket,
        };
        let is_path = matches!(vhost_user, Some(SocketSpec::Path(_)));
        let is_unix = |address: &Address| matches!(address, Address::Unix(_));
        let has_unix = self.nbd.iter().any(is_unix);
        let (mode, group) = (self.of_disk.socket_mode, self.of_disk.socket_group);
        let where_made = |made: bool| match made || !is_path && !has_unix {
            true => (mode, group),
            false => (None, None),
        };
        let mut table = self
            .of_disk
            .into_table(redacted(&disk.to_string()).into_owned(), disk);
        // Clients of the only disk need not know a name.
        table.export_name.get_or_insert_default();
        (table.socket_mode, table.socket_group) = where_made(is_path);
        table.vhost_user = vhost_user;
        let mut disk = DiskOptions::of(table, !self.nbd.is_empty())?;
        disk.disk.inject = self.inject;
        let (mode, group) = where_made(has_unix);
        let nbd = NbdOptions {
            access: access(mode, group),
            listen: self.nbd,
            tls,
            max_connections: self.nbd_connections.map(|n| n as usize),
            max_per_peer: self.nbd_connections_per_client.map(|n| n as usize),
            idle_timeout: self.nbd_idle_timeout.0,
        };
        let groups = groups(self.api_group, self.api_read_group);
        Ok(ServeOptions {
            disks: vec![disk],
            pools: Vec::new(),
            nbd: (!nbd.listen.is_empty()).then_some(nbd),
            api: ApiOptions {
                socket: self.api,
                groups,
                http: self.http,
                remote: RemoteOptions::of(self.api_listen, self.api_certificates)?,
            },
            config: None,
            kept: None,
            tenants: false,
            tenancy: Tenancy::default(),
            events: Events::default(),
            sandbox: self.sandbox,
            stop_timeout: self.stop_timeout,
            arguments: Vec::new(),
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

pub fn run(args: ServeArgs, events: Events, arguments: Vec<OsString>) -> anyhow::Result<()> {
    let (json, take_over) = (args.json, args.take_over);
    let mut options = match &args.config {
        Some(file) => read_config(file)?,
        None => args.into_options().map_err(anyhow::Error::msg)?,
    };
    options.events = events;
    options.arguments = arguments;
    let daemon = match take_over {
        true => Daemon::take_over(options, std::io::stdin().as_fd().try_clone_to_owned()?)?,
        false => Daemon::start(options)?,
    };
    let ended = daemon.run()?;
    if ended.successor.is_some() {
        return Ok(());
    }
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
