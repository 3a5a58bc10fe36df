//! Disks that are copied to others, or get other images, while they are used.

use crate::handle::ServerHandle;
use crate::problem::Problem;
use crate::request::{Flags, Named, parse, parse_any, read};
use axum::Json;
use axum::body::Body;
use axum::extract::{RawQuery, State};
use fathom_control::Request as Change;
use fathom_control::SwitchTo;
use fathom_metrics::{MirrorInfo, StreamInfo};
use fathom_requests::{
    Command, CommitOrder, Completion, Disk, MirrorOrder, SnapshotOrder, StreamOrder,
};

/// Copy a disk to another image while it is in use
///
/// Starts to copy the disk to the target, and returns at once. Blocks that are changed in the
/// meantime are copied again. When disk and target are the same except for the latest changes, the
/// mirror's phase is `ready`, and the target follows the disk until the mirror is completed or
/// ended. If the mirror fails, the disk is unaffected. Returns the mirror.
#[utoipa::path(put, path = "/v1/disks/{name}/mirror", tag = "disks", operation_id = "beginMirror",
    params(("name" = String, Path)),
    request_body = MirrorOrder,
    responses(
        (status = 200, body = MirrorInfo),
        (status = 409, description = "Another operation on the disk is in progress"),
        (status = 422, description = "The target cannot be used, or has another size")))]
pub async fn begin(
    State(server): State<ServerHandle>,
    name: Named,
    body: Body,
) -> Result<Json<MirrorInfo>, Problem> {
    let order: MirrorOrder = parse(read(body).await?)?;
    let command = Command::BeginMirror(Box::new(order));
    server.ask_host(name.name()?, command).await.map(Json)
}

/// End a mirror or a commit
///
/// Ends a ready mirror with a complete target: requests wait for a moment, the target gets the
/// disk's contents of that instant, and the mirror's phase is `done`. A mirror that is not ready
/// ends only with `force`, and leaves an incomplete target. A commit whose images do not respond is
/// `stopping`, and ends when they respond. Returns the mirror's last state.
#[utoipa::path(delete, path = "/v1/disks/{name}/mirror", tag = "disks", operation_id = "endMirror",
    params(
        ("name" = String, Path),
        ("force" = Option<bool>, Query, description = "End at once, and leave an incomplete target")),
    responses((status = 200, body = MirrorInfo, description = "The last state")))]
pub async fn end(
    State(server): State<ServerHandle>,
    name: Named,
    RawQuery(query): RawQuery,
) -> Result<Json<MirrorInfo>, Problem> {
    let force = Flags::parse(query, &["force"])?.flag("force");
    let command = Command::EndMirror { force };
    server.ask_host(name.name()?, command).await.map(Json)
}

/// Switch a disk to the target of its mirror
///
/// The mirror must be ready. Requests wait for a moment, until disk and target are the same; then
/// the target is the disk's image. The old image remains with the contents of that instant. If
/// anything fails, the disk keeps its image. Returns the disk.
#[utoipa::path(post, path = "/v1/disks/{name}/mirror/complete", tag = "disks", operation_id = "completeMirror",
    params(("name" = String, Path)),
    request_body = Option<Completion>,
    responses(
        (status = 200, body = Disk),
        (status = 409,
            description = "The mirror is not ready, or the disk's definition would name the old image after a restart"),
        (status = 422, description = "The switch failed; the disk keeps its image")))]
pub async fn complete(
    State(server): State<ServerHandle>,
    name: Named,
    body: Body,
) -> Result<Json<Disk>, Problem> {
    let how: Completion = parse_any(read(body).await?)?;
    let change = Change::Switch {
        to: SwitchTo::Mirror,
        transient: how.unkept,
        leave_bitmaps: how.leave_bitmaps,
    };
    server.change(name.name()?, change).await.map(Json)
}

