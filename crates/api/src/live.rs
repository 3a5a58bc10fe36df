//! Streams live numbers of the disks.

use crate::handle::ServerHandle;
use crate::problem::{Problem, ProblemKind};
use crate::request::LISTED;
use crate::stream::JSON_LINES;
use axum::body::{Body, Bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use fathom_metrics::{Full, Listener, Sample};
use fathom_units::{parse_seconds, serde_text};
use futures_util::stream;
use serde::Deserialize;
use std::convert::Infallible;
use std::ops::RangeInclusive;
use std::time::Duration;

/// Minimum and maximum of an interval.
const INTERVALS: RangeInclusive<Duration> = Duration::from_millis(500)..=Duration::from_secs(60);
/// Default interval.
const USUAL: Duration = Duration::from_secs(1);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wanted {
    interval: Option<String>,
    disk: Option<String>,
}

impl Wanted {
    fn interval(&self) -> Result<Duration, Problem> {
        let Some(text) = &self.interval else {
            return Ok(USUAL);
        };
        let interval = parse_seconds(text).map_err(Problem::invalid)?;
        match INTERVALS.contains(&interval) {
            true => Ok(interval),
            false => Err(Problem::invalid(
                "parameter 'interval': not from 0.5s to 60s",
            )),
        }
    }
}

/// Stream live numbers of all disks
///
/// Sends a JSON object a line, one for each interval, until the client closes the connection or the
/// server ends. Each object describes what all disks did in the interval. A client that reads too
/// slowly misses intervals; the numbers of the missed ones are skipped.
#[utoipa::path(get, path = "/v1/live", tag = "server", operation_id = "live",
    params(
        ("interval" = Option<String>, Query,
            description = "Length of an interval, from 0.5s to 60s [default: 1s]",
            example = "1s", pattern = r"^(0\.[5-9]|[1-9]|[1-5][0-9]|60)s$"),
        ("disk" = Option<String>, Query, description = "Only this disk")),
    responses(
        (status = 200, body = Sample, content_type = "application/jsonl"),
        (status = 404, description = "No such disk"),
        (status = 503, description = "Too many clients read live numbers")))]
pub async fn live(
    State(server): State<ServerHandle>,
    query: Result<Query<Wanted>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(wanted) = query.map_err(|error| {
        let text = error.body_text();
        let text = text
            .rsplit_once("query string: ")
            .map_or(&*text, |(_, why)| why);
        // (The text before "unknown field" is the path to the field, which repeats its name.)
        let text = text.find("unknown field `").map_or(text, |at| &text[at..]);
        Problem::invalid(serde_text(text, LISTED))
    })?;
    let interval = wanted.interval()?;
    if let Some(disk) = &wanted.disk {
        server.show(disk).await?;
    }
    let measure = {
        let server = server.clone();
        move || {
            let server = server.clone();
            // (An error means that the server is stopping.)
            async move { server.measure().await.ok() }
        }
    };
    let listener = server.listeners().listen(interval, measure);
    let listener = listener.map_err(|Full(text)| Problem::new(ProblemKind::Busy, text))?;
    let kind = [
        (header::CONTENT_TYPE, JSON_LINES),
        (header::CACHE_CONTROL, "no-store"),
    ];
    Ok((kind, lines(listener, wanted.disk)).into_response())
}

fn lines(listener: Listener, disk: Option<String>) -> Body {
    let next = |(mut listener, disk): (Listener, Option<String>)| async {
        let told = listener.next().await?;
        let line = match &disk {
            None => Bytes::copy_from_slice(told.line.as_bytes()),
            Some(disk) => told.line_with(disk).into(),
        };
        Some((Ok::<_, Infallible>(line), (listener, disk)))
    };
    Body::from_stream(stream::unfold((listener, disk), next))
}
