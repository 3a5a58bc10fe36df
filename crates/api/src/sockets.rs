//! Sockets at which clients of the API connect.

use crate::entry::{Entry, prepare};
use crate::error::OpenError;
use crate::options::{ApiOptions, RemoteOptions};
use crate::rights::Groups;
use fathom_client::place;
use fathom_sockets::{Access, Bound, Descriptors, Listener, ListenerState, occupant};
use fathom_sockets::{Wanted, make_parent_of, path_of};
use fathom_spec::SocketSpec;
use fathom_tls::{TlsError, server_config};
use fathom_units::cause;
use rustix::net::AddressFamily;
use rustls::ServerConfig;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const API: Wanted = Wanted {
    option: "--api",
    families: &[AddressFamily::UNIX],
    kind: "Unix stream socket",
};

/// The sockets. Dropping them removes the Unix socket, and the entry by which clients find it.
pub struct ApiSockets {
    listener: Listener,
    /// Listener for metrics, by TCP.
    web: Option<TcpListener>,
    /// Listener for clients on other hosts.
    remote: Option<RemoteSocket>,
    path: PathBuf,
    _entry: Option<Entry>,
}

impl ApiSockets {
    /// Listens where the options say. None: the options name no socket, and there is no directory
    /// for one. The server then continues without an API.
    pub fn open(options: &ApiOptions) -> Result<Option<ApiSockets>, OpenError> {
        let entry = place::entry_of(std::process::id());
        let web = options.http.as_deref();
        let web = web.map(|address| listen("--http", address)).transpose()?;
        let remote = options
            .remote
            .as_ref()
            .map(RemoteSocket::open)
            .transpose()?;
        let Some(spec) = &options.socket else {
            let Some(entry) = entry else {
                let problem = "no API socket: XDG_RUNTIME_DIR is not set; set it, or name a socket with \
                     --api";
                if web.is_some() || remote.is_some() {
                    return Err(OpenError::Options(problem.to_owned()));
                }
                tracing::warn!("{problem}");
                return Ok(None);
            };
            let is_asked_for = web.is_some() || remote.is_some();
            return match at_entry(entry, web, remote) {
                Err(error) if !is_asked_for => {
                    tracing::warn!(
                        "the server has no API, so fathom's commands cannot reach it: {error}"
                    );
                    Ok(None)
                }
                door => door.map(Some),
            };
        };
        let (listener, path) = listen_for_clients(spec, access(options.groups))?;
        let entry = entry.and_then(|entry| Entry::make(entry, &path));
        Ok(Some(ApiSockets {
            listener,
            web,
            remote,
            path,
            _entry: entry,
        }))
    }

    /// Returns the path of the Unix socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Address of the listener for metrics.
    pub fn web_address(&self) -> Option<SocketAddr> {
        self.web.as_ref().and_then(|web| web.local_addr().ok())
    }

    /// Duplicates the listener for metrics.
    pub fn web(&self) -> io::Result<Option<TcpListener>> {
        self.web.as_ref().map(TcpListener::try_clone).transpose()
    }

    /// Address of the listener for clients on other hosts.
    pub fn remote_address(&self) -> Option<SocketAddr> {
        let remote = self.remote.as_ref()?;
        remote.listener.local_addr().ok()
    }

    /// Duplicates the listener for clients on other hosts.
    pub fn remote(&self) -> io::Result<Option<RemoteSocket>> {
        self.remote
            .as_ref()
            .map(RemoteSocket::try_clone)
            .transpose()
    }

    /// Returns the state for a successor.
    pub fn hand_over(&self, files: &mut Descriptors) -> io::Result<SocketsState> {
        Ok(SocketsState {
            listener: self.listener.hand_over(files)?,
            web: { self.web.as_ref() }
                .map(|web| files.add(web))
                .transpose()?,
            remote: { self.remote.as_ref() }
                .map(|remote| files.add(&remote.listener))
                .transpose()?,
        })
    }

    /// Takes over the sockets of the predecessor `pid`, and renames their entry after this process.
    /// `spec`: the socket of the options.
    pub fn adopt(pid: u32, adopted: AdoptedSockets, spec: Option<SocketSpec>) -> ApiSockets {
        let AdoptedSockets {
            listener,
            mut bound,
            web,
            remote,
        } = adopted;
        let path = match spec {
            Some(SocketSpec::Path(path)) => Some(path),
            Some(_) => path_of(listener.as_fd()),
            None => None,
        };
        let entry = place::entry_of(std::process::id());
        let renamed = entry.filter(|entry| {
            let old = place::entry_of(pid);
            old.is_some_and(|old| fs::rename(old, entry).is_ok())
        });
        let (path, entry) = match (path, renamed) {
            (Some(path), entry) => (path, entry.map(Entry)),
            (None, Some(entry)) => {
                bound.renamed(entry.clone());
                (entry, None)
            }
            (None, None) => {
                tracing::warn!(
                    "API: the entry in XDG_RUNTIME_DIR is missing, so 'fathom list' does not \
                     find this server"
                );
                (bound.path().unwrap_or(Path::new("")).to_owned(), None)
            }
        };
        listener.own(bound);
        ApiSockets {
            listener,
            web,
            remote,
            path,
            _entry: entry,
        }
    }
}

/// The listener for clients on other hosts, and its certificates.
pub struct RemoteSocket {
    pub listener: TcpListener,
    pub tls: Arc<ServerConfig>,
}

