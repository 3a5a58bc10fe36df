//! Disks' dirty bitmaps.

use crate::handle::ServerHandle;
use crate::problem::Problem;
use crate::request::{Named, parse, parse_any, read};
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use fathom_metrics::Bitmaps;
use fathom_requests::{Advance, BitmapOrder, Command, Merged, NewBitmap, NewName};

async fn order(
    server: &ServerHandle,
    name: &Named,
    order: BitmapOrder,
) -> Result<Json<Bitmaps>, Problem> {
    let command = Command::Bitmaps(order);
    server.ask_host(name.name()?, command).await.map(Json)
}

/// List a disk's dirty bitmaps
///
/// Returns each bitmap and the number of bytes that are dirty: those that may have been changed
/// since the bitmap was added or cleared.
#[utoipa::path(get, path = "/v1/disks/{name}/bitmaps", tag = "disks", operation_id = "listBitmaps",
    params(("name" = String, Path)),
    responses(
        (status = 200, body = Bitmaps),
        (status = 422, description = "The disk cannot have bitmaps, or their files cannot be used")))]
pub async fn list(
    State(server): State<ServerHandle>,
    name: Named,
) -> Result<Json<Bitmaps>, Problem> {
    order(&server, &name, BitmapOrder::List).await
}

/// Add a bitmap
///
/// Adds an empty bitmap, which records all changes from now on. (A backup that names a bitmap adds
/// or clears it at the instant of the backup.) The request fails with 422 if a bitmap of that name
/// exists. Returns all bitmaps.
#[utoipa::path(put, path = "/v1/disks/{name}/bitmaps/{bitmap}", tag = "disks", operation_id = "addBitmap",
    params(("name" = String, Path), ("bitmap" = String, Path)),
    request_body = Option<NewBitmap>,
    responses((status = 200, body = Bitmaps)))]
pub async fn add(
    State(server): State<ServerHandle>,
    name: Named,
    body: Body,
) -> Result<Json<Bitmaps>, Problem> {
    let NewBitmap { granularity } = parse_any(read(body).await?)?;
    let add = BitmapOrder::Add {
        bitmap: name.get("bitmap")?.into(),
        granularity,
    };
    order(&server, &name, add).await
}

/// Remove a bitmap
///
/// Removes the bitmap and its file. A backup in progress must have ended. Returns the remaining
/// bitmaps.
#[utoipa::path(delete, path = "/v1/disks/{name}/bitmaps/{bitmap}", tag = "disks", operation_id = "removeBitmap",
    params(("name" = String, Path), ("bitmap" = String, Path)),
    responses((status = 200, body = Bitmaps)))]
pub async fn remove(
    State(server): State<ServerHandle>,
    name: Named,
) -> Result<Json<Bitmaps>, Problem> {
    let remove = BitmapOrder::Remove {
        bitmap: name.get("bitmap")?.into(),
    };
    order(&server, &name, remove).await
}

/// Clear what the last backup has saved in a bitmap
///
/// Use this request when the last backup with the bitmap has ended and its data is safe. Blocks
/// that were dirty at the instant of the backup, and not changed since, become clean. Without this
/// request, the bitmap is as if the backup had not been made. Returns all bitmaps.
#[utoipa::path(post, path = "/v1/disks/{name}/bitmaps/{bitmap}/advance", tag = "disks",
    operation_id = "advanceBitmap",
    params(("name" = String, Path), ("bitmap" = String, Path)),
    request_body = Option<Advance>,
    responses(
        (status = 200, body = Bitmaps),
        (status = 409, description = "The backup has not ended yet"),
        (status = 422, description = "No such backup was made, or it failed")))]
pub async fn advance(
    State(server): State<ServerHandle>,
    name: Named,
    body: Body,
) -> Result<Json<Bitmaps>, Problem> {
    let Advance { to } = parse_any(read(body).await?)?;
    let advance = BitmapOrder::Advance {
        bitmap: name.get("bitmap")?.into(),
        to,
    };
    order(&server, &name, advance).await
}

/// Clear a bitmap
///
/// Marks all blocks clean. A backup in progress must have ended. Returns all bitmaps.
#[utoipa::path(post, path = "/v1/disks/{name}/bitmaps/{bitmap}/clear", tag = "disks", operation_id = "clearBitmap",
    params(("name" = String, Path), ("bitmap" = String, Path)),
    responses((status = 200, body = Bitmaps)))]
pub async fn clear(
    State(server): State<ServerHandle>,
    name: Named,
) -> Result<Json<Bitmaps>, Problem> {
    let clear = BitmapOrder::Clear {
        bitmap: name.get("bitmap")?.into(),
    };
    order(&server, &name, clear).await
}

/// Rename a bitmap
///
/// Renames the bitmap. A backup in progress must have ended. Returns all bitmaps.
#[utoipa::path(post, path = "/v1/disks/{name}/bitmaps/{bitmap}/rename", tag = "disks", operation_id = "renameBitmap",
    params(("name" = String, Path), ("bitmap" = String, Path)),
    request_body = NewName,
    responses((status = 200, body = Bitmaps)))]
pub async fn rename(
    State(server): State<ServerHandle>,
    name: Named,
    body: Body,
) -> Result<Json<Bitmaps>, Problem> {
    let NewName { to } = parse(read(body).await?)?;
    let rename = BitmapOrder::Rename {
        bitmap: name.get("bitmap")?.into(),
        to,
    };
    order(&server, &name, rename).await
}

/// Merge other bitmaps into a bitmap
///
/// Marks all blocks dirty that are dirty in one of the other bitmaps, which remain unchanged. A
/// backup in progress must have ended. Returns all bitmaps.
#[utoipa::path(post, path = "/v1/disks/{name}/bitmaps/{bitmap}/merge", tag = "disks", operation_id = "mergeBitmaps",
    params(("name" = String, Path), ("bitmap" = String, Path)),
    request_body = Merged,
    responses((status = 200, body = Bitmaps)))]
pub async fn merge(
    State(server): State<ServerHandle>,
    name: Named,
    body: Body,
) -> Result<Json<Bitmaps>, Problem> {
    let Merged { from } = parse(read(body).await?)?;
    let merge = BitmapOrder::Merge {
        bitmap: name.get("bitmap")?.into(),
        from,
    };
    order(&server, &name, merge).await
}
