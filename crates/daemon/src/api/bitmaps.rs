//! Disks' dirty bitmaps.

use super::problem::Problem;
use super::request::{Named, parse, parse_any, read};
use super::state::Asking;
use crate::command::{Advance, BitmapOrder, Command, Merged, NewBitmap, NewName};
use crate::info::Bitmaps;
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use serde_json::Value;

async fn order(asking: &Asking, name: &Named, order: BitmapOrder) -> Result<Json<Value>, Problem> {
    let command = Command::Bitmaps(order);
    asking.ask(Some(name.name()?), command).await.map(Json)
}

/// A disk's dirty bitmaps
///
/// Each says which parts of the disk may have been changed since it was begun.
#[utoipa::path(get, path = "/v1/disks/{name}/bitmaps", tag = "disks", operation_id = "listBitmaps",
    params(("name" = String, Path)),
    responses(
        (status = 200, body = Bitmaps),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json"),
        (status = 422, body = Problem, content_type = "application/problem+json",
            description = "The disk has none, or their files cannot be used"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It takes long, and goes on")))]
pub async fn list(State(asking): State<Asking>, name: Named) -> Result<Json<Value>, Problem> {
    order(&asking, &name, BitmapOrder::List).await
}

/// Begin a bitmap
///
/// What is changed from now on is marked in it. (A backup that names a bitmap begins it, too, at the backup's
/// own instant.)
#[utoipa::path(put, path = "/v1/disks/{name}/bitmaps/{bitmap}", tag = "disks", operation_id = "addBitmap",
    params(("name" = String, Path), ("bitmap" = String, Path)),
    request_body = Option<NewBitmap>,
    responses(
        (status = 200, body = Bitmaps),
        (status = 400, body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json"),
        (status = 422, body = Problem, content_type = "application/problem+json"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It takes long, and goes on")))]
pub async fn add(
    State(asking): State<Asking>,
    name: Named,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let NewBitmap { granularity } = parse_any(read(body).await?)?;
    let add = BitmapOrder::Add {
        bitmap: name.get("bitmap")?.into(),
        granularity,
    };
    order(&asking, &name, add).await
}

/// Remove a bitmap
#[utoipa::path(delete, path = "/v1/disks/{name}/bitmaps/{bitmap}", tag = "disks", operation_id = "removeBitmap",
    params(("name" = String, Path), ("bitmap" = String, Path)),
    responses(
        (status = 200, body = Bitmaps),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json"),
        (status = 422, body = Problem, content_type = "application/problem+json"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It takes long, and goes on")))]
pub async fn remove(State(asking): State<Asking>, name: Named) -> Result<Json<Value>, Problem> {
    let remove = BitmapOrder::Remove {
        bitmap: name.get("bitmap")?.into(),
    };
    order(&asking, &name, remove).await
}

/// Have a bitmap advance to the last backup
///
/// The backup that was begun with it last has ended, and what was read of it is safe: what was dirty at its instant
/// is no longer. Until then the bitmap says what it would say without that backup.
#[utoipa::path(post, path = "/v1/disks/{name}/bitmaps/{bitmap}/advance", tag = "disks",
    operation_id = "advanceBitmap",
    params(("name" = String, Path), ("bitmap" = String, Path)),
    request_body = Option<Advance>,
    responses(
        (status = 200, body = Bitmaps),
        (status = 400, body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "The backup has not ended yet"),
        (status = 422, body = Problem, content_type = "application/problem+json",
            description = "There was no such backup, or it has failed"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It takes long, and goes on")))]
pub async fn advance(
    State(asking): State<Asking>,
    name: Named,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let Advance { to } = parse_any(read(body).await?)?;
    let advance = BitmapOrder::Advance {
        bitmap: name.get("bitmap")?.into(),
        to,
    };
    order(&asking, &name, advance).await
}

/// Begin a bitmap anew
///
/// Nothing is dirty in it from now on.
#[utoipa::path(post, path = "/v1/disks/{name}/bitmaps/{bitmap}/clear", tag = "disks", operation_id = "clearBitmap",
    params(("name" = String, Path), ("bitmap" = String, Path)),
    responses(
        (status = 200, body = Bitmaps),
        (status = 400, body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json"),
        (status = 422, body = Problem, content_type = "application/problem+json"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It takes long, and goes on")))]
pub async fn clear(State(asking): State<Asking>, name: Named) -> Result<Json<Value>, Problem> {
    let clear = BitmapOrder::Clear {
        bitmap: name.get("bitmap")?.into(),
    };
    order(&asking, &name, clear).await
}

/// Give a bitmap another name
#[utoipa::path(post, path = "/v1/disks/{name}/bitmaps/{bitmap}/rename", tag = "disks", operation_id = "renameBitmap",
    params(("name" = String, Path), ("bitmap" = String, Path)),
    request_body = NewName,
    responses(
        (status = 200, body = Bitmaps),
        (status = 400, body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json"),
        (status = 422, body = Problem, content_type = "application/problem+json"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It takes long, and goes on")))]
pub async fn rename(
    State(asking): State<Asking>,
    name: Named,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let NewName { to } = parse(read(body).await?)?;
    let rename = BitmapOrder::Rename {
        bitmap: name.get("bitmap")?.into(),
        to,
    };
    order(&asking, &name, rename).await
}

/// Add what others say to a bitmap
///
/// What is dirty in one of the others is so in this one, too, from now on. They stay as they are.
#[utoipa::path(post, path = "/v1/disks/{name}/bitmaps/{bitmap}/merge", tag = "disks", operation_id = "mergeBitmaps",
    params(("name" = String, Path), ("bitmap" = String, Path)),
    request_body = Merged,
    responses(
        (status = 200, body = Bitmaps),
        (status = 400, body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json"),
        (status = 422, body = Problem, content_type = "application/problem+json"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It takes long, and goes on")))]
pub async fn merge(
    State(asking): State<Asking>,
    name: Named,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let Merged { from } = parse(read(body).await?)?;
    let merge = BitmapOrder::Merge {
        bitmap: name.get("bitmap")?.into(),
        from,
    };
    order(&asking, &name, merge).await
}
