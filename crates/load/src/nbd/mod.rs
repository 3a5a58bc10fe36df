//! Load on an NBD server, with a client that batches requests and replies.
//!
//! Each worker has its own connection. The client supports every form of requests and replies, so
//! that any server can be measured with the same load.

mod connection;
mod replies;

use std::fs::File;
use std::io;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{self, Timeout};
use serde::Serialize;

pub use fathom_nbd::NbdUri;
pub use fathom_nbd::protocol::Replies;

use crate::control::Control;
use crate::cpu::ProcessCpu;
use crate::error::{Error, Result};
use crate::options::{Load, Nbd, Options, Rw};
use crate::report::Report;
use crate::run::{self, Geometry, Progress, Supervisor};
use connection::{Connection, TICK};
use fathom_nbd::Address;
use fathom_nbd::client::{Export, Wishes, handshake};
use fathom_nbd::protocol::export_flag;

/// Timeout for the server's replies during the handshake.
const ANSWER: Duration = Duration::from_secs(10);

/// Runs the load.
pub fn run(options: &Options, server: &Nbd, progress: &mut dyn FnMut(&Progress)) -> Result<Report> {
    let load = &options.load;
    let (first, export) = connect(server)?;
    check(load, &export)?;
    let geometry = Geometry::new(load, export.size, export.minimum_block)?;
    let pid = server.backend_pid.or_else(|| peer_pid(&first, server));
    let mut sockets = vec![first];
    for _ in 1..load.queues {
        let (socket, other) = connect(server)?;
        if other != export {
            return Err(Error::Handshake(
                "the export is not the same on every connection".into(),
            ));
        }
        sockets.push(socket);
    }
    let make = |(index, socket)| {
        let (form, wait) = (export.replies, server.wait);
        move || Connection::new(socket, index, form, wait, load)
    };
    let ports: Vec<_> = sockets.into_iter().enumerate().map(make).collect();
    let outcome = run::run(load, geometry, ports, &mut Watcher { pid }, progress)?;
    Ok(Report::new(options, &outcome, pid))
}

/// Connects to the server and completes the handshake, which leads to the transmission phase.
fn connect(server: &Nbd) -> Result<(OwnedFd, Export)> {
    let socket = dial(&server.uri).map_err(|cause| Error::Connect {
        path: PathBuf::from(server.uri.as_str()),
        cause,
    })?;
    set_timeouts(&socket, ANSWER)?;
    let mut stream = File::from(socket);
    let export = agree(&mut stream, server)?;
    let socket = OwnedFd::from(stream);
    set_timeouts(&socket, TICK)?;
    Ok((socket, export))
}

/// Performs the handshake. Negotiates the requested form of replies or, without one, the best form
/// that the server supports.
fn agree(stream: &mut File, server: &Nbd) -> Result<Export> {
    let wishes = Wishes {
        export: server.uri.export(),
        replies: match &server.replies {
            Some(wanted) => std::slice::from_ref(wanted),
            None => &[Replies::Extended, Replies::Structured],
        },
        context: None,
    };
    let export = handshake(stream, &wishes).map_err(|e| Error::Handshake(e.to_string()))?;
    match server.replies {
        Some(wanted) if wanted != export.replies => Err(Error::Refused {
            feature: wanted.name(),
            hint: "leave --replies out",
        }),
        _ => Ok(export),
    }
}

/// Opens a connection. TCP_NODELAY makes the kernel send small messages at once.
fn dial(uri: &NbdUri) -> io::Result<OwnedFd> {
    match uri.address() {
        Address::Unix(path) => Ok(UnixStream::connect(path)?.into()),
        Address::Tcp(host, port) => {
            let stream = TcpStream::connect((host.as_str(), *port))?;
            stream.set_nodelay(true)?;
            Ok(stream.into())
        }
        Address::Vsock { .. } => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "only nbd and nbd+unix can be measured",
        )),
    }
}

fn set_timeouts(socket: &OwnedFd, time: Duration) -> Result<()> {
    sockopt::set_socket_timeout(socket, Timeout::Recv, Some(time))
        .and_then(|()| sockopt::set_socket_timeout(socket, Timeout::Send, Some(time)))
        .map_err(|e| Error::os("setting the socket's time-outs", e))
}

