//! Routes of the API that show and change disks.

use crate::handle::ServerHandle;
use crate::problem::Problem;
use crate::request::{Flags, LISTED, Named, parse, parse_any, read};
use crate::tag;
use axum::Json;
use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use fathom_control::Request as Change;
use fathom_control::{ErrorKind, Removal, version_of};
use fathom_requests::{
    Command, Disk, Disks, Filter, Frozen, Request, Size, SlowRequests, Statistics, TraceState,
};
use fathom_spec::DiskSpec;
use fathom_spec::text;
use fathom_units::serde_text;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::path::PathBuf;
use utoipa::ToSchema;

/// Options of a resize.
#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewSize {
    /// New size of the disk in bytes, or such as "20G": a multiple of 512 [default: the present
    /// size of the disk's file]
    #[serde(default, deserialize_with = "text::size")]
    size: Option<u64>,
    /// Allow a smaller size. Data behind the new end is lost [default: false]
    #[serde(default)]
    shrink: bool,
}

/// Options of a freeze.
#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Freezing {
    /// Time after which the server thaws the disk, in milliseconds [default: the disk is frozen
    /// until it is thawed by a request]
    #[serde(default)]
    timeout_ms: Option<u64>,
}

/// A trace of all requests of a disk.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Trace {
    /// Path of the file to which requests are traced.
    #[schema(value_type = String)]
    file: PathBuf,
}

/// List all disks
///
/// Returns each disk's options, owner and state, in the order in which the disks were added, and
/// the disks that are defined but not served.
#[utoipa::path(get, path = "/v1/disks", tag = "disks", operation_id = "listDisks",
    responses((status = 200, body = Disks)))]
pub async fn list(State(server): State<ServerHandle>) -> Result<Json<Disks>, Problem> {
    server.ask(Request::List).await.map(Json)
}

/// Show a disk
///
/// Returns the disk's options, owner and state. The header `ETag` is the version of its options,
/// for `If-Match` of a later change.
#[utoipa::path(get, path = "/v1/disks/{name}", tag = "disks", operation_id = "showDisk",
    params(("name" = String, Path)),
    responses(
        (status = 200, body = Disk, headers(("ETag", description = "Version of the disk's options"))),
        (status = 409, description = "The disk is being added or removed")))]
pub async fn show(State(server): State<ServerHandle>, name: Named) -> Result<Response, Problem> {
    let disk = server.show(name.name()?).await?;
    tagged(StatusCode::OK, disk)
}

/// Add or change a disk
///
/// Opens the image and serves the disk, or changes the options of a disk that is already served.
/// The request returns when the disk is served. If the server has a `disks-dir`, the disk is
/// persistent, also if it was transient before.
///
/// The options are those of a `[[disk]]` in a configuration: fathom.toml(5). Options that the body
/// does not name get their defaults, except those of a static disk (`owner` is `static`): a static
/// disk keeps options that the body does not name, and the change lasts until the server restarts.
/// A disk in use is changed as far as that is possible while it is served. If another option
/// differs, the request fails with 409, and the disk is unchanged.
#[utoipa::path(put, path = "/v1/disks/{name}", tag = "disks", operation_id = "putDisk",
    params(
        ("name" = String, Path, description = "1 to 64 letters, digits, -, _ and ., not beginning with a dot"),
        ("temporary" = Option<bool>, Query, description = "The change lasts until the server restarts"),
        ("If-Match" = Option<String>, Header), ("If-None-Match" = Option<String>, Header)),
    request_body(content = DiskSpec, description = "The disk's options; `name` may be omitted"),
    responses(
        (status = 200, body = Disk, description = "The disk was already served"),
        (status = 201, body = Disk),
        (status = 409,
            description = "The disk is served with options that cannot be changed now, or is being added or removed"),
        (status = 412,
            description = "The disk does not match If-Match or If-None-Match, or another request is changing it"),
        (status = 422, description = "The image cannot be opened, or the disk's socket or file cannot be created")))]
pub async fn put(
    State(server): State<ServerHandle>,
    name: Named,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let query = Flags::parse(query, &["temporary"])?;
    let name = name.name()?;
    let (options, named) = table(name, read(body).await?)?;
    let change = Change::Put {
        spec: Box::new(options),
        named: Some(named),
        until_restart: query.flag("temporary"),
        only_if: tag::condition(&headers),
    };
    let disk: Disk = server.change(name, change).await?;
    let status = match disk.created {
        true => StatusCode::CREATED,
        false => StatusCode::OK,
    };
    tagged(status, disk)
}

