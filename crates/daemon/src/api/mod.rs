//! The API: HTTP/1.1 and JSON on a Unix socket, described by OpenAPI at `/openapi.json`.
//!
//! It has a thread and an asynchronous runtime of its own. What it is asked becomes a command for the
//! daemon's thread; nothing of a disk is touched here.
//!
//! - `listen` is where clients connect, `clients` says how many, `connection` serves each;
//! - `disks` has what can be done to disks, `backup` how they are kept as they were, `bitmaps` what of them has been changed since,
//!   `mirror` how they are copied while they are used, `snapshots` how their own images keep them, `jobs` all that is done with them beside their users, `groups` to those
//!   that share limits, `server` what concerns all of them, `stream` what happens;
//! - `request` is what is read of each;
//! - `metrics` is what is counted (on `pages`), `live` what goes on right now, `page` shows that in a
//!   browser, and `web` is what can be had by TCP, `remote` by TLS;
//! - `rights` says who may do what;
//! - `problem` is how errors look (RFC 9457), `tag` how two versions of a disk are told apart.

mod backup;
mod bitmaps;
mod clients;
mod connection;
mod disks;
mod groups;
mod jobs;
mod listen;
mod live;
mod metrics;
mod mirror;
mod page;
mod pages;
mod problem;
mod remote;
mod request;
mod rights;
mod server;
mod snapshots;
mod state;
mod stream;
mod tag;
mod web;

use crate::controller::Step;
use crate::handover::ApiState;
use crate::mailbox::Post;
use axum::Router;
use axum::middleware::from_fn_with_state;
use clients::{Asks, Clients, guard};
use connection::{ACCEPT_PAUSE, serve};
use fathom_core::{ThreadKind, thread_starts};
use fathom_metrics::Events;
use fathom_metrics::Scale;
use fathom_sockets::Descriptors;
use fathom_units::cause;
use futures_util::future::{Either, select};
pub use listen::{Adopted, Door};
use pages::{PAGES, Pages};
pub use rights::Groups;
use rights::Rights;
use state::ServerHandle;
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
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Of the other tasks, when the server ends.
const LAST_TURNS: usize = 32;
/// Threads for what takes some time. Pages are made no faster than clients take them in: there is always
/// one for others.
const BLOCKING: usize = PAGES + 2;
/// For connections that are still served when the server ends.
const FAREWELL: Duration = Duration::from_millis(500);

#[derive(OpenApi)]
#[openapi(
    info(
        title = "fathom",
        description = "Controls a running `fathom serve`, over its Unix socket.",
        version = "1",
        license(name = "MIT OR Apache-2.0"),
        contact()
    ),
    tags(
        (name = "disks", description = "Adds, changes and removes disks, and starts jobs on them, while other disks are served"),
        (name = "server", description = "Requests about the whole server")
    )
)]
struct Description;

/// Being served; no longer when dropped.
pub struct Api {
    /// Where it listens, to be removed.
    door: Door,
    stop: Option<oneshot::Sender<()>>,
    /// Nobody is let in.
    held: watch::Sender<bool>,
    scale: Arc<Scale>,
    thread: Option<JoinHandle<()>>,
}