/// Returns the PID of the process that listens on a Unix socket, or `None` for TCP.
fn peer_pid(socket: &OwnedFd, server: &Nbd) -> Option<u32> {
    if !matches!(server.uri.address(), Address::Unix(_)) {
        return None;
    }
    let peer = sockopt::socket_peercred(socket).ok()?;
    Some(peer.pid.as_raw_nonzero().get() as u32)
}

/// Returns the PID of the process that listens on the server's Unix socket.
pub fn server_pid(server: &Nbd) -> Option<u32> {
    peer_pid(&dial(&server.uri).ok()?, server)
}

/// Rejects a load that the export does not support.
fn check(load: &Load, export: &Export) -> Result<()> {
    let refused = |feature, hint| Err(Error::Refused { feature, hint });
    if export.is_read_only() && load.writes() {
        return Err(Error::Options(format!(
            "the export is read-only, --rw {} writes",
            load.rw.name()
        )));
    }
    let trims = load.rwmixtrim > 0 || matches!(load.rw, Rw::Trim | Rw::RandTrim);
    if trims && !export.has(export_flag::SEND_TRIM) {
        return refused("NBD_CMD_TRIM", "the export cannot be trimmed");
    }
    if load.rwmixzero > 0 && !export.has(export_flag::SEND_WRITE_ZEROES) {
        return refused("NBD_CMD_WRITE_ZEROES", "leave --rwmixzero out");
    }
    if load.fsync > 0 && !export.has(export_flag::SEND_FLUSH) {
        return refused("NBD_CMD_FLUSH", "leave --fsync out");
    }
    if load.bs > export.maximum_block {
        return Err(Error::Options(format!(
            "--bs {} is more than the server takes, {}",
            load.bs, export.maximum_block
        )));
    }
    Ok(())
}

/// Supervisor for NBD, which does not wake the workers: they wake up regularly, and detect the end
/// of the connection themselves.
struct Watcher {
    pid: Option<u32>,
}

impl Supervisor for Watcher {
    fn wait(&mut self, time: Duration, control: &Control) -> Result<bool> {
        let end = Instant::now() + time;
        while !control.all_finished() && Instant::now() < end {
            std::thread::sleep(time.min(Duration::from_millis(10)));
        }
        Ok(false)
    }

    fn wake(&self) {}

    fn backend_cpu(&self) -> Option<ProcessCpu> {
        ProcessCpu::read(self.pid?)
    }

    fn diagnose(&self, _queue: usize, _completed: u64, _in_flight: u32) -> String {
        "the server has not answered".into()
    }
}

/// Properties of an export, for `--info`.
#[derive(Clone, Debug, Serialize)]
pub struct ExportInfo {
    /// PID of the server process. `None` over TCP.
    pub pid: Option<u32>,
    /// Size of the export in bytes.
    pub size: u64,
    /// Transmission flags of the export.
    pub flags: u16,
    /// Unit of offsets and lengths of requests in bytes.
    pub min_block: u32,
    /// Maximum length of a read or write in bytes.
    pub max_len: u32,
    /// Name of the negotiated form of replies ([`Replies::name`]).
    pub replies: &'static str,
}

/// Connects to a server, reads the export's properties, and disconnects.
pub fn info(server: &Nbd) -> Result<ExportInfo> {
    let (socket, export) = connect(server)?;
    Ok(ExportInfo {
        pid: peer_pid(&socket, server),
        size: export.size,
        flags: export.flags,
        min_block: export.minimum_block,
        max_len: export.maximum_block,
        replies: export.replies.name(),
    })
}

impl std::fmt::Display for ExportInfo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(pid) = self.pid {
            writeln!(f, "server process:    {pid}")?;
        }
        writeln!(f, "size:              {} bytes", self.size)?;
        writeln!(f, "flags:             {:#x}", self.flags)?;
        writeln!(
            f,
            "block size:        {} to {} bytes",
            self.min_block, self.max_len
        )?;
        writeln!(f, "form:              {}", self.replies)
    }
}