/// Stop serving a disk
///
/// Completes requests in flight, closes the image and removes the disk's file from `disks-dir`. A
/// disk in use is removed only with `force`. Returns the disk's last statistics, with `owner` if
/// the disk is static: the server then serves it again after a restart.
#[utoipa::path(delete, path = "/v1/disks/{name}", tag = "disks", operation_id = "removeDisk",
    params(
        ("name" = String, Path),
        ("force" = Option<bool>, Query, description = "Disconnect the clients that use the disk"),
        ("temporary" = Option<bool>, Query, description = "The change lasts until the server restarts"),
        ("If-Match" = Option<String>, Header)),
    responses(
        (status = 200, body = Statistics),
        (status = 409, description = "The disk is in use, or is being added or removed"),
        (status = 504, description = "The disk is removed as soon as its requests in flight have completed")))]
pub async fn remove(
    State(server): State<ServerHandle>,
    name: Named,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Result<Json<Statistics>, Problem> {
    let name = name.name()?;
    let query = Flags::parse(query, &["force", "temporary"])?;
    let only_if = tag::condition(&headers);
    let change = Change::Remove {
        force: query.flag("force"),
        how: match query.flag("temporary") {
            true => Removal::UntilRestart,
            false => Removal::Definition,
        },
        only_if: only_if.clone(),
    };
    let disk = name.to_owned();
    let removed = server.answer(Request::Change { disk, change }).await?;
    match removed {
        Err(error) if error.kind == ErrorKind::Unknown => {
            only_if.check(name, None)?;
            Err(error.into())
        }
        removed => Ok(Json(removed.and_then(Statistics::try_from)?)),
    }
}

/// List a disk's slowest recent requests
///
/// Returns the four slowest requests of each of the last 64 seconds that had requests, and of each
/// of the last 64 such minutes, the slowest first.
#[utoipa::path(get, path = "/v1/disks/{name}/slow", tag = "disks", operation_id = "slowRequests",
    params(("name" = String, Path)),
    responses((status = 200, body = SlowRequests)))]
pub async fn slow(
    State(server): State<ServerHandle>,
    name: Named,
) -> Result<Json<SlowRequests>, Problem> {
    let name = name.name()?;
    server.ask_host(name, Command::Slow).await.map(Json)
}

/// Show where a disk's requests spent their time
///
/// Returns counts, latencies and the time in each stage, since the disk was added.
#[utoipa::path(get, path = "/v1/disks/{name}/stats", tag = "disks", operation_id = "diskStats",
    params(("name" = String, Path)),
    responses((status = 200, body = Statistics)))]
pub async fn stats(
    State(server): State<ServerHandle>,
    name: Named,
) -> Result<Json<Statistics>, Problem> {
    server
        .ask_host(name.name()?, Command::Stats)
        .await
        .map(Json)
}

/// Resize a disk
///
/// Resizes the image and the disk, while it may be in use. Without a size, or without a body, the
/// disk gets the size that its file has now. New space reads as zeroes. The guest is notified; an
/// NBD client sees the new size when it connects again. Returns the disk's new size.
#[utoipa::path(post, path = "/v1/disks/{name}/resize", tag = "disks", operation_id = "resizeDisk",
    params(("name" = String, Path)),
    request_body = Option<NewSize>,
    responses(
        (status = 200, body = Size),
        (status = 422, description = "The disk cannot have that size, or cannot be resized")))]
pub async fn resize(
    State(server): State<ServerHandle>,
    name: Named,
    body: Body,
) -> Result<Json<Size>, Problem> {
    let NewSize { size, shrink } = parse_any(read(body).await?)?;
    let change = Change::Resize { size, shrink };
    server.change(name.name()?, change).await.map(Json)
}

/// Freeze a disk
///
/// Completes requests in flight, closes the image and releases its locks, so that another program
/// can copy the image or make a snapshot of it. Further requests wait until the disk is thawed.
/// Returns when the disk is frozen.
#[utoipa::path(post, path = "/v1/disks/{name}/freeze", tag = "disks", operation_id = "freezeDisk",
    params(("name" = String, Path)),
    request_body = Option<Freezing>,
    responses(
        (status = 200, body = Frozen),
        (status = 422, description = "Requests in flight do not end; the disk is unchanged")))]
pub async fn freeze(
    State(server): State<ServerHandle>,
    name: Named,
    body: Body,
) -> Result<Json<Frozen>, Problem> {
    let Freezing { timeout_ms } = parse_any(read(body).await?)?;
    let command = Command::Freeze { timeout_ms };
    server.ask_host(name.name()?, command).await.map(Json)
}

/// Thaw a frozen disk
///
/// Opens the image again and resumes the requests that wait. The request fails with 409 if the disk
/// is not frozen.
#[utoipa::path(post, path = "/v1/disks/{name}/thaw", tag = "disks", operation_id = "thawDisk",
    params(("name" = String, Path)),
    responses(
        (status = 200, body = Frozen),
        (status = 409, description = "The disk is not frozen")))]
