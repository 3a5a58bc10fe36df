//! Streams the server's events.

use crate::handle::ServerHandle;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use fathom_metrics::{Happened, Line};
use futures_util::stream;
use std::convert::Infallible;
use tokio::sync::broadcast::error::RecvError;

/// Content type of a stream of JSON objects, each on a line.
pub const JSON_LINES: &str = "application/jsonl";

/// Stream the server's events
///
/// Sends a JSON object a line, one for each event from now on, until the client closes the
/// connection or the server ends. A client that reads too slowly misses events; a line then says
/// how many.
#[utoipa::path(get, path = "/v1/events", tag = "server", operation_id = "events",
    responses((status = 200, body = Line, content_type = "application/jsonl")))]
pub async fn events(State(server): State<ServerHandle>) -> Response {
    let listener = server.events().listen();
    let lines = stream::unfold(listener, |mut listener| async {
        let line = match listener.recv().await {
            Ok(line) => Bytes::copy_from_slice(line.as_bytes()),
            Err(RecvError::Lagged(count)) => Line::of(Happened::Lost { count }).to_text().into(),
            Err(RecvError::Closed) => return None,
        };
        Some((Ok::<_, Infallible>(line), listener))
    });
    (
        [(header::CONTENT_TYPE, JSON_LINES)],
        Body::from_stream(lines),
    )
        .into_response()
}
