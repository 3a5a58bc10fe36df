//! The part of the API that is served over TCP, to every client that can reach the address: metrics
//! and live numbers, and nothing that changes the server.

use crate::clients::{Asks, Clients, guard};
use crate::connection::{ACCEPT_PAUSE, serve};
use crate::disks;
use crate::handle::ServerHandle;
use crate::live;
use crate::metrics;
use crate::page;
use crate::problem;
use crate::rights::Rights;
use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::get;
use fathom_units::cause;
use futures_util::future::{Either, select};
use std::io;
use std::pin::pin;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

pub fn router(server: ServerHandle) -> Router {
    Router::new()
        .route("/", get(page::page))
        .route("/metrics", get(metrics::metrics))
        .route("/v1/live", get(live::live))
        .route("/v1/disks/{name}/slow", get(disks::slow))
        .fallback(problem::no_such_place)
        .method_not_allowed_fallback(problem::no_such_method)
        .with_state(server)
}

/// Accepts clients while `held` is false. `greet` converts a TCP connection to the connection that
/// requests use. Clients may only read.
pub async fn accept<C, F>(
    socket: std::net::TcpListener,
    mut held: watch::Receiver<bool>,
    router: Router,
    greet: impl Fn(TcpStream) -> F,
) -> io::Result<()>
where
    C: AsyncRead + AsyncWrite + Send + 'static,
    F: Future<Output = Option<C>> + Send + 'static,
{
    let socket = TcpListener::from_std(socket)?;
    let mut clients = Clients::default();
    while held.wait_for(|held| !held).await.is_ok() {
        let accepted = match select(pin!(socket.accept()), pin!(held.changed())).await {
            Either::Left((accepted, _)) => accepted,
            Either::Right(_) => continue,
        };
        match accepted {
            Ok((client, _)) => {
                let asks = Asks::of_stranger();
                let guard = from_fn_with_state((Rights::Read, asks.clone()), guard);
                let (greeted, router) = (greet(client), router.clone().layer(guard));
                let known = asks.clone();
                let task = tokio::spawn(async move {
                    if let Some(client) = greeted.await {
                        known.is_known();
                        serve(client, router).await;
                    }
                });
                clients.add(Rights::Read, asks, task.abort_handle());
            }
            Err(error) => {
                tracing::warn!(
                    "API: cannot accept a client's TCP connection: {}",
                    cause(error)
                );
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    Ok(())
}
