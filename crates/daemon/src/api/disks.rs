//! What can be done to disks.

use super::problem::Problem;
use super::request::{Flags, Named, parse, parse_any, read};
use super::schema::{Filter, SlowRequests, Statistics};
use super::state::Asking;
use super::tag;
use crate::answer::{Answer, Kind};
use crate::command::Command;
use crate::condition::version_of;
use crate::info::Info;
use crate::owner::Owner;
use crate::table::DiskTable;
use crate::text;
use axum::Json;
use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::path::PathBuf;
use utoipa::ToSchema;

/// A disk: what it was added by, and what it is doing.
#[derive(Serialize, ToSchema)]
pub struct Disk {
    /// What it is served by, without what was left out.
    options: DiskTable,
    /// Whether it is served again when the server starts again.
    kept: bool,
    /// Who owns the disk's name: changes of a static disk last until the server restarts.
    owner: Owner,
    state: Info,
}

#[derive(Serialize, ToSchema)]
pub struct Disks {
    disks: Vec<Disk>,
}

#[derive(Serialize, Deserialize, ToSchema)]
pub struct Size {
    /// In bytes.
    size: u64,
    /// `static`: the disk has that size until the server restarts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    owner: Option<Owner>,
}

#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewSize {
    /// In bytes, or like "20G": a multiple of 512.
    #[serde(default, deserialize_with = "text::size")]
    size: Option<u64>,
    /// The disk may become smaller: what is behind its new end is lost.
    #[serde(default)]
    shrink: bool,
}

#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Freezing {
    /// It goes on by itself after so long; if that is left out, when it is thawed.
    #[serde(default)]
    timeout_ms: Option<u64>,
}

#[derive(Serialize, ToSchema)]
#[allow(dead_code, reason = "it describes an answer")]
pub struct Frozen {
    frozen: bool,
}

#[derive(Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Trace {
    /// Every request is traced to this file.
    #[schema(value_type = String)]
    file: PathBuf,
}

/// The disks, in the order in which they came
#[utoipa::path(get, path = "/v1/disks", tag = "disks", operation_id = "listDisks",
    responses((status = 200, body = Disks)))]
pub async fn list(State(asking): State<Asking>) -> Result<Json<Value>, Problem> {
    asking.ask(None, Command::List).await.map(Json)
}

/// A disk
#[utoipa::path(get, path = "/v1/disks/{name}", tag = "disks", operation_id = "showDisk",
    params(("name" = String, Path)),
    responses(
        (status = 200, body = Disk, headers(("ETag", description = "Its version"))),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "It is just coming or going")))]
pub async fn show(State(asking): State<Asking>, name: Named) -> Result<Response, Problem> {
    let disk = asking.ask(Some(name.name()?), Command::Show).await?;
    Ok(tagged(StatusCode::OK, disk))
}

/// Serve a disk
///
/// It is served when this is answered, and kept if the server keeps disks. A disk that is there is changed
/// as far as it can be while it is used; one that would differ in more stays as it is, and is told to be there
/// by other options. A disk that the configuration or the command line defines (`owner` is `static`) is changed
/// until the server restarts, and keeps the options that the body does not name; other disks get their
/// defaults. The options are those of a `[[disk]]` in a configuration: fathom.toml(5).
#[utoipa::path(put, path = "/v1/disks/{name}", tag = "disks", operation_id = "putDisk",
    params(
        ("name" = String, Path, description = "1 to 64 letters, digits, -, _ and ., not beginning with a dot"),
        ("temporary" = Option<bool>, Query, description = "Not to be kept: as before when the server starts again"),
        ("If-Match" = Option<String>, Header), ("If-None-Match" = Option<String>, Header)),
    request_body(content = DiskTable, description = "`name` may be left out"),
    responses(
        (status = 200, body = Disk, description = "It was there already"),
        (status = 201, body = Disk),
        (status = 400, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "It is there, but by other options, or is just coming or going"),
        (status = 412, body = Problem, content_type = "application/problem+json",
            description = "It is not as If-Match or If-None-Match demands, or another request is changing it"),
        (status = 422, body = Problem, content_type = "application/problem+json",
            description = "It cannot be opened or kept, or its socket cannot be made")))]
