//! Disks as they were at an instant.

use super::problem::Problem;
use super::request::{Named, parse_any, read};
use super::state::Asking;
use crate::command::{BackupOrder, Command};
use crate::identity::{is_identity, new_identity};
use crate::info::BackupInfo;
use axum::Json;
use axum::body::Body;
use axum::extract::{RawQuery, State};
use serde_json::Value;

/// Keep a disk as it is now
///
/// When this is answered, NBD clients read it at a socket of its own, as it was then, while its users go on
/// changing it. What users are about to change is kept in a scratch file before. When that is not possible the
/// backup has failed, and users go on. It ends when it is asked for, and when a virtual machine lets go of the
/// disk.
#[utoipa::path(put, path = "/v1/disks/{name}/backup", tag = "disks", operation_id = "beginBackup",
    params(("name" = String, Path),
        ("id" = Option<String>, Query, description = "The backup's identity, which no other backup may have: 32 \
            hexadecimal digits at random [default: one that the server chooses]. A client that names it can end the backup \
            although it has not got an answer")),
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
    RawQuery(query): RawQuery,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let id = identity(query)?.unwrap_or_else(new_identity);
    let order: BackupOrder = parse_any(read(body).await?)?;
    let command = Command::BeginBackup { id, order };
    asking.ask(Some(name.name()?), command).await.map(Json)
}

/// Have the users of a disk go on whom its backup holds
///
/// A backup that began as `held` lets nobody change the disk until then, for some seconds at most: if there is a `problem`, it has
/// failed since.
#[utoipa::path(post, path = "/v1/disks/{name}/backup/go", tag = "disks", operation_id = "goOnWithBackup",
    params(("name" = String, Path), ("id" = String, Query, description = "The backup's identity")),
    responses(
        (status = 200, body = BackupInfo),
        (status = 400, body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json")))]
pub async fn go(
    State(asking): State<Asking>,
    name: Named,
    RawQuery(query): RawQuery,
) -> Result<Json<Value>, Problem> {
    let id = identity(query)?.ok_or_else(nameless)?;
    let command = Command::GoOnWithBackup { id };
    asking.ask(Some(name.name()?), command).await.map(Json)
}

/// End a backup
///
/// Clients that still read the backup are disconnected. If there is a `problem`, the backup had failed before. A backup that
/// has not begun yet never begins.
#[utoipa::path(delete, path = "/v1/disks/{name}/backup", tag = "disks", operation_id = "endBackup",
    params(("name" = String, Path), ("id" = String, Query, description = "The backup's identity")),
    responses(
        (status = 200, body = BackupInfo, description = "As it was at its end"),
        (status = 400, body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "That backup has ended and another one has begun, or the disk is just being changed"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It takes long, and goes on")))]
pub async fn end(
    State(asking): State<Asking>,
    name: Named,
    RawQuery(query): RawQuery,
) -> Result<Json<Value>, Problem> {
    let id = identity(query)?.ok_or_else(nameless)?;
    let command = Command::EndBackup { id };
    asking.ask(Some(name.name()?), command).await.map(Json)
}

/// The identity that the parameters name, if they do.
fn identity(query: Option<String>) -> Result<Option<String>, Problem> {
    let id = match query.as_deref().unwrap_or_default() {
        "" => return Ok(None),
        query => query.strip_prefix("id="),
    };
    let id = id.ok_or_else(|| Problem::invalid("the parameter is id".to_owned()))?;
    match is_identity(id) {
        true => Ok(Some(id.to_owned())),
        false => Err(Problem::invalid(format!(
            "id={id}: a backup's identity has 32 hexadecimal digits"
        ))),
    }
}

fn nameless() -> Problem {
    Problem::invalid(
        "the backup is not named: add ?id=ID, as it was given when the backup began".to_owned(),
    )
}
