//! Disks as they were at an instant.

use super::problem::Problem;
use super::request::{Named, parse_any, read};
use super::state::Asking;
use crate::command::{BackupOrder, Command};
use crate::info::BackupInfo;
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use serde_json::Value;

/// Keep a disk as it is now
///
/// When this is answered, NBD clients read it at a socket of its own, as it was then, while its users go on
/// changing it. What users are about to change is kept in a scratch file before. When that is not possible the
/// backup has failed, and users go on. It ends when it is asked for, and when a virtual machine lets go of the
/// disk.
#[utoipa::path(put, path = "/v1/disks/{name}/backup", tag = "disks", operation_id = "beginBackup",
    params(("name" = String, Path)),
    request_body = Option<BackupOrder>,
    responses(
        (status = 200, body = BackupInfo),
        (status = 400, body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "A backup has begun already, or the disk is just being changed"),
        (status = 422, body = Problem, content_type = "application/problem+json",
            description = "There is no room, or the disk cannot be used"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It takes long, and goes on")))]
pub async fn begin(
    State(asking): State<Asking>,
    name: Named,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let order: BackupOrder = parse_any(read(body).await?)?;
    let command = Command::BeginBackup(order);
    asking.ask(Some(name.name()?), command).await.map(Json)
}

/// Have the users of a disk go on whom its backup holds
///
/// A backup that began as `held` lets nobody change the disk until then, for some seconds at most: if there is a `problem`, it has
/// failed since.
#[utoipa::path(post, path = "/v1/disks/{name}/backup/go", tag = "disks", operation_id = "goOnWithBackup",
    params(("name" = String, Path)),
    responses(
        (status = 200, body = BackupInfo),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json")))]
pub async fn go(State(asking): State<Asking>, name: Named) -> Result<Json<Value>, Problem> {
    let command = Command::GoOnWithBackup;
    asking.ask(Some(name.name()?), command).await.map(Json)
}

/// Keep it no more
///
/// Clients that still read it are disconnected. If there is a `problem`, it had failed before.
#[utoipa::path(delete, path = "/v1/disks/{name}/backup", tag = "disks", operation_id = "endBackup",
    params(("name" = String, Path)),
    responses(
        (status = 200, body = BackupInfo, description = "As it was at its end"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It takes long, and goes on")))]
pub async fn end(State(asking): State<Asking>, name: Named) -> Result<Json<Value>, Problem> {
    asking
        .ask(Some(name.name()?), Command::EndBackup)
        .await
        .map(Json)
}
