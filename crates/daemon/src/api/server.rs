//! What concerns all disks.

use super::problem::Problem;
use super::request::{parse_any, read};
use super::state::Asking;
use crate::command::Command;
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::PathBuf;
use utoipa::ToSchema;

/// The process that serves disks.
#[derive(Serialize, ToSchema)]
pub struct Server {
    version: &'static str,
    pid: u32,
}

/// The process that serves the disks
#[utoipa::path(get, path = "/v1/server", tag = "server", operation_id = "server",
    responses((status = 200, body = Server)))]
pub async fn show() -> Json<Server> {
    Json(Server {
        version: env!("CARGO_PKG_VERSION"),
        pid: std::process::id(),
    })
}

/// End the server, as SIGTERM does
///
/// What is in flight is finished first.
#[utoipa::path(post, path = "/v1/server/quit", tag = "server", operation_id = "quit",
    responses((status = 202, description = "It is about to end")))]
pub async fn quit(State(asking): State<Asking>) -> Result<StatusCode, Problem> {
    asking.ask(None, Command::Quit).await?;
    Ok(StatusCode::ACCEPTED)
}

/// What is to go on.
#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Binary {
    /// The program; without one, the file that is now where the server's came from.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    binary: Option<PathBuf>,
    /// End NBD clients by TLS, which cannot go along; they have to connect again.
    #[serde(default)]
    disconnect: bool,
}

/// The process that goes on.
#[derive(Serialize, ToSchema)]
#[allow(dead_code, reason = "it describes an answer")]
pub struct Successor {
    pid: u32,
    /// For so long no queue ran; of a server with tenants, the longest of them.
    pause_ms: f64,
    /// Of a server with tenants: what has become of their processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    tenants: Option<Vec<TenantSuccessor>>,
}

/// The process that goes on with a tenant's disks.
#[derive(Serialize, ToSchema)]
#[allow(dead_code, reason = "it describes an answer")]
pub struct TenantSuccessor {
    tenant: String,
    /// Null: it is just being started.
    pid: Option<u32>,
    /// For so long none of its queues ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pause_ms: Option<f64>,
    /// Why it is no new process, or not by a handover.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

/// Have another process go on with everything, and end
///
/// Virtual machines stay connected: their requests wait for some milliseconds. If the other process
/// cannot go on, this one does. Then each tenant of the server gets another process, too, or stays with
/// the one that it has.
#[utoipa::path(post, path = "/v1/server/upgrade", tag = "server", operation_id = "upgrade",
    request_body = Option<Binary>,
    responses(
        (status = 200, body = Successor),
        (status = 400, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "Something there is cannot be handed over"),
        (status = 422, body = Problem, content_type = "application/problem+json",
            description = "The other process cannot go on: the server is as before")))]
pub async fn upgrade(State(asking): State<Asking>, body: Body) -> Result<Json<Value>, Problem> {
    let Binary { binary, disconnect } = parse_any(read(body).await?)?;
    asking
        .ask(None, Command::Upgrade { binary, disconnect })
        .await
        .map(Json)
}

/// This description
#[utoipa::path(get, path = "/openapi.json", tag = "server", operation_id = "openapi",
    responses((status = 200, body = Object)))]
pub async fn openapi(State(asking): State<Asking>) -> Result<Json<serde_json::Value>, Problem> {
    let description = serde_json::to_value(asking.description());
    description
        .map(Json)
        .map_err(|error| Problem::invalid(error.to_string()))
}
