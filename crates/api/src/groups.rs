//! Throttle groups: disks that share limits.

use crate::handle::ServerHandle;
use crate::problem::Problem;
use crate::request::{Flags, Named, parse, read};
use axum::Json;
use axum::body::Body;
use axum::extract::{RawQuery, State};
use fathom_requests::{Request, ThrottleGroups};

/// List the throttle groups
///
/// Returns each group's limits and disks. A group exists while at least one disk has a throttle
/// filter that names it.
#[utoipa::path(get, path = "/v1/throttle-groups", tag = "disks", operation_id = "listThrottleGroups",
    responses((status = 200, body = ThrottleGroups)))]
pub async fn list(State(server): State<ServerHandle>) -> Result<Json<ThrottleGroups>, Problem> {
    server.ask(Request::ListGroups).await.map(Json)
}

/// Change a throttle group's limits
///
/// Changes the limits for all disks of the group at once, and in the files of persistent disks. An
/// empty value resets a limit to its default. Each tenant has groups of its own, and all groups of
/// this name are changed. Returns the groups of this name.
#[utoipa::path(patch, path = "/v1/throttle-groups/{name}", tag = "disks",
    operation_id = "setThrottleGroup",
    params(
        ("name" = String, Path),
        ("temporary" = Option<bool>, Query, description = "The change lasts until the server restarts")),
    request_body = BTreeMap<String, String>,
    responses(
        (status = 200, body = ThrottleGroups, description = "The groups of that name"),
        (status = 422,
            description = "A worker does not respond; the change takes effect for that worker when it responds"),
        (status = 504, description = "A disk's process does not respond")))]
pub async fn set(
    State(server): State<ServerHandle>,
    name: Named,
    RawQuery(query): RawQuery,
    body: Body,
) -> Result<Json<ThrottleGroups>, Problem> {
    let query = Flags::parse(query, &["temporary"])?;
    let request = Request::SetGroup {
        group: name.name()?.to_owned(),
        options: parse(read(body).await?)?,
        until_restart: query.flag("temporary"),
    };
    server.ask(request).await.map(Json)
}
