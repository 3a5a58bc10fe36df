//! Internal snapshots of disks' images.

use crate::handle::ServerHandle;
use crate::problem::Problem;
use crate::request::Named;
use axum::Json;
use axum::extract::State;
use fathom_metrics::Snapshots;
use fathom_requests::{Command, SnapshotsOrder};

async fn order(
    server: &ServerHandle,
    name: &Named,
    order: SnapshotsOrder,
) -> Result<Json<Snapshots>, Problem> {
    let command = Command::Snapshots(order);
    server.ask_host(name.name()?, command).await.map(Json)
}

/// List the internal snapshots of a disk's image
///
/// Only qcow2 images have internal snapshots. Returns their names, times and sizes.
#[utoipa::path(get, path = "/v1/disks/{name}/snapshots", tag = "disks", operation_id = "listSnapshots",
    params(("name" = String, Path)),
    responses(
        (status = 200, body = Snapshots),
        (status = 400, description = "The image is not a qcow2 image")))]
pub async fn list(
    State(server): State<ServerHandle>,
    name: Named,
) -> Result<Json<Snapshots>, Problem> {
    order(&server, &name, SnapshotsOrder::List).await
}

/// Take an internal snapshot of a disk's image
///
/// Saves the disk's present contents within its image. Requests wait until that is done: seconds,
/// if the image has terabytes in use. Later changes go to other places in the image. Returns all
/// snapshots.
#[utoipa::path(put, path = "/v1/disks/{name}/snapshots/{snapshot}", tag = "disks", operation_id = "takeSnapshot",
    params(("name" = String, Path), ("snapshot" = String, Path)),
    responses(
        (status = 200, body = Snapshots),
        (status = 400, description = "The image is not a qcow2 image"),
        (status = 409, description = "Another operation on the disk is in progress"),
        (status = 422, description = "A snapshot of that name exists, or no space is left")))]
pub async fn take(
    State(server): State<ServerHandle>,
    name: Named,
) -> Result<Json<Snapshots>, Problem> {
    let snapshot = name.get("snapshot")?.into();
    order(&server, &name, SnapshotsOrder::Take { snapshot }).await
}

/// Delete an internal snapshot, by its name or ID
///
/// Requests wait until that is done. Space that only the snapshot uses is free afterwards. Returns
/// the remaining snapshots.
#[utoipa::path(delete, path = "/v1/disks/{name}/snapshots/{snapshot}", tag = "disks", operation_id = "deleteSnapshot",
    params(("name" = String, Path), ("snapshot" = String, Path)),
    responses(
        (status = 200, body = Snapshots),
        (status = 400, description = "The image is not a qcow2 image"),
        (status = 409, description = "Another operation on the disk is in progress"),
        (status = 422, description = "No such snapshot, or it cannot be deleted")))]
pub async fn delete(
    State(server): State<ServerHandle>,
    name: Named,
) -> Result<Json<Snapshots>, Problem> {
    let snapshot = name.get("snapshot")?.into();
    order(&server, &name, SnapshotsOrder::Delete { snapshot }).await
}
