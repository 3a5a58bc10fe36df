//! The location of a server, and connections to it.

use crate::error::ClientError;
use fathom_tls::{ClientFiles, TlsError, client_config, open_here};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;

/// Default TCP port of servers for clients on other hosts.
pub const PORT: u16 = 9826;

/// A server that accepts requests.
#[derive(Clone, Debug)]
pub enum Server {
    /// A server on this host, by its socket.
    Local(PathBuf),
    /// A server on another host.
    Remote(Remote),
}

/// Shows the server as users write it.
impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Server::Local(path) => path.display().fmt(f),
            Server::Remote(remote) => f.write_str(&remote.host),
        }
    }
}

/// A server that is reached over TLS, with certificates on both sides.
#[derive(Clone, Debug)]
pub struct Remote {
    /// The host as the user wrote it.
    host: String,
    /// The host or address, and the port, to connect to.
    at: (String, u16),
    /// The name that the server's certificate must have.
    name: ServerName<'static>,
    config: Arc<ClientConfig>,
}

/// The certificates that servers must have, and the certificate that this client shows.
#[derive(Clone, Debug)]
pub struct Credentials {
    config: Arc<ClientConfig>,
    /// Name that all servers' certificates must have. None: each certificate has the name of its
    /// host.
    server: Option<String>,
}

impl Credentials {
    /// Loads the certificates and the key. `dir` must contain ca-cert.pem, client-cert.pem and
    /// client-key.pem.
    pub fn load(dir: &Path, server: Option<String>) -> Result<Credentials, TlsError> {
        let files = ClientFiles::of(Some(dir));
        if let Some((cert, _)) = &files.own {
            // Reports a missing certificate here, because servers reject clients without one.
            fathom_tls::read_certificates(cert, &open_here)?;
        }
        let config = client_config(&files, &open_here)?;
        Ok(Credentials { config, server })
    }
}

impl Remote {
    /// Returns a server. `host`: `HOST`, `HOST:PORT` or `[IPV6]:PORT`. The error is one line for
    /// the user.
    pub fn new(host: &str, credentials: &Credentials) -> Result<Remote, String> {
        let at =
            split_host(host, PORT).ok_or_else(|| format!("'{host}' is not HOST or HOST:PORT"))?;
        let name = credentials.server.clone().unwrap_or_else(|| at.0.clone());
        let bad = |_| format!("'{name}' is not a name that a server's certificate can have");
        Ok(Remote {
            host: host.to_owned(),
            name: ServerName::try_from(name.clone()).map_err(bad)?,
            at,
            config: credentials.config.clone(),
        })
    }

    /// Returns the host in lower case and the port, which identify a server however the user wrote
    /// it.
    pub fn place(&self) -> (String, u16) {
        (self.at.0.to_lowercase(), self.at.1)
    }

    async fn connect(&self) -> io::Result<impl Stream + use<>> {
        let (host, port) = &self.at;
        let socket = TcpStream::connect((&**host, *port)).await?;
        // Requests are smaller than a packet, and nothing follows them, so waiting for more data
        // would only cost time.
        socket.set_nodelay(true)?;
        let connector = TlsConnector::from(self.config.clone());
        connector.connect(self.name.clone(), socket).await
    }
}

/// Splits a host from its port: `HOST`, `HOST:PORT` or `[IPV6]:PORT`. None: the text is none of
/// these.
pub fn split_host(host: &str, usual: u16) -> Option<(String, u16)> {
    let (name, port) = match host.strip_prefix('[') {
        Some(rest) => {
            let (name, port) = rest.split_once(']')?;
            let port = port.is_empty().then_some(None);
            let port = port.or_else(|| rest.split_once("]:").map(|(_, port)| Some(port)));
            (name, port?)
        }
        None => match host.split_once(':') {
            // More than one colon: an address without a port.
            Some((_, rest)) if rest.contains(':') => (host, None),
            Some((name, port)) => (name, Some(port)),
            None => (host, None),
        },
    };
    let port = port.map_or(Some(usual), |port| {
        port.parse().ok().filter(|port| *port > 0)
    });
    (!name.is_empty()).then_some((name.to_owned(), port?))
}

/// A byte stream.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> Stream for T {}

impl Server {
    /// Opens a new connection to the server.
    pub(crate) async fn connect(&self) -> Result<TokioIo<Box<dyn Stream>>, ClientError> {
        let stream: io::Result<Box<dyn Stream>> = match self {
            Server::Local(path) => UnixStream::connect(path)
                .await
                .map(|one| Box::new(one) as _),
            Server::Remote(remote) => remote.connect().await.map(|one| Box::new(one) as _),
        };
        let stream = stream.map_err(|error| ClientError::of_connect(self, error));
        stream.map(TokioIo::new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_have_ports() {
        let at = |text| split_host(text, PORT).map(|(name, port)| format!("{name} {port}"));
        for (text, expected) in [
            ("a.example", Some("a.example 9826")),
            ("a:1", Some("a 1")),
            ("10.0.0.1:70", Some("10.0.0.1 70")),
            ("[::1]:70", Some("::1 70")),
            ("[fe80::1]", Some("fe80::1 9826")),
            ("fe80::1", Some("fe80::1 9826")),
            ("", None),
            (":70", None),
            ("a:", None),
            ("a:0", None),
            ("a:65536", None),
            ("[::1", None),
            ("[::1]70", None),
        ] {
            assert_eq!(at(text).as_deref(), expected, "{text}");
        }
    }
}
