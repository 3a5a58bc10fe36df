//! Reads a request: the names in its path, its parameters, and its body.

use crate::problem::{Problem, ProblemKind};
use axum::body::{Body, to_bytes};
use axum::extract::{FromRequestParts, RawPathParams};
use axum::http::request::Parts;
use fathom_units::{serde_text, unknown_name};
use futures_util::StreamExt;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::time::Duration;

/// The end of error messages: where all parameters and keys are listed.
pub const LISTED: &str = "/openapi.json lists all";

/// Maximum length of a request's body, in bytes.
const MAX_BODY: usize = 64 << 10;
/// Maximum length of a body that is received, in bytes. The part of a body beyond [`MAX_BODY`] is
/// received and dropped.
const MAX_RECEIVED: usize = 1 << 20;
/// Time within which a client must send the whole body.
const BODY: Duration = Duration::from_secs(10);

/// Boolean parameters, which are false by default.
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

/// The parts of a path that are names.
pub struct Named(BTreeMap<String, String>);

impl Named {
    /// The name of the disk, or of another object of the path.
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

/// Receives a request's whole body before a reply is sent, even if the reply is an error.
/// Otherwise, the connection would be closed while the client is still sending, and the client
/// might see that error instead of the reply.
pub async fn receive(body: Body) -> Result<Vec<u8>, Problem> {
    let received = tokio::time::timeout(BODY, receive_bounded(body)).await;
    let bytes = received.map_err(|_| {
        Problem::new(
            ProblemKind::Slow,
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
        ProblemKind::TooLarge,
        format!("the request's body is incomplete, or longer than {MAX_BODY} bytes"),
    )
}

/// Reads a body that has been received.
pub async fn read(body: Body) -> Result<Vec<u8>, Problem> {
    let bytes = to_bytes(body, MAX_BODY).await;
    bytes.map(Into::into).map_err(|_| too_large())
}

/// Parses a JSON body.
pub fn parse<T: DeserializeOwned>(body: Vec<u8>) -> Result<T, Problem> {
    serde_json::from_slice(&body)
        .map_err(|error| Problem::invalid(serde_text(&error.to_string(), LISTED)))
}

/// Parses a JSON body. An empty body gives the default value.
pub fn parse_any<T: DeserializeOwned + Default>(body: Vec<u8>) -> Result<T, Problem> {
    match body.is_empty() {
        true => Ok(T::default()),
        false => parse(body),
    }
}
