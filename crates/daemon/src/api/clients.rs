//! Who is connected, and what each may do.

use super::problem::Problem;
use super::rights::Rights;
use super::stream::JSON_LINES;
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::task::AbortHandle;

/// Connections at once of those who have the same rights. One more takes the place of the oldest
/// that is not just asking for something, so that clients which hang keep nobody out.
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
pub struct Asks(Arc<AtomicBool>);

impl Asks {
    pub fn set(&self, asks: bool) {
        self.0.store(asks, Ordering::Relaxed);
    }

    fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Clients {
    /// Makes room for one more of these rights.
    pub fn make_room(&mut self, rights: Rights) {
        self.all.retain(|client| !client.task.is_finished());
        let of_its_kind = |(_, client): &(usize, &Client)| client.rights == rights;
        let mut alike = self.all.iter().enumerate().filter(of_its_kind);
        if alike.clone().count() < MAX_CLIENTS {
            return;
        }
        let quiet = alike.clone().find(|(_, client)| !client.asks.get());
        if let Some((index, _)) = quiet.or_else(|| alike.next()) {
            self.all.remove(index).task.abort();
        }
    }

    pub fn add(&mut self, rights: Rights, asks: Asks, task: AbortHandle) {
        self.all.push(Client { rights, asks, task });
    }
}

/// Lets through what a client has the right to.
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
    match problem {
        Some(text) => Problem::new(StatusCode::FORBIDDEN, "forbidden", text).into_response(),
        None => {
            asks.set(true);
            let response = next.run(request).await;
            // One that listens stays for as long as it likes.
            let listens = response.headers().get(header::CONTENT_TYPE);
            asks.set(listens.is_some_and(|kind| kind == JSON_LINES));
            response
        }
    }
}
