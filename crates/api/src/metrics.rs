//! The metrics of all disks, for Prometheus.

use crate::handle::ServerHandle;
use crate::pages::{PAGES, Pages};
use crate::problem::{Problem, ProblemKind};
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use fathom_metrics::{Form, GUESTS, Measures, Page, ProcessInfo, Scale, expose};
use futures_util::stream;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::{Receiver, channel};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout};

/// Time that a client waits while [`PAGES`] others read metrics.
const TURN: Duration = Duration::from_secs(5);
/// Time within which a client must receive a whole page.
const TAKEN: Duration = Duration::from_secs(30);
/// Maximum number of pieces of a page that wait to be sent.
const QUEUED: usize = 16;

type Piece = Result<Bytes, fmt::Error>;

/// Return the metrics of all disks
///
/// The page is in Prometheus's text format 0.0.4. The header `Accept` can request OpenMetrics'
/// text, or Prometheus's protobuf format with native histograms.
#[utoipa::path(get, path = "/metrics", tag = "server", operation_id = "metrics",
    responses(
        (status = 200, body = String, content_type = "text/plain"),
        (status = 503, description = "Too many clients are reading metrics")))]
pub async fn metrics(
    State(server): State<ServerHandle>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let accept = headers.get(header::ACCEPT);
    let form = Form::wanted(accept.and_then(|accept| accept.to_str().ok()).unwrap_or(""));
    let Pages { scale, turns } = server.pages().clone();
    let turn = timeout(TURN, turns.acquire_owned()).await;
    let turn = turn.ok().and_then(Result::ok).ok_or_else(busy)?;
    let measured = server.measure().await?;
    // Reading the counters takes time, so another thread does it.
    let page = spawn_blocking(move || page(measured, scale, form)).await;
    let page = page.map_err(|_| Problem::ending())?;
    let (send, pieces) = channel(QUEUED);
    spawn_blocking(move || {
        let take = |piece: Vec<u8>| send.blocking_send(Ok(piece.into())).map_err(|_| fmt::Error);
        if let Err(error) = expose(page, take) {
            // (The client may have disconnected.)
            let _ = send.blocking_send(Err(error));
        }
    });
    let kind = [(header::CONTENT_TYPE, form.content_type())];
    Ok((kind, body(pieces, turn)).into_response())
}

fn busy() -> Problem {
    let text = format!("{PAGES} clients are reading metrics; retry when one of them has finished");
    Problem::new(ProblemKind::Busy, text)
}

fn page(measured: Measures, scale: Arc<Scale>, form: Form) -> Page {
    let disks = measured.read();
    let used = disks.iter().enumerate();
    let used = used.filter_map(|(index, disk)| Some((index, disk, disk.info.front_end.as_ref()?)));
    Page {
        guests: used
            .map(|(index, disk, front_end)| {
                let guest = GUESTS.of(&disk.info.name, front_end.pid, disk.front_ends);
                (index, guest)
            })
            .collect(),
        disks,
        own: ProcessInfo::own(),
        scale,
        form,
    }
}

/// Returns the body, which keeps its permit until it is sent. For a client that reads too slowly,
/// the body ends with an error, so that the page does not look complete.
fn body(pieces: Receiver<Piece>, turn: OwnedSemaphorePermit) -> Body {
    let until = Instant::now() + TAKEN;
    Body::from_stream(stream::unfold(
        (pieces, turn),
        move |(mut pieces, turn)| async move {
            if Instant::now() > until {
                return Some((Err(fmt::Error), (pieces, turn)));
            }
            let piece = pieces.recv().await?;
            Some((piece, (pieces, turn)))
        },
    ))
}
