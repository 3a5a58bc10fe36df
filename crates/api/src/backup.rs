//! Disks as they were at an instant.

use crate::handle::ServerHandle;
use crate::problem::Problem;
use crate::request::{Named, parse_any, read};
use axum::Json;
use axum::body::Body;
use axum::extract::{RawQuery, State};
use fathom_metrics::BackupInfo;
use fathom_requests::{BackupOrder, Command, is_identity, new_identity};

/// Begin a backup of a disk
///
/// Freezes the present contents of a disk in use for a backup. When the request returns, NBD
/// clients can read these contents at a socket of their own, while the disk is used and changed.
/// The server copies data to a scratch file before the data is overwritten. If that fails, the
/// backup fails, and the disk is still served. The backup ends by request, or when the virtual
/// machine disconnects. Returns the backup's identity and URI.
#[utoipa::path(put, path = "/v1/disks/{name}/backup", tag = "disks", operation_id = "beginBackup",
    params(("name" = String, Path),
        ("id" = Option<String>, Query, description = "Identity of the backup: 32 random hexadecimal digits [default: chosen by the server]. A client that chooses the identity can end the backup even if it receives no reply")),
    request_body = Option<BackupOrder>,
    responses(
        (status = 200, body = BackupInfo),
        (status = 409, description = "Another backup is in progress, or the disk is being changed"),
        (status = 422, description = "No space for the scratch file, or the disk cannot be opened")))]
pub async fn begin(
    State(server): State<ServerHandle>,
    name: Named,
    RawQuery(query): RawQuery,
    body: Body,
) -> Result<Json<BackupInfo>, Problem> {
    let id = identity(query)?.unwrap_or_else(new_identity);
    let order: BackupOrder = parse_any(read(body).await?)?;
    let command = Command::BeginBackup { id, order };
    server.ask_host(name.name()?, command).await.map(Json)
}

/// Resume requests that a backup holds
///
/// Resumes the requests of a disk whose backup was begun as `held`. A held backup stops changes of
/// the disk until this request, for some seconds at most. Returns the backup; with a `problem`, the
/// backup has failed.
#[utoipa::path(post, path = "/v1/disks/{name}/backup/go", tag = "disks", operation_id = "goOnWithBackup",
    params(("name" = String, Path), ("id" = String, Query, description = "Identity of the backup")),
    responses((status = 200, body = BackupInfo)))]
pub async fn go(
    State(server): State<ServerHandle>,
    name: Named,
    RawQuery(query): RawQuery,
) -> Result<Json<BackupInfo>, Problem> {
    let id = identity(query)?.ok_or_else(nameless)?;
    let command = Command::GoOnWithBackup { id };
    server.ask_host(name.name()?, command).await.map(Json)
}

/// End a backup
///
/// Disconnects clients that still read the backup, and removes the scratch file. A backup that has
/// not begun yet never begins. Returns the backup's last state; with a `problem`, the backup had
/// failed.
#[utoipa::path(delete, path = "/v1/disks/{name}/backup", tag = "disks", operation_id = "endBackup",
    params(("name" = String, Path), ("id" = String, Query, description = "Identity of the backup")),
    responses(
        (status = 200, body = BackupInfo, description = "The last state"),
        (status = 409, description = "The backup has ended and another one has begun, or the disk is being changed")))]
pub async fn end(
    State(server): State<ServerHandle>,
    name: Named,
    RawQuery(query): RawQuery,
) -> Result<Json<BackupInfo>, Problem> {
    let id = identity(query)?.ok_or_else(nameless)?;
    let command = Command::EndBackup { id };
    server.ask_host(name.name()?, command).await.map(Json)
}

/// The identity that the parameters name, if they do.
fn identity(query: Option<String>) -> Result<Option<String>, Problem> {
    let id = match query.as_deref().unwrap_or_default() {
        "" => return Ok(None),
        query => query.strip_prefix("id="),
    };
    let id = id.ok_or_else(|| Problem::invalid("unknown parameter; known is id".to_owned()))?;
    match is_identity(id) {
        true => Ok(Some(id.to_owned())),
        false => Err(Problem::invalid(format!(
            "id={id}: not a backup's identity, which has 32 hexadecimal digits"
        ))),
    }
}

fn nameless() -> Problem {
    Problem::invalid(
        "the request does not name the backup; add ?id=ID, with the identity that the server gave when the backup began".to_owned(),
    )
}
