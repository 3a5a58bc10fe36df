//! What concerns all disks.

use super::problem::Problem;
use super::state::Asking;
use crate::command::Command;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Serialize;
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

/// This description
#[utoipa::path(get, path = "/openapi.json", tag = "server", operation_id = "openapi",
    responses((status = 200, body = Object)))]
pub async fn openapi(State(asking): State<Asking>) -> Result<Json<serde_json::Value>, Problem> {
    let description = serde_json::to_value(asking.description());
    description
        .map(Json)
        .map_err(|error| Problem::invalid(error.to_string()))
}
