//! The connected clients, and the check of their rights.

use crate::problem::{Problem, ProblemKind};
use crate::request::receive;
use crate::rights::Rights;
use crate::stream::JSON_LINES;
use axum::extract::{Request, State};
use axum::http::{Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::task::AbortHandle;

/// Maximum number of connections of clients with the same rights. A further connection replaces the
/// oldest one without a request in progress, so that clients that hang do not lock others out.
const MAX_CLIENTS: usize = 64;

/// Connections, the oldest first.
#[derive(Default)]
pub struct Clients {
    all: Vec<Client>,
}

struct Client {
    rights: Rights,
    asks: Asks,
    task: AbortHandle,
}

/// Whether a request of a client is being carried out.
#[derive(Clone, Default)]
pub struct Asks(Arc<Told>);

#[derive(Default)]
struct Told {
    asks: AtomicBool,
    /// The client has not authenticated itself yet.
    is_stranger: AtomicBool,
}

impl Asks {
    /// Returns the state of a client that has not authenticated itself yet.
    pub fn of_stranger() -> Asks {
        let asks = Asks::default();
        asks.0.is_stranger.store(true, Ordering::Relaxed);
        asks
    }

    pub fn is_known(&self) {
        self.0.is_stranger.store(false, Ordering::Relaxed);
    }

    pub fn set(&self, asks: bool) {
        self.0.asks.store(asks, Ordering::Relaxed);
    }

    fn get(&self) -> bool {
        self.0.asks.load(Ordering::Relaxed)
    }

    fn is_stranger(&self) -> bool {
        self.0.is_stranger.load(Ordering::Relaxed)
    }
}

impl Clients {
    /// Adds a connection, and closes others if there are too many with the same rights. Clients
    /// that have not authenticated themselves have a limit of their own, and never displace others.
    pub fn add(&mut self, rights: Rights, asks: Asks, task: AbortHandle) {
        self.all.retain(|client| !client.task.is_finished());
        for strangers in [false, true] {
            // Clients may have authenticated themselves meanwhile, so both limits are checked.
            let most = MAX_CLIENTS - usize::from(strangers == asks.is_stranger());
            self.keep(most, |client| {
                client.rights == rights && client.asks.is_stranger() == strangers
            });
        }
        self.all.push(Client { rights, asks, task });
    }

    /// Closes connections until at most `most` of those with `is_one` are left.
    fn keep(&mut self, most: usize, is_one: impl Fn(&Client) -> bool) {
        while self.all.iter().filter(|client| is_one(client)).count() > most {
            let mut these = self
                .all
                .iter()
                .enumerate()
                .filter(|(_, client)| is_one(client));
            let quiet = these.clone().find(|(_, client)| !client.asks.get());
            let Some((index, _)) = quiet.or_else(|| these.next()) else {
                return;
            };
            self.all.remove(index).task.abort();
        }
    }
}

/// Passes on the requests that the client has the right to make, and rejects the others.
pub async fn guard(
    State((rights, asks)): State<(Rights, Asks)>,
    request: Request,
    next: Next,
) -> Response {
    let looks = [Method::GET, Method::HEAD].contains(request.method());
    let problem = match rights {
        Rights::All => None,
        Rights::Read if looks => None,
        Rights::Read => Some("you may look, and change nothing"),
        Rights::Nothing => Some("the API is for the server's user and the groups that it names"),
    };
    let (head, body) = request.into_parts();
    if let Some(text) = problem {
        let waits = head.headers.contains_key(header::EXPECT);
        if !waits {
            // (Errors while the body is received do not matter.)
            let _ = receive(body).await;
        }
        return Problem::new(ProblemKind::Forbidden, text).into_response();
    }
    asks.set(true);
    let response = match receive(body).await {
        Ok(bytes) => next.run(Request::from_parts(head, bytes.into())).await,
        Err(problem) => problem.into_response(),
    };
    // A client that reads a stream counts as having a request in progress.
    let listens = response.headers().get(header::CONTENT_TYPE);
    asks.set(listens.is_some_and(|kind| kind == JSON_LINES));
    response
}
