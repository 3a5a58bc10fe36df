//! Throttle groups: disks that share limits.

use super::problem::Problem;
use super::request::{Flags, Named, parse, read};
use super::state::Asking;
use crate::book::ThrottleGroup;
use crate::command::Command;
use axum::Json;
use axum::body::Body;
use axum::extract::{RawQuery, State};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

#[derive(Serialize, ToSchema)]
#[allow(dead_code, reason = "it describes an answer")]
pub struct ThrottleGroups {
    groups: Vec<ThrottleGroup>,
}

/// The throttle groups
///
/// A group comes with the first disk that has a throttle with its name, and goes with the last.
#[utoipa::path(get, path = "/v1/throttle-groups", tag = "disks", operation_id = "listThrottleGroups",
    responses((status = 200, body = ThrottleGroups)))]
pub async fn list(State(asking): State<Asking>) -> Result<Json<Value>, Problem> {
    asking.ask(None, Command::ListGroups).await.map(Json)
}

/// Change the limits of a group
///
/// For all of its disks at once, in their files, too, where they are kept. An empty value is the
/// option's default. Tenants with processes of their own have groups of their own: of those that have
/// one of this name, each is told.
#[utoipa::path(patch, path = "/v1/throttle-groups/{name}", tag = "disks",
    operation_id = "setThrottleGroup",
    params(
        ("name" = String, Path),
        ("temporary" = Option<bool>, Query, description = "Not to be kept: as before when the server starts again")),
    request_body = BTreeMap<String, String>,
    responses(
        (status = 200, body = ThrottleGroups, description = "What is of that name"),
        (status = 400, body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json"),
        (status = 422, body = Problem, content_type = "application/problem+json",
            description = "A worker does not answer: it holds for it from when it does"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "A disk's process does not answer")))]
pub async fn set(
    State(asking): State<Asking>,
    name: Named,
    RawQuery(query): RawQuery,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let query = Flags::parse(query, &["temporary"])?;
    let command = Command::SetGroup {
        group: name.name()?.to_owned(),
        options: parse(read(body).await?)?,
        temporary: query.flag("temporary"),
    };
    asking.ask(None, command).await.map(Json)
}