impl RemoteSocket {
    fn open(options: &RemoteOptions) -> Result<RemoteSocket, OpenError> {
        let tls =
            RemoteSocket::certificates(options).map_err(|e| OpenError::Options(e.to_string()))?;
        let listener = listen("--api-listen", &options.listen)?;
        Ok(RemoteSocket { listener, tls })
    }

    fn certificates(options: &RemoteOptions) -> Result<Arc<ServerConfig>, TlsError> {
        let file = |name| options.certificates.join(name);
        server_config(
            &file("server-cert.pem"),
            &file("server-key.pem"),
            Some(&file("ca-cert.pem")),
        )
    }

    fn try_clone(&self) -> io::Result<RemoteSocket> {
        Ok(RemoteSocket {
            listener: self.listener.try_clone()?,
            tls: self.tls.clone(),
        })
    }
}

impl AsFd for ApiSockets {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// Access to the socket. With groups, everybody may connect, and each client's groups are checked
/// then.
fn access(groups: Groups) -> Access {
    match groups == Groups::default() {
        true => Access::PRIVATE,
        false => Access {
            mode: Some(0o666),
            group: None,
        },
    }
}

/// Listeners of the API in the state of a handover.
#[derive(Debug, Serialize, Deserialize)]
pub struct SocketsState {
    /// State of the listener of the Unix socket.
    #[serde(flatten)]
    pub listener: ListenerState,
    /// The listener for metrics by TCP.
    #[serde(default)]
    pub web: Option<usize>,
    /// The listener for clients with TLS.
    #[serde(default)]
    pub remote: Option<usize>,
}

/// Sockets that a predecessor hands over.
pub struct AdoptedSockets {
    listener: Listener,
    bound: Bound,
    web: Option<TcpListener>,
    remote: Option<RemoteSocket>,
}

impl AdoptedSockets {
    /// Takes the sockets' files. `options`: options of this process. Certificates are read again.
    pub fn new(
        state: SocketsState,
        options: &ApiOptions,
        files: &mut Descriptors,
    ) -> Result<AdoptedSockets, String> {
        let (listener, bound) = Listener::adopt(state.listener, files)?;
        let web = state.web.map(|web| files.take(web)).transpose()?;
        let remote = state.remote.map(|number| files.take(number)).transpose()?;
        if remote.is_none() && options.remote.is_some() {
            tracing::warn!(
                "API: --api-listen is new in the configuration; other hosts cannot connect until \
                 the server restarts"
            );
        }
        let remote = remote.zip(options.remote.as_ref());
        let remote = remote.map(|(listener, options)| {
            let tls = RemoteSocket::certificates(options).map_err(|error| error.to_string())?;
            let listener = TcpListener::from(listener);
            Ok::<_, String>(RemoteSocket { listener, tls })
        });
        Ok(AdoptedSockets {
            listener,
            bound,
            web: web.map(TcpListener::from),
            remote: remote.transpose()?,
        })
    }
}

/// Listens for clients of the API. Returns the path at which they connect, too.
fn listen_for_clients(spec: &SocketSpec, access: Access) -> Result<(Listener, PathBuf), OpenError> {
    let listener = match spec {
        SocketSpec::Path(path) => {
            make_parent_of(path).map_err(OpenError::directory(
                "cannot create the directory of a socket",
            ))?;
            return Ok((Listener::bind(path, access)?, path.clone()));
        }
        SocketSpec::Fd(fd) => API.inherited(*fd)?,
        SocketSpec::Activated => {
            let problem = "an inherited API socket must be given as a path or fd:N";
            return Err(API.problem(problem).into());
        }
    };
    let path = path_of(listener.as_fd());
    let path = path.ok_or_else(|| API.problem(format!("{spec}: the socket has no path")))?;
    Ok((listener, path))
}

fn listen(option: &str, address: &str) -> Result<TcpListener, OpenError> {
    let failed = |problem: String| OpenError::Options(format!("{option} {address}: {problem}"));
    let found = addresses(address).map_err(failed)?;
    let socket = TcpListener::bind(&found[..]).map_err(|error| {
        failed(match error.kind() {
            ErrorKind::AddrInUse => {
                let by = found.first().map(|address| occupant::at_tcp(*address));
                let by = by.unwrap_or_default();
                format!("in use by {by}; {}", occupant::remedy(&by, "port"))
            }
            _ => format!("cannot listen: {}", cause(error)),
        })
    })?;
    let nonblocking = socket.set_nonblocking(true);
    nonblocking
        .map_err(|error| failed(format!("cannot set the socket's options: {}", cause(error))))?;
    Ok(socket)
}

/// Looks up a HOST:PORT to listen at.
fn addresses(text: &str) -> Result<Vec<SocketAddr>, String> {
    let port = text.strip_prefix(':').unwrap_or(text);
    if port.parse::<u16>().is_ok() {
        return Err(format!(
            "names no host; write '[::]:{port}' to listen at all addresses of this machine, or '127.0.0.1:{port}'"
        ));
    }
    if !text.contains(':') {
        return Err("names no port; write HOST:PORT, such as 127.0.0.1:9825".into());
    }
    let found = text.to_socket_addrs();
    let found =
        found.map_err(|error| format!("cannot look up the host's address: {}", cause(error)))?;
    Ok(found.collect())
}

fn at_entry(
    entry: PathBuf,
    web: Option<TcpListener>,
    remote: Option<RemoteSocket>,
) -> Result<ApiSockets, OpenError> {
    prepare(&entry).map_err(OpenError::directory(
        "cannot prepare the directory of the API's socket",
    ))?;
    Ok(ApiSockets {
        listener: Listener::bind(&entry, Access::PRIVATE)?,
        web,
        remote,
        path: entry,
        _entry: None,
    })
}