pub async fn put(
    State(asking): State<Asking>,
    name: Named,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let query = Flags::parse(query, &["temporary"])?;
    let name = name.name()?;
    let (options, named) = table(name, read(body).await?)?;
    let command = Command::Put {
        options: Box::new(options),
        named: Some(named),
        temporary: query.flag("temporary"),
        only_if: tag::condition(&headers),
    };
    let mut disk = asking.ask(None, command).await?;
    let members = disk.as_object_mut();
    let created = members.and_then(|members| members.remove("created"));
    let status = match created {
        Some(Value::Bool(true)) => StatusCode::CREATED,
        _ => StatusCode::OK,
    };
    Ok(tagged(status, disk))
}

/// Serve a disk no more
///
/// What is in flight is finished first. Its last statistics are the answer, with `owner` if the disk is
/// `static`: it is served again when the server restarts.
#[utoipa::path(delete, path = "/v1/disks/{name}", tag = "disks", operation_id = "removeDisk",
    params(
        ("name" = String, Path),
        ("force" = Option<bool>, Query, description = "Disconnect whoever uses it"),
        ("temporary" = Option<bool>, Query, description = "Not to be kept: as before when the server starts again"),
        ("If-Match" = Option<String>, Header)),
    responses(
        (status = 200, body = Statistics),
        (status = 400, body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "It is in use, or just coming or going"),
        (status = 412, body = Problem, content_type = "application/problem+json"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It goes as soon as what is in flight has ended, which takes long")))]
pub async fn remove(
    State(asking): State<Asking>,
    name: Named,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Result<Json<Value>, Problem> {
    let name = name.name()?;
    let query = Flags::parse(query, &["force", "temporary"])?;
    let only_if = tag::condition(&headers);
    let command = Command::Remove {
        force: query.flag("force"),
        temporary: query.flag("temporary"),
        only_if: only_if.clone(),
    };
    let removed: Answer = asking.try_to(Some(name), command).await?;
    match removed {
        Err(refusal) if refusal.kind == Kind::Unknown => {
            only_if.check(name, None)?;
            Err(refusal.into())
        }
        removed => Ok(Json(removed?)),
    }
}

/// The slowest requests of late, the slowest first
///
/// Of each second in which there were requests, the four slowest are kept for the last 64 of these
/// seconds, and likewise of each minute.
#[utoipa::path(get, path = "/v1/disks/{name}/slow", tag = "disks", operation_id = "slowRequests",
    params(("name" = String, Path)),
    responses(
        (status = 200, body = SlowRequests),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json")))]
pub async fn slow(State(asking): State<Asking>, name: Named) -> Result<Json<Value>, Problem> {
    let name = name.name()?;
    asking.ask(Some(name), Command::Slow).await.map(Json)
}

/// Where a disk's requests spent their time
#[utoipa::path(get, path = "/v1/disks/{name}/stats", tag = "disks", operation_id = "diskStats",
    params(("name" = String, Path)),
    responses(
        (status = 200, body = Statistics),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json")))]
pub async fn stats(State(asking): State<Asking>, name: Named) -> Result<Json<Value>, Problem> {
    asking
        .ask(Some(name.name()?), Command::Stats)
        .await
        .map(Json)
}

/// Give a disk another size
///
/// Without a size, or without a body, it takes in the size that its file has by now. What is new
/// reads as zeroes. Its virtual machine hears of it; NBD clients see it when they connect.
#[utoipa::path(post, path = "/v1/disks/{name}/resize", tag = "disks", operation_id = "resizeDisk",
    params(("name" = String, Path)),
    request_body = Option<NewSize>,
    responses(
        (status = 200, body = Size),
        (status = 400, body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json"),
        (status = 422, body = Problem, content_type = "application/problem+json",
            description = "It cannot have that size, or disks of that kind cannot be resized"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It takes long, and goes on")))]
pub async fn resize(
    State(asking): State<Asking>,
    name: Named,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let NewSize { size, shrink } = parse_any(read(body).await?)?;
    let command = Command::Resize { size, shrink };
    asking.ask(Some(name.name()?), command).await.map(Json)
}

/// Have a disk stand still
///
/// What is in flight ends, the image is closed and its locks are free: others can copy it, or make a
/// snapshot of it. Whoever uses the disk waits until it is thawed.
#[utoipa::path(post, path = "/v1/disks/{name}/freeze", tag = "disks", operation_id = "freezeDisk",
    params(("name" = String, Path)),
    request_body = Option<Freezing>,
    responses(
        (status = 200, body = Frozen),
        (status = 400, body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json"),
        (status = 422, body = Problem, content_type = "application/problem+json",
            description = "What is in flight does not end: the disk is as it was"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It takes long, and goes on")))]
pub async fn freeze(
    State(asking): State<Asking>,
    name: Named,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let Freezing { timeout_ms } = parse_any(read(body).await?)?;
    let command = Command::Freeze { timeout_ms };
    asking.ask(Some(name.name()?), command).await.map(Json)
}

/// Let a disk that stands still go on
#[utoipa::path(post, path = "/v1/disks/{name}/thaw", tag = "disks", operation_id = "thawDisk",
    params(("name" = String, Path)),
    responses(
        (status = 200, body = Frozen),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "It is not frozen"),
        (status = 422, body = Problem, content_type = "application/problem+json"),
        (status = 504, body = Problem, content_type = "application/problem+json",
            description = "It takes long, and goes on")))]
pub async fn thaw(State(asking): State<Asking>, name: Named) -> Result<Json<Value>, Problem> {
    asking
        .ask(Some(name.name()?), Command::Thaw)
        .await
        .map(Json)
}

/// Change options of a filter
///
/// All of them, or none. An empty value is the option's default.
#[utoipa::path(patch, path = "/v1/disks/{name}/filters/{filter}", tag = "disks",
    operation_id = "setFilter",
    params(
        ("name" = String, Path),
        ("filter" = String, Path, description = "Its name; with #2 for the second of that name"),
        ("temporary" = Option<bool>, Query, description = "Not to be kept: as before when the server starts again")),
    request_body = BTreeMap<String, String>,
    responses(
        (status = 200, body = Filter),
        (status = 400, body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json"),
        (status = 422, body = Problem, content_type = "application/problem+json",
            description = "A worker does not answer: it holds for it from when it does")))]
pub async fn set_filter(
    State(asking): State<Asking>,
    name: Named,
    RawQuery(query): RawQuery,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let query = Flags::parse(query, &["temporary"])?;
    let command = Command::Set {
        filter: name.get("filter")?.to_owned(),
        options: parse(read(body).await?)?,
        temporary: query.flag("temporary"),
    };
    asking.ask(Some(name.name()?), command).await.map(Json)
}

/// Trace every request of a disk
#[utoipa::path(put, path = "/v1/disks/{name}/trace", tag = "disks", operation_id = "startTrace",
    params(("name" = String, Path)),
    request_body = Trace,
    responses(
        (status = 200, body = Trace),
        (status = 400, body = Problem, content_type = "application/problem+json"),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json"),
        (status = 422, body = Problem, content_type = "application/problem+json",
            description = "The file cannot be made")))]
pub async fn start_trace(
    State(asking): State<Asking>,
    name: Named,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let Trace { file } = parse(read(body).await?)?;
    let command = Command::Trace {
        file: Some(file.clone()),
    };
    asking.ask(Some(name.name()?), command).await?;
    Ok(Json(serde_json::json!({ "file": file })))
}

/// Trace a disk's requests no more
#[utoipa::path(delete, path = "/v1/disks/{name}/trace", tag = "disks", operation_id = "stopTrace",
    params(("name" = String, Path)),
    responses(
        (status = 204),
        (status = 404, body = Problem, content_type = "application/problem+json"),
        (status = 409, body = Problem, content_type = "application/problem+json")))]
pub async fn stop_trace(State(asking): State<Asking>, name: Named) -> Result<StatusCode, Problem> {
    let command = Command::Trace { file: None };
    asking.ask(Some(name.name()?), command).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Returns a disk's options and the keys that the body names. The name may be in the path alone.
fn table(name: &str, body: Vec<u8>) -> Result<(DiskTable, BTreeSet<String>), Problem> {
    let mut members: Map<String, Value> = parse(body)?;
    match members.insert("name".into(), name.into()) {
        Some(other) if other != *name => {
            let text = format!("the body is about {other}, the path about \"{name}\"");
            return Err(Problem::invalid(text));
        }
        _ => {}
    }
    let named = members.keys().cloned().collect();
    let table = serde_json::from_value(Value::Object(members));
    let table = table.map_err(|error| Problem::invalid(error.to_string()))?;
    Ok((table, named))
}

fn tagged(status: StatusCode, disk: Value) -> Response {
    let tag = HeaderValue::from_str(&version_of(&disk["options"]));
    let mut response = (status, Json(disk)).into_response();
    if let Ok(tag) = tag {
        response.headers_mut().insert(header::ETAG, tag);
    }
    response
}
