//! Internal snapshots of disks' images.

use super::problem::Problem;
use super::request::Named;
use super::state::Asking;
use crate::command::{Command, SnapshotsOrder};
use crate::info::Snapshots;
use axum::Json;
use axum::extract::State;
use serde_json::Value;

async fn order(
    asking: &Asking,
    name: &Named,
    order: SnapshotsOrder,
) -> Result<Json<Value>, Problem> {
    let command = Command::Snapshots(order);
    asking.ask(Some(name.name()?), command).await.map(Json)
}

/// The internal snapshots of a disk's image
///
/// Only qcow2 images have some.
#[utoipa::path(get, path = "/v1/disks/{name}/snapshots", tag = "disks", operation_id = "listSnapshots",
    params(("name" = String, Path)),
    responses(
        (status = 200, body = Snapshots),
        (status = 400, body = Problem, content_type = "application/problem+json",
            description = "It is no qcow2 image"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json"),
        (status = 422, body = Problem, content_type = "application/problem+json"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It takes long, and goes on")))]
pub async fn list(State(asking): State<Asking>, name: Named) -> Result<Json<Value>, Problem> {
    order(&asking, &name, SnapshotsOrder::List).await
}

/// Keep a disk as it is now in its own image
///
/// Its users wait until that is done, the longer the larger the image's tables are: seconds, for terabytes in use. What they
/// change from then on goes to other places in the image.
#[utoipa::path(put, path = "/v1/disks/{name}/snapshots/{snapshot}", tag = "disks", operation_id = "takeSnapshot",
    params(("name" = String, Path), ("snapshot" = String, Path)),
    responses(
        (status = 200, body = Snapshots),
        (status = 400, body = Problem, content_type = "application/problem+json",
            description = "It is no qcow2 image"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "Something else is done with the disk"),
        (status = 422, body = Problem, content_type = "application/problem+json",
            description = "It cannot be taken: there is one of that name, or no room"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It takes long, and goes on")))]
pub async fn take(State(asking): State<Asking>, name: Named) -> Result<Json<Value>, Problem> {
    let snapshot = name.get("snapshot")?.into();
    order(&asking, &name, SnapshotsOrder::Take { snapshot }).await
}

/// Delete an internal snapshot, by its name or ID
///
/// The disk's users wait until that is done. What only the snapshot has is free afterwards.
#[utoipa::path(delete, path = "/v1/disks/{name}/snapshots/{snapshot}", tag = "disks", operation_id = "deleteSnapshot",
    params(("name" = String, Path), ("snapshot" = String, Path)),
    responses(
        (status = 200, body = Snapshots),
        (status = 400, body = Problem, content_type = "application/problem+json",
            description = "It is no qcow2 image"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "Something else is done with the disk"),
        (status = 422, body = Problem, content_type = "application/problem+json",
            description = "There is no such snapshot, or it cannot be deleted"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It takes long, and goes on")))]
pub async fn delete(State(asking): State<Asking>, name: Named) -> Result<Json<Value>, Problem> {
    let snapshot = name.get("snapshot")?.into();
    order(&asking, &name, SnapshotsOrder::Delete { snapshot }).await
}
