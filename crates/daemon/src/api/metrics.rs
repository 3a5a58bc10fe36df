//! What is counted of all disks, for Prometheus.

use super::pages::{PAGES, Pages};
use super::problem::Problem;
use super::state::Asking;
use crate::metrics::{Form, GUESTS, Measures, Page, ProcessInfo, Scale, expose};
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout};

/// Who comes when there are so many waits so long at most.
const TURN: Duration = Duration::from_secs(5);
/// A page has to be taken in within this time.
const TAKEN: Duration = Duration::from_secs(30);
/// So much of it is sent at once.
const PIECE: usize = 64 << 10;

/// Metrics of all disks
///
/// In OpenMetrics' text, in Prometheus's, or in its protobuf with native histograms, as `Accept` says.
#[utoipa::path(get, path = "/metrics", tag = "server", operation_id = "metrics",
    responses(
        (status = 200, body = String, content_type = "application/openmetrics-text"),
        (status = 503, body = Problem, content_type = "application/problem+json",
            description = "Others are just asking for it")))]
pub async fn metrics(
    State(asking): State<Asking>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let accept = headers.get(header::ACCEPT);
    let form = Form::wanted(accept.and_then(|accept| accept.to_str().ok()).unwrap_or(""));
    let Pages { scale, turns } = asking.pages().clone();
    let turn = timeout(TURN, turns.acquire_owned()).await;
    let turn = turn.ok().and_then(Result::ok).ok_or_else(busy)?;
    let measured = asking.measure().await?;
    // On a thread of its own, for this one has other clients.
    let made = tokio::task::spawn_blocking(move || make(measured, scale, form));
    let page = made.await.map_err(|_| Problem::ending())??;
    let kind = [(header::CONTENT_TYPE, form.content_type())];
    Ok((kind, pieces(page.into(), turn)).into_response())
}

fn busy() -> Problem {
    let text = format!("{PAGES} others are taking in metrics: ask again, and take in what comes");
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "busy", text)
}

fn make(measured: Measures, scale: Arc<Scale>, form: Form) -> Result<Vec<u8>, Problem> {
    let failed = |error: String| {
        let text = format!("the metrics cannot be told: {error}");
        Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "failed", text)
    };
    let disks = measured.read().map_err(|error| failed(error.to_string()))?;
    let used = disks.iter().enumerate();
    let used = used.filter_map(|(index, disk)| Some((index, disk, disk.info.front_end.as_ref()?)));
    let page = Page {
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
    };
    expose(page).map_err(|error| failed(error.to_string()))
}

/// The page, which is one of few until it is sent. A client that takes too long for it gets no more.
fn pieces(page: Bytes, turn: OwnedSemaphorePermit) -> Body {
    let until = Instant::now() + TAKEN;
    Body::from_stream(stream::unfold(
        (page, turn),
        move |(mut page, turn)| async move {
            if page.is_empty() || Instant::now() > until {
                return None;
            }
            let piece = page.split_to(page.len().min(PIECE));
            Some((Ok::<_, Infallible>(piece), (page, turn)))
        },
    ))
}
