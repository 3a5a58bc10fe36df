//! `fathom serve`: serves disks to virtual machines and NBD clients.

use crate::location_arg::{LOCATION_HELP, location_help, location_parser};
use crate::sandbox_arg::sandbox;
use crate::temporary_sockets::{replace_temporary, stop_with_parent};
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Arg, ArgGroup, Args, ValueEnum};
use fathom_api::{ApiOptions, Groups, RemoteOptions};
use fathom_daemon::{Daemon, read_config};
use fathom_exports::nbd::{Address, TlsMode};
use fathom_host::options::{DiskOptions, NbdOptions, ServeOptions, TlsOptions};
use fathom_host::{Outcome, StopTimeout, Tenancy, access};
use fathom_metrics::Events;
use fathom_sandbox::Mode as SandboxMode;
use fathom_spec::{DiskSpec, Group, SocketSpec, socket_parser};
use fathom_stack::Injection;
use fathom_storage::Location;
use fathom_units::{Timeout, redacted};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write;
use std::os::fd::AsFd;
use std::path::PathBuf;

/// Options that can be used with --config. The file excludes all others, because it has its own.
const WITH_CONFIG: [&str; 6] = [
    "config",
    "json",
    "log",
    "run_dir",
    "take_over",
    "nbd_clients",
];

/// Serve a disk to virtual machines and NBD clients
///
/// The server runs until SIGTERM or SIGINT, or until `fathom quit`. The server then completes the
/// requests in flight, within --stop-timeout, and prints where the requests spent their time.
#[derive(Args, Debug)]
#[command(mut_args(with_requirements),
          group(ArgGroup::new("nbd_clients").args(["nbd", "run"]).multiple(true)))]
pub struct ServeArgs {
    #[arg(value_name = "DISK", value_parser = location_parser(), help = LOCATION_HELP,
          long_help = location_help(), required_unless_present = "config")]
    disk: Option<Location>,

    #[command(flatten)]
    pub of_disk: DiskSpec,

    /// Address for NBD clients, such as tcp:0.0.0.0:10809; repeatable
    ///
    /// unix:PATH, tcp:HOST:PORT, vsock:CID:PORT, fd:N for an inherited listening socket, or systemd
    /// for the sockets that systemd passes.
    #[arg(long, value_name = "ADDRESS", value_parser = address_parser(), help_heading = "NBD")]
    pub nbd: Vec<Address>,

    /// TLS for NBD clients [default: off, with --tls-certificates require]
    #[arg(
        long,
        value_name = "MODE",
        requires = "nbd_clients",
        help_heading = "NBD"
    )]
    tls: Option<Tls>,

    /// Directory with server-cert.pem and server-key.pem
    ///
    /// --tls-verify-peer also needs ca-cert.pem there.
    #[arg(
        long,
        value_name = "DIR",
        requires = "nbd_clients",
        help_heading = "NBD"
    )]
    tls_certificates: Option<PathBuf>,

    /// Require NBD clients to have a certificate signed by ca-cert.pem
    #[arg(long, requires = "tls_certificates", help_heading = "NBD")]
    tls_verify_peer: bool,

    /// Maximum number of NBD connections, 1 to 65536 [default: 256]
    #[arg(long, value_name = "N", requires = "nbd_clients", help_heading = "NBD",
          value_parser = clap::value_parser!(u32).range(1..=65536))]
    nbd_connections: Option<u32>,

    /// Maximum number of NBD connections of one client [default: half of all, at least 16]
    ///
    /// A client is a user of a Unix socket, an IP address, or a virtual machine.
    #[arg(long, value_name = "N", requires = "nbd_clients", help_heading = "NBD",
          value_parser = clap::value_parser!(u32).range(1..=65536))]
    nbd_connections_per_client: Option<u32>,

    /// Time without requests after which an NBD connection is closed, such as 30s
    ///
    /// Connections to hosts that are down are closed in any case.
    #[arg(
        long,
        value_name = "TIME",
        requires = "nbd_clients",
        default_value = "off",
        help_heading = "NBD"
    )]
    nbd_idle_timeout: Timeout,

    /// Delay every other request, to test tools that measure latency
    ///
    /// storage=TIME, queue=TIME or notify=TIME, such as storage=5ms.
    #[arg(long, value_name = "STAGE=TIME", help_heading = "Alarms and tracing")]
    inject: Option<Injection>,

    /// Restrictions on the server's threads if a guest, a client or an image takes them over
    #[arg(long, value_name = "MODE", default_value_t, value_parser = sandbox(),
          help_heading = "Security")]
    sandbox: SandboxMode,

    /// Configuration file, such as /etc/fathom/fathom.toml
    ///
    /// The file has the disks to serve and all other options; see fathom.toml(5). Only --json and
    /// --log can be used with it.
    #[arg(long, value_name = "FILE", help_heading = "Server")]
    config: Option<PathBuf>,

    /// Socket of the HTTP API, which `fathom list` and other commands use
    ///
    /// A path, or fd:N for an inherited listening socket. The API serves its description as
    /// /openapi.json. [default: $XDG_RUNTIME_DIR/fathom/control/PID.sock, for root
    /// /run/fathom/control/PID.sock]
    #[arg(long, value_name = "SOCKET", value_parser = socket_parser(), help_heading = "Server")]
    api: Option<SocketSpec>,

    /// Group whose members can use the API, besides root and the user of the server
    #[arg(long, value_name = "GROUP", requires = "api", help_heading = "Server")]
    api_group: Option<Group>,

    /// Group whose members can read everything through the API, but change nothing
    #[arg(long, value_name = "GROUP", requires = "api", help_heading = "Server")]
    api_read_group: Option<Group>,

    /// Address for metrics without authentication, such as 127.0.0.1:9825
    ///
    /// /metrics is for Prometheus, and / is a page for browsers. Both only show data, and change
    /// nothing.
    #[arg(long, value_name = "HOST:PORT", help_heading = "Server")]
    http: Option<String>,

    /// Address for `fathom fleet` and Prometheus on other hosts, such as 0.0.0.0:9826
    ///
    /// Clients connect by TLS with certificates, can read everything through the API, and change
    /// nothing.
    #[arg(
        long,
        value_name = "HOST:PORT",
        requires = "api_certificates",
        help_heading = "Server"
    )]
    api_listen: Option<String>,

    /// Directory with server-cert.pem, server-key.pem and ca-cert.pem for --api-listen
    ///
    /// Certificates of clients must be signed by ca-cert.pem.
    #[arg(
        long,
        value_name = "DIR",
        requires = "api_listen",
        help_heading = "Server"
    )]
    api_certificates: Option<PathBuf>,

    /// Time for requests in flight when the server stops
    ///
    /// After this time the server abandons the requests and exits with status 1.
    #[arg(long, value_name = "TIME", default_value_t, help_heading = "Server")]
    stop_timeout: StopTimeout,

    /// Take over from the server at the other end of standard input
    #[arg(long, hide = true, help_heading = "Server")]
    take_over: bool,

    /// Run a shell command, and serve the disk until the command ends
    ///
    /// `fathom serve` exits with the status of the command. The command finds the NBD URI in $uri,
    /// the path of the NBD socket in $unixsocket, and the path of the vhost-user socket in
    /// $vhost_user. In --nbd unix:- and --vhost-user -, the - stands for a socket in a temporary
    /// directory. If neither --nbd nor --vhost-user is given, the default is --nbd unix:-.
    #[arg(
        long,
        value_name = "COMMAND",
        conflicts_with = "config",
        help_heading = "Server"
    )]
    pub run: Option<OsString>,

    /// Directory for temporary sockets; `--run` starts its server with this option
    #[arg(long, value_name = "DIR", hide = true, help_heading = "Server")]
    pub run_dir: Option<PathBuf>,

    /// Print the times of the requests at the end as JSON
    #[arg(long, help_heading = "Server")]
    json: bool,

    /// Log level, such as debug [default: $FATHOM_LOG, or info]
    ///
    /// error, warn, info, debug, trace or off, or a list with levels of modules, such as
    /// info,fathom_nbd=trace.
    #[arg(long, value_name = "LEVEL", help_heading = "Server")]
    pub log: Option<String>,
}

