//! Serves clients on other hosts, over TLS with certificates. These clients may only read.

use crate::sockets::RemoteSocket;
use crate::web;
use axum::Router;
use fathom_units::cause;
use std::io;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

/// Timeout for the TLS handshake.
const PATIENCE: Duration = Duration::from_secs(10);

/// Accepts clients while `held` is false.
pub async fn accept(
    door: RemoteSocket,
    held: watch::Receiver<bool>,
    router: Router,
) -> io::Result<()> {
    let acceptor = TlsAcceptor::from(door.tls);
    let greet = move |client: TcpStream| {
        let acceptor = acceptor.clone();
        async move {
            let peer = client.peer_addr();
            let greeted = timeout(PATIENCE, acceptor.accept(client)).await;
            let problem = match greeted {
                Ok(Ok(client)) => return Some(client),
                Ok(Err(error)) => cause(error),
                Err(_) => "no handshake in time".to_owned(),
            };
            if let Ok(peer) = peer {
                tracing::warn!(
                    "API: TLS handshake with {peer} failed: {problem}; the connection is closed"
                );
            }
            None
        }
    };
    web::accept(door.listener, held, router, greet).await
}