/// Merge a disk's image into one of its backing images while it is in use
///
/// Starts a mirror whose target is that backing image: show, complete and end it like any other
/// mirror. When it is completed, the disk's chain is shorter. Until then, or if it is ended or
/// fails, the disk is unchanged, and the backing image is unusable by itself. Returns the mirror.
#[utoipa::path(post, path = "/v1/disks/{name}/commit", tag = "disks", operation_id = "commitDisk",
    params(("name" = String, Path)),
    request_body = CommitOrder,
    responses(
        (status = 200, body = MirrorInfo),
        (status = 400, description = "No such backing image, or it has another size"),
        (status = 409,
            description = "Another operation on the disk is in progress, or the disk's definition would name one of the merged images after a restart"),
        (status = 422, description = "The backing image cannot be written to; another program may use it")))]
pub async fn commit(
    State(server): State<ServerHandle>,
    name: Named,
    body: Body,
) -> Result<Json<MirrorInfo>, Problem> {
    let order: CommitOrder = parse(read(body).await?)?;
    let command = Command::BeginCommit(order);
    server.ask_host(name.name()?, command).await.map(Json)
}

/// Copy data from a disk's backing images into its image while it is in use
///
/// Starts to copy, and returns at once. At its end the image has no backing image, or `base`: one
/// of its backing images, or another image, from which all differing data is copied. The disk's
/// contents are the same at any time, also if the stream is ended or fails. Returns the stream.
#[utoipa::path(put, path = "/v1/disks/{name}/stream", tag = "disks", operation_id = "beginStream",
    params(("name" = String, Path)),
    request_body = StreamOrder,
    responses(
        (status = 200, body = StreamInfo),
        (status = 400, description = "The image has no backing image, or `base` is already its backing image"),
        (status = 409, description = "Another operation on the disk is in progress"),
        (status = 422, description = "`base` cannot be used")))]
pub async fn begin_stream(
    State(server): State<ServerHandle>,
    name: Named,
    body: Body,
) -> Result<Json<StreamInfo>, Problem> {
    let order: StreamOrder = parse(read(body).await?)?;
    let command = Command::BeginStream(order);
    server.ask_host(name.name()?, command).await.map(Json)
}

/// End a stream
///
/// Stops to copy; copied data remains in the image. A stream that has completed or failed is shown
/// until this request. If the disk's images do not respond, the stream is `stopping`, and ends when
/// they respond. Returns the stream's last state.
#[utoipa::path(delete, path = "/v1/disks/{name}/stream", tag = "disks", operation_id = "endStream",
    params(("name" = String, Path)),
    responses((status = 200, body = StreamInfo, description = "The last state")))]
pub async fn end_stream(
    State(server): State<ServerHandle>,
    name: Named,
) -> Result<Json<StreamInfo>, Problem> {
    server
        .ask_host(name.name()?, Command::EndStream)
        .await
        .map(Json)
}

/// Switch a disk to a new overlay of its image
///
/// Creates an overlay and makes it the disk's image. Requests wait for a moment. From then on all
/// changes go to the overlay, and the old image keeps the disk's contents of that instant. No
/// program may write to the old image while it has an overlay. Returns the disk.
#[utoipa::path(post, path = "/v1/disks/{name}/snapshot", tag = "disks", operation_id = "snapshotDisk",
    params(("name" = String, Path)),
    request_body = SnapshotOrder,
    responses(
        (status = 200, body = Disk),
        (status = 409,
            description = "Another operation on the disk is in progress, or the disk's definition would name the old image after a restart"),
        (status = 422, description = "The overlay cannot be created or used; the disk keeps its image")))]
pub async fn snapshot(
    State(server): State<ServerHandle>,
    name: Named,
    body: Body,
) -> Result<Json<Disk>, Problem> {
    let order: SnapshotOrder = parse(read(body).await?)?;
    let change = Change::Switch {
        to: SwitchTo::Layer(order.overlay),
        transient: order.unkept,
        leave_bitmaps: order.leave_bitmaps,
    };
    server.change(name.name()?, change).await.map(Json)
}