pub async fn thaw(
    State(server): State<ServerHandle>,
    name: Named,
) -> Result<Json<Frozen>, Problem> {
    server.ask_host(name.name()?, Command::Thaw).await.map(Json)
}

/// Make a disk persistent
///
/// Writes the definition of the disk to `disks-dir`, with the options that the disk has now. The
/// disk is then served again after a restart. Fails with 409 while the configuration or the command
/// line defines the disk, because a name has one definition: remove the entry there first, and send
/// this request before the server reads the configuration again.
#[utoipa::path(post, path = "/v1/disks/{name}/adopt", tag = "disks", operation_id = "adoptDisk",
    params(("name" = String, Path)),
    responses(
        (status = 200, body = Disk),
        (status = 409,
            description = "The disk is defined elsewhere, is being changed, or the server has no disks-dir"),
        (status = 422, description = "The disk's file cannot be written, or the configuration cannot be read")))]
pub async fn adopt(State(server): State<ServerHandle>, name: Named) -> Result<Response, Problem> {
    let change = Change::Adopt { defined_at: None };
    let disk = server.change(name.name()?, change).await?;
    tagged(StatusCode::OK, disk)
}

/// Change options of a filter
///
/// Changes all options that the body names, or none of them, while the disk may be in use. An empty
/// value resets an option to its default. Returns the filter's name and those of its options that
/// are not at their defaults.
#[utoipa::path(patch, path = "/v1/disks/{name}/filters/{filter}", tag = "disks",
    operation_id = "setFilter",
    params(
        ("name" = String, Path),
        ("filter" = String, Path, description = "Name of the filter; NAME#2 is the second filter of that name"),
        ("temporary" = Option<bool>, Query, description = "The change lasts until the server restarts")),
    request_body = BTreeMap<String, String>,
    responses(
        (status = 200, body = Filter),
        (status = 422,
            description = "A worker does not respond; the change takes effect for that worker when it responds")))]
pub async fn set_filter(
    State(server): State<ServerHandle>,
    name: Named,
    RawQuery(query): RawQuery,
    body: Body,
) -> Result<Json<Filter>, Problem> {
    let query = Flags::parse(query, &["temporary"])?;
    let change = Change::SetFilter {
        filter: name.get("filter")?.to_owned(),
        options: parse(read(body).await?)?,
        until_restart: query.flag("temporary"),
    };
    server.change(name.name()?, change).await.map(Json)
}

/// Start to trace all requests of a disk
///
/// Creates the file and traces every request to it, until the trace is stopped. A trace in progress
/// is replaced. Returns the path of the file.
#[utoipa::path(put, path = "/v1/disks/{name}/trace", tag = "disks", operation_id = "startTrace",
    params(("name" = String, Path)),
    request_body = Trace,
    responses(
        (status = 200, body = Trace),
        (status = 422, description = "The file cannot be created")))]
pub async fn start_trace(
    State(server): State<ServerHandle>,
    name: Named,
    body: Body,
) -> Result<Json<Trace>, Problem> {
    let Trace { file } = parse(read(body).await?)?;
    let command = Command::Trace {
        file: Some(file.clone()),
    };
    let _: TraceState = server.ask_host(name.name()?, command).await?;
    Ok(Json(Trace { file }))
}

/// Stop to trace a disk's requests
///
/// Closes the trace. The file remains. The request also succeeds if the disk is not traced.
#[utoipa::path(delete, path = "/v1/disks/{name}/trace", tag = "disks", operation_id = "stopTrace",
    params(("name" = String, Path)),
    responses((status = 204)))]
pub async fn stop_trace(
    State(server): State<ServerHandle>,
    name: Named,
) -> Result<StatusCode, Problem> {
    let command = Command::Trace { file: None };
    let _: TraceState = server.ask_host(name.name()?, command).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Returns a disk's options and the keys that the body names. The name may be in the path alone.
fn table(name: &str, body: Vec<u8>) -> Result<(DiskSpec, BTreeSet<String>), Problem> {
    let mut members: Map<String, Value> = parse(body)?;
    match members.insert("name".into(), name.into()) {
        Some(other) if other != *name => {
            let text = format!("the path names disk \"{name}\", the body {other}");
            return Err(Problem::invalid(text));
        }
        _ => {}
    }
    let named = members.keys().cloned().collect();
    let table = serde_json::from_value(Value::Object(members));
    let table = table.map_err(|error| Problem::invalid(serde_text(&error.to_string(), LISTED)))?;
    Ok((table, named))
}

/// A reply with a disk, and the version of its options.
fn tagged(status: StatusCode, disk: Disk) -> Result<Response, Problem> {
    let tag = HeaderValue::from_str(&version_of(&disk.options)?);
    let mut response = (status, Json(disk)).into_response();
    if let Ok(tag) = tag {
        response.headers_mut().insert(header::ETAG, tag);
    }
    Ok(response)
}
