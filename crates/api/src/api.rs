//! The API's thread.

use crate::clients::{Asks, Clients, guard};
use crate::connection::{ACCEPT_PAUSE, serve};
use crate::handle::{Server, ServerHandle};
use crate::pages::{PAGES, Pages};
use crate::rights::{Groups, Rights};
use crate::routes::{router, routes};
use crate::sockets::{ApiSockets, SocketsState};
use crate::{remote, web};
use axum::Router;
use axum::middleware::from_fn_with_state;
use fathom_core::{ThreadKind, thread_starts};
use fathom_metrics::Events;
use fathom_metrics::Scale;
use fathom_sockets::Descriptors;
use fathom_units::cause;
use futures_util::future::{Either, select};
use serde::{Deserialize, Serialize};
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::runtime::Builder;
use tokio::sync::{oneshot, watch};

/// Number of times that other tasks may continue before the thread ends.
const LAST_TURNS: usize = 32;
/// Number of threads for long work. Each page of metrics may occupy one, as its client reads it.
/// The others remain for other work.
const BLOCKING: usize = PAGES + 2;
/// Time for requests that are in progress when the API ends.
const FAREWELL: Duration = Duration::from_millis(500);

/// State of the API in a handover.
#[derive(Debug, Serialize, Deserialize)]
pub struct ApiState {
    /// State of the listeners.
    #[serde(flatten)]
    pub sockets: SocketsState,
    /// Frequency of the clock of the metrics' buckets. None: as measured.
    #[serde(default)]
    pub ticks_per_second: Option<f64>,
}

/// The running API. Dropping it ends it.
pub struct Api {
    sockets: ApiSockets,
    stop: Option<oneshot::Sender<()>>,
    /// True: connections wait.
    held: watch::Sender<bool>,
    scale: Arc<Scale>,
    thread: Option<JoinHandle<()>>,
}

impl Api {
    /// Serves clients at `sockets`, with the rights of their groups. `server` gets their requests.
    pub fn start(
        sockets: ApiSockets,
        scale: Scale,
        groups: Groups,
        server: Arc<dyn Server>,
        events: Events,
    ) -> io::Result<Api> {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .on_thread_start(|| {
                thread_starts(ThreadKind::General);
            })
            .thread_name("api")
            .max_blocking_threads(BLOCKING)
            .build()?;
        let scale = Arc::new(scale);
        let socket = sockets.as_fd().try_clone_to_owned()?;
        let socket = std::os::unix::net::UnixListener::from(socket);
        socket.set_nonblocking(true)?;
        let (web, remote) = (sockets.web()?, sockets.remote()?);
        let (stop, stopped) = oneshot::channel::<()>();
        let (held, is_held) = watch::channel(false);
        let (routes, description) = routes();
        let pages = Pages::new(scale.clone());
        let server = ServerHandle::new(server, description, events, pages);
        let body = move || {
            thread_starts(ThreadKind::General);
            let serve = async {
                let socket = UnixListener::from_std(socket)?;
                if let Some(web) = web {
                    tokio::spawn(web::accept(
                        web,
                        is_held.clone(),
                        web::router(server.clone()),
                        async |client| Some(client),
                    ));
                }
                let router = router(routes, server);
                if let Some(remote) = remote {
                    let accepted = remote::accept(remote, is_held.clone(), router.clone());
                    tokio::spawn(async {
                        if let Err(error) = accepted.await {
                            tracing::error!(
                                "API: cannot serve other hosts (--api-listen): {}",
                                cause(error)
                            );
                        }
                    });
                }
                tokio::spawn(accept_clients(socket, is_held, groups, router));
                // (An error means that the sender was dropped, which also ends the API.)
                let _ = stopped.await;
                // Send the last replies.
                for _ in 0..LAST_TURNS {
                    tokio::task::yield_now().await;
                }
                Ok::<_, io::Error>(())
            };
            if let Err(error) = runtime.block_on(serve) {
                tracing::error!("API: cannot serve clients: {}", cause(error));
            }
            runtime.shutdown_timeout(FAREWELL);
        };
        let thread = std::thread::Builder::new().name("api".into()).spawn(body)?;
        Ok(Api {
            sockets,
            stop: Some(stop),
            held,
            scale,
            thread: Some(thread),
        })
    }

    /// Makes new connections wait, or accepts them again.
    pub fn hold(&self, hold: bool) {
        // (The thread may have ended.)
        let _ = self.held.send(hold);
    }

    /// Returns the state for a successor.
    pub fn hand_over(&self, files: &mut Descriptors) -> io::Result<ApiState> {
        Ok(ApiState {
            sockets: self.sockets.hand_over(files)?,
            ticks_per_second: Some(self.scale.ticks_per_second()),
        })
    }

    /// Path of the Unix socket.
    pub fn path(&self) -> &Path {
        self.sockets.path()
    }

    /// Address of the listener for clients on other hosts.
    pub fn remote_address(&self) -> Option<SocketAddr> {
        self.sockets.remote_address()
    }

    /// Address of the listener for metrics.
    pub fn web_address(&self) -> Option<SocketAddr> {
        self.sockets.web_address()
    }
}

impl Api {
    /// Sends the last replies and ends, and leaves the sockets to a successor.
    pub fn leave(mut self) {
        self.end();
        // The socket is the successor's.
        std::mem::forget(self);
    }

    fn end(&mut self) {
        drop(self.stop.take());
        // (No task of the thread blocks.)
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Drop for Api {
    fn drop(&mut self) {
        self.end();
    }
}

async fn accept_clients(
    socket: UnixListener,
    mut held: watch::Receiver<bool>,
    groups: Groups,
    router: Router,
) {
    let mut clients = Clients::default();
    loop {
        if held.wait_for(|held| !held).await.is_err() {
            return;
        }
        let accepted = match select(pin!(socket.accept()), pin!(held.changed())).await {
            Either::Left((accepted, _)) => accepted,
            Either::Right(_) => continue,
        };
        match accepted {
            Ok((client, _)) => {
                let rights = groups.rights(&client).unwrap_or(Rights::Nothing);
                let asks = Asks::default();
                let guard = from_fn_with_state((rights, asks.clone()), guard);
                let task = tokio::spawn(serve(client, router.clone().layer(guard)));
                clients.add(rights, asks, task.abort_handle());
            }
            Err(error) => {
                tracing::warn!("API: cannot accept a client's connection: {}", cause(error));
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}