/// Adds the requirements and conflicts of an option.
fn with_requirements(arg: Arg) -> Arg {
    let id = arg.get_id().as_str();
    // These disk options have no effect without NBD clients.
    let needs_clients = ["export_name", "export_description", "nbd_move"].contains(&id);
    let excludes_config = !WITH_CONFIG.contains(&id);
    let arg = if needs_clients {
        arg.requires("nbd_clients")
    } else {
        arg
    };
    if excludes_config {
        arg.conflicts_with("config")
    } else {
        arg
    }
}

fn address_parser() -> impl TypedValueParser<Value = Address> {
    OsStringValueParser::new().try_map(|text: OsString| Address::parse(&text))
}

/// TLS modes, by nbdkit's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Tls {
    /// No TLS
    Off,
    /// TLS for clients that ask for it
    On,
    /// Refuse clients without TLS
    Require,
}

impl ServeArgs {
    /// Whether NBD clients may use TLS.
    pub fn has_tls(&self) -> bool {
        matches!(self.tls, Some(Tls::On | Tls::Require))
            || self.tls.is_none() && self.tls_certificates.is_some()
    }

    fn into_options(self) -> Result<ServeOptions, String> {
        let tls = self.tls_options()?;
        let disk = self.disk.expect("clap demands a disk");
        let vhost_user = match self.of_disk.vhost_user.clone() {
            // Without an NBD address, only a socket from systemd lets anybody connect.
            None if self.nbd.is_empty()
                && self.of_disk.fuse.is_none()
                && std::env::var_os("LISTEN_FDS").is_some() =>
            {
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
        let mut spec = DiskSpec {
            name: redacted(&disk.to_string()).into_owned(),
            image: disk,
            ..self.of_disk
        };
        // NBD clients can open the only disk with the empty export name.
        spec.export_name.get_or_insert_default();
        (spec.socket_mode, spec.socket_group) = where_made(is_path);
        spec.vhost_user = vhost_user;
        let mut disk = DiskOptions::of(spec, !self.nbd.is_empty())?;
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
        let groups = Groups::new(self.api_group, self.api_read_group);
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

pub fn run(mut args: ServeArgs, events: Events, arguments: Vec<OsString>) -> anyhow::Result<()> {
    let (json, take_over) = (args.json, args.take_over);
    if let Some(dir) = args.run_dir.as_ref().filter(|_| !take_over) {
        stop_with_parent(dir)?;
    }
    let (nbd, vhost_user) = (&mut args.nbd, &mut args.of_disk.vhost_user);
    replace_temporary(nbd, vhost_user, args.run_dir.as_deref()).map_err(anyhow::Error::msg)?;
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
