//! Disks that are copied to others, or get other images, while they are used.

use super::disks::Disk;
use super::problem::Problem;
use super::request::{Flags, Named, parse, parse_any, read};
use super::state::Asking;
use crate::command::{Command, CommitOrder, Completion, MirrorOrder, SnapshotOrder, StreamOrder};
use crate::info::{MirrorInfo, StreamInfo};
use axum::Json;
use axum::body::Body;
use axum::extract::{RawQuery, State};
use serde_json::Value;

/// Copy a disk to another one while it is used
///
/// What users change meanwhile is copied again, until both are the same but for what has been changed just now: then it
/// is `ready`, and goes on so. If anything goes wrong it has failed, and the disk is as before.
#[utoipa::path(put, path = "/v1/disks/{name}/mirror", tag = "disks", operation_id = "beginMirror",
    params(("name" = String, Path)),
    request_body = MirrorOrder,
    responses(
        (status = 200, body = MirrorInfo),
        (status = 400, body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "Something else is done with the disk"),
        (status = 422, body = Problem, content_type = "application/problem+json",
            description = "The target cannot be used, or is of another size"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It takes long, and goes on")))]
pub async fn begin(
    State(asking): State<Asking>,
    name: Named,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let order: MirrorOrder = parse(read(body).await?)?;
    let command = Command::BeginMirror(Box::new(order));
    asking.ask(Some(name.name()?), command).await.map(Json)
}

/// Let a mirror be
///
/// If it is ready, users wait for a moment, and the target is the disk as it is then: its phase is `done`. Otherwise, or
/// by force, the target is of no use. A commit whose images do not answer is `stopping`, and ends when they do.
#[utoipa::path(delete, path = "/v1/disks/{name}/mirror", tag = "disks", operation_id = "endMirror",
    params(
        ("name" = String, Path),
        ("force" = Option<bool>, Query, description = "Nobody waits, and the target is of no use")),
    responses(
        (status = 200, body = MirrorInfo, description = "As it was at its end"),
        (status = 400, body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It takes long, and goes on")))]
pub async fn end(
    State(asking): State<Asking>,
    name: Named,
    RawQuery(query): RawQuery,
) -> Result<Json<Value>, Problem> {
    let force = Flags::parse(query, &["force"])?.flag("force");
    let command = Command::EndMirror { force };
    asking.ask(Some(name.name()?), command).await.map(Json)
}

/// Have the disk go on with the target of its mirror
///
/// The mirror is ready. Users wait for a moment, until both are the same; then the target is the disk's image, and the
/// old one is nobody's, as it was at that instant. When anything goes wrong, the disk goes on with the image that it has.
#[utoipa::path(post, path = "/v1/disks/{name}/mirror/complete", tag = "disks", operation_id = "completeMirror",
    params(("name" = String, Path)),
    request_body = Option<Completion>,
    responses(
        (status = 200, body = Disk),
        (status = 400, body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "It is not ready, or the server would have the old image when it starts again"),
        (status = 422, body = Problem, content_type = "application/problem+json",
            description = "It has failed: the disk has its image as before"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It takes long, and goes on")))]
pub async fn complete(
    State(asking): State<Asking>,
    name: Named,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let how: Completion = parse_any(read(body).await?)?;
    let command = Command::CompleteMirror(how);
    asking.ask(Some(name.name()?), command).await.map(Json)
}

/// Copy what a disk has to an image below its own while it is used
///
/// A mirror whose target is that image: it is shown, completed and ended like any other. When it is completed, the disk has
/// one image less, or several. Until then, and when it is ended or fails, the image below is changed only where the ones
/// above it hide it: the disk is the same all the time, and the image below is of no use by itself.
#[utoipa::path(post, path = "/v1/disks/{name}/commit", tag = "disks", operation_id = "commitDisk",
    params(("name" = String, Path)),
    request_body = CommitOrder,
    responses(
        (status = 200, body = MirrorInfo),
        (status = 400, body = Problem, content_type = "application/problem+json",
            description = "There is no such image below, or it is of another size"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "Something else is done with the disk, or the server would have one of its images when it starts again"),
        (status = 422, body = Problem, content_type = "application/problem+json",
            description = "The image below cannot be written to: somebody else may be using it"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It takes long, and goes on")))]
pub async fn commit(
    State(asking): State<Asking>,
    name: Named,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let order: CommitOrder = parse(read(body).await?)?;
    let command = Command::BeginCommit(order);
    asking.ask(Some(name.name()?), command).await.map(Json)
}

/// Have a disk's image make its own what is below it, while it is used
///
/// In the end it has nothing below it, or the `base`: one that was further below, or another one, for which it makes its own
/// all that differs. The disk reads the same all the time, and when this is ended or fails.
#[utoipa::path(put, path = "/v1/disks/{name}/stream", tag = "disks", operation_id = "beginStream",
    params(("name" = String, Path)),
    request_body = StreamOrder,
    responses(
        (status = 200, body = StreamInfo),
        (status = 400, body = Problem, content_type = "application/problem+json",
            description = "There is nothing below it, or the base is right below it"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "Something else is done with the disk"),
        (status = 422, body = Problem, content_type = "application/problem+json",
            description = "The base cannot be used"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It takes long, and goes on")))]
pub async fn begin_stream(
    State(asking): State<Asking>,
    name: Named,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let order: StreamOrder = parse(read(body).await?)?;
    let command = Command::BeginStream(order);
    asking.ask(Some(name.name()?), command).await.map(Json)
}

/// Let a stream be
///
/// What has become the image's own stays so. One that is over is shown until it is ended. If the disk's images do not answer
/// it is `stopping`, and ends when they do.
#[utoipa::path(delete, path = "/v1/disks/{name}/stream", tag = "disks", operation_id = "endStream",
    params(("name" = String, Path)),
    responses(
        (status = 200, body = StreamInfo, description = "As it was at its end"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It takes long, and goes on")))]
pub async fn end_stream(State(asking): State<Asking>, name: Named) -> Result<Json<Value>, Problem> {
    asking
        .ask(Some(name.name()?), Command::EndStream)
        .await
        .map(Json)
}

/// Have the disk go on with a new image on top of its own
///
/// Users wait for a moment. From then on what they change is in the new image, and the one that there was stays as it is:
/// the disk as it was at that instant. Nothing may be written to it as long as there is something on top of it.
#[utoipa::path(post, path = "/v1/disks/{name}/snapshot", tag = "disks", operation_id = "snapshotDisk",
    params(("name" = String, Path)),
    request_body = SnapshotOrder,
    responses(
        (status = 200, body = Disk),
        (status = 400, body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "Something else is done with the disk, or the server would have the old image when it starts again"),
        (status = 422, body = Problem, content_type = "application/problem+json",
            description = "The image cannot be made or used: the disk has its own as before"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It takes long, and goes on")))]
pub async fn snapshot(
    State(asking): State<Asking>,
    name: Named,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let order: SnapshotOrder = parse(read(body).await?)?;
    let command = Command::Snapshot(order);
    asking.ask(Some(name.name()?), command).await.map(Json)
}