impl Api {
    /// Serve clients at `door`, with the rights of their groups; what they want goes by `post`.
    pub fn start(
        door: Door,
        scale: Scale,
        groups: Groups,
        post: Post<Step>,
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
        let socket = door.as_fd().try_clone_to_owned()?;
        let socket = std::os::unix::net::UnixListener::from(socket);
        socket.set_nonblocking(true)?;
        let (web, remote) = (door.web()?, door.remote()?);
        let (stop, stopped) = oneshot::channel::<()>();
        let (held, is_held) = watch::channel(false);
        let (routes, description) = routes();
        let pages = Pages::new(scale.clone());
        let server = ServerHandle::new(post, description, events, pages);
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
                // An error says that nobody can ask for it any more.
                let _ = stopped.await;
                // What was answered just now is still to be sent.
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
            door,
            stop: Some(stop),
            held,
            scale,
            thread: Some(thread),
        })
    }

    /// Let nobody in, who wait then, or everybody again.
    pub fn hold(&self, hold: bool) {
        // Nobody may listen any more.
        let _ = self.held.send(hold);
    }

    /// For a successor.
    pub fn hand_over(&self, files: &mut Descriptors) -> io::Result<ApiState> {
        Ok(ApiState {
            door: self.door.hand_over(files)?,
            ticks_per_second: Some(self.scale.ticks_per_second()),
        })
    }

    /// Where clients connect.
    pub fn path(&self) -> &Path {
        self.door.path()
    }

    /// Where it is asked from other hosts.
    pub fn remote_address(&self) -> Option<SocketAddr> {
        self.door.remote_address()
    }

    /// Where it is seen by TCP.
    pub fn web_address(&self) -> Option<SocketAddr> {
        self.door.web_address()
    }
}

impl Api {
    /// A successor serves clients there from now on: send what is answered, and no more.
    pub fn leave(mut self) {
        self.end();
        // The socket is the successor's.
        std::mem::forget(self);
    }

    fn end(&mut self) {
        drop(self.stop.take());
        // It ends soon: no task of it blocks.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Drop for Api {
    fn drop(&mut self) {
        self.end();
    }
}

/// All that can be asked, with its description.
fn routes() -> (Router<ServerHandle>, utoipa::openapi::OpenApi) {
    OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(disks::list))
        .routes(routes!(disks::show, disks::put, disks::remove))
        .routes(routes!(disks::stats))
        .routes(routes!(disks::slow))
        .routes(routes!(disks::resize))
        .routes(routes!(disks::freeze))
        .routes(routes!(disks::thaw))
        .routes(routes!(disks::adopt))
        .routes(routes!(backup::begin, backup::end))
        .routes(routes!(backup::go))
        .routes(routes!(bitmaps::list))
        .routes(routes!(bitmaps::add, bitmaps::remove))
        .routes(routes!(bitmaps::advance))
        .routes(routes!(bitmaps::clear))
        .routes(routes!(bitmaps::rename))
        .routes(routes!(bitmaps::merge))
        .routes(routes!(snapshots::list))
        .routes(routes!(snapshots::take, snapshots::delete))
        .routes(routes!(mirror::begin, mirror::end))
        .routes(routes!(mirror::complete))
        .routes(routes!(mirror::commit))
        .routes(routes!(mirror::begin_stream, mirror::end_stream))
        .routes(routes!(mirror::snapshot))
        .routes(routes!(disks::set_filter))
        .routes(routes!(disks::start_trace, disks::stop_trace))
        .routes(routes!(jobs::list))
        .routes(routes!(jobs::show, jobs::change, jobs::end))
        .routes(routes!(groups::list))
        .routes(routes!(groups::set))
        .routes(routes!(server::show))
        .routes(routes!(server::quit))
        .routes(routes!(server::upgrade))
        .routes(routes!(stream::events))
        .routes(routes!(metrics::metrics))
        .routes(routes!(live::live))
        .routes(routes!(server::openapi))
        .split_for_parts()
}

fn router(routes: Router<ServerHandle>, server: ServerHandle) -> Router {
    routes
        .fallback(problem::no_such_place)
        .method_not_allowed_fallback(problem::no_such_method)
        .with_state(server)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// `FATHOM_BLESS=1` writes it anew.
    #[test]
    fn the_description_in_the_documentation_is_this_one() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/openapi.json");
        let (_, description) = routes();
        let text = format!("{}\n", description.to_pretty_json().unwrap());
        if std::env::var_os("FATHOM_BLESS").is_some() {
            std::fs::write(&path, &text).unwrap();
        }
        let written = std::fs::read_to_string(&path).unwrap();
        assert!(
            written == text,
            "docs/openapi.json is out of date: FATHOM_BLESS=1 mends it"
        );
    }
}
