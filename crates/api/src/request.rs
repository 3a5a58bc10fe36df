//! What is read of a request: names in its path, parameters, its body.

use crate::problem::Problem;
use axum::body::{Body, to_bytes};
use axum::extract::{FromRequestParts, RawPathParams};
use axum::http::StatusCode;
use axum::http::request::Parts;
use fathom_units::{serde_text, unknown_name};
use futures_util::StreamExt;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::time::Duration;

/// Where parameters and keys are listed, for messages.
pub const LISTED: &str = "/openapi.json lists all";

/// Of a request's body, in bytes.
const MAX_BODY: usize = 64 << 10;
/// Bytes of a body that are received, at most: what is too much of it is dropped.
const MAX_RECEIVED: usize = 1 << 20;
/// All of it must be here by then.
const BODY: Duration = Duration::from_secs(10);

/// Parameters that are true or false, and false if they are left out.
pub struct Flags(Vec<String>);

impl Flags {
    pub fn parse(query: Option<String>, known: &[&str]) -> Result<Flags, Problem> {
        let query = query.unwrap_or_default();
        let mut set = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            match (known.contains(&name), value) {
                (true, "" | "true") => set.push(name.to_owned()),
                (true, "false") => {}
                (true, _) => {
                    let text = format!("parameter '{name}': '{value}' is neither true nor false");
                    return Err(Problem::invalid(text));
                }
                (false, _) => {
                    let text = unknown_name("parameter", name, known, LISTED);
                    return Err(Problem::invalid(text));
                }
            }
        }
        Ok(Flags(set))
    }

    pub fn flag(&self, name: &str) -> bool {
        self.0.iter().any(|set| set == name)
    }
}

/// What stands in a path.
pub struct Named(BTreeMap<String, String>);

impl Named {
    /// Of the disk, or whatever the path is about.
    pub fn name(&self) -> Result<&str, Problem> {
        self.get("name")
    }

    pub fn get(&self, what: &str) -> Result<&str, Problem> {
        let value = self.0.get(what).map(String::as_str);
        value.ok_or_else(|| Problem::invalid(format!("the path names no {what}")))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Named, Problem> {
        let found = RawPathParams::from_request_parts(parts, state).await;
        let found = found.map_err(|error| Problem::invalid(error.to_string()))?;
        let pairs = found
            .iter()
            .map(|(name, value)| (name.to_owned(), value.to_owned()));
        Ok(Named(pairs.collect()))
    }
}

/// Receives all of a request's body. A request is answered only then, even by an error: the connection of a client that
/// is still sending would be closed, and the client might see that instead of the answer.
pub async fn receive(body: Body) -> Result<Vec<u8>, Problem> {
    let received = tokio::time::timeout(BODY, receive_bounded(body)).await;
    let bytes = received.map_err(|_| {
        Problem::new(
            StatusCode::REQUEST_TIMEOUT,
            "slow",
            format!("the request's body was not received within {BODY:?}"),
        )
    })?;
    bytes.ok_or_else(too_large)
}

/// None: the body is too long, or not whole.
async fn receive_bounded(body: Body) -> Option<Vec<u8>> {
    let mut parts = body.into_data_stream();
    let (mut bytes, mut len) = (Vec::new(), 0);
    while let Some(part) = parts.next().await {
        let part = part.ok()?;
        len += part.len();
        if len <= MAX_BODY {
            bytes.extend_from_slice(&part);
        } else if len > MAX_RECEIVED {
            return None;
        }
    }
    (len <= MAX_BODY).then_some(bytes)
}

fn too_large() -> Problem {
    Problem::new(
        StatusCode::PAYLOAD_TOO_LARGE,
        "too-large",
        format!("the request's body is incomplete, or longer than {MAX_BODY} bytes"),
    )
}

/// Reads a body that has been received.
pub async fn read(body: Body) -> Result<Vec<u8>, Problem> {
    let bytes = to_bytes(body, MAX_BODY).await;
    bytes.map(Into::into).map_err(|_| too_large())
}

/// A body in JSON.
pub fn parse<T: DeserializeOwned>(body: Vec<u8>) -> Result<T, Problem> {
    serde_json::from_slice(&body)
        .map_err(|error| Problem::invalid(serde_text(&error.to_string(), LISTED)))
}

/// Likewise, one that may be left out.
pub fn parse_any<T: DeserializeOwned + Default>(body: Vec<u8>) -> Result<T, Problem> {
    match body.is_empty() {
        true => Ok(T::default()),
        false => parse(body),
    }
}
