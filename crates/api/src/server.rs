//! Routes of the API that concern the whole server.

use crate::handle::ServerHandle;
use crate::problem::Problem;
use crate::request::{parse_any, read};
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use fathom_requests::{Done, Request, Successor};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;

/// The server process.
#[derive(Serialize, ToSchema)]
pub struct Server {
    /// Version of the server.
    version: &'static str,
    /// Process ID of the server.
    pid: u32,
}

/// Show the server
///
/// Returns the version and the process id of the server.
#[utoipa::path(get, path = "/v1/server", tag = "server", operation_id = "server",
    responses((status = 200, body = Server)))]
pub async fn show() -> Json<Server> {
    Json(Server {
        version: env!("CARGO_PKG_VERSION"),
        pid: std::process::id(),
    })
}

/// Stop the server
///
/// Stops the server as SIGTERM does: it completes requests in flight, and closes all images.
/// Returns before the server has ended.
#[utoipa::path(post, path = "/v1/server/quit", tag = "server", operation_id = "quit",
    responses((status = 202, description = "The server is stopping")))]
pub async fn quit(State(server): State<ServerHandle>) -> Result<StatusCode, Problem> {
    let _: Done = server.ask(Request::Quit).await?;
    Ok(StatusCode::ACCEPTED)
}

/// Options of an upgrade.
#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Binary {
    /// Absolute path of the new program. The program must belong to root or the server's user, and
    /// not be writable for others [default: the file that now has the path from which the server
    /// was started]
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    binary: Option<PathBuf>,
    /// Disconnect NBD clients that use TLS, which must connect again afterwards. Connections with
    /// TLS cannot be handed over: without this option, the upgrade fails if such a client is
    /// connected [default: false]
    #[serde(default)]
    disconnect: bool,
}

/// Replace the server by a new process
///
/// Starts a new process, hands all disks over to it and ends. Virtual machines stay connected;
/// their requests wait for some milliseconds. If the new process fails to take over, this one
/// continues. Afterwards each tenant gets a new process, too, or keeps its old one if that fails.
/// Returns the new process.
#[utoipa::path(post, path = "/v1/server/upgrade", tag = "server", operation_id = "upgrade",
    request_body = Option<Binary>,
    responses(
        (status = 200, body = Successor),
        (status = 409, description = "A disk or a client cannot be handed over"),
        (status = 422, description = "The new process failed to take over; the server continues")))]
pub async fn upgrade(
    State(server): State<ServerHandle>,
    body: Body,
) -> Result<Json<Successor>, Problem> {
    let Binary { binary, disconnect } = parse_any(read(body).await?)?;
    server
        .ask(Request::Upgrade { binary, disconnect })
        .await
        .map(Json)
}

/// Return this description
///
/// Returns the description of the API, in OpenAPI 3.1.
#[utoipa::path(get, path = "/openapi.json", tag = "server", operation_id = "openapi",
    responses((status = 200, body = Object)))]
pub async fn openapi(
    State(server): State<ServerHandle>,
) -> Result<Json<serde_json::Value>, Problem> {
    let description = serde_json::to_value(server.description());
    description
        .map(Json)
        .map_err(|error| Problem::invalid(error.to_string()))
}
