//! Routes of the API that show, change and end jobs.

use crate::handle::ServerHandle;
use crate::problem::Problem;
use crate::request::{Flags, Named, parse, read};
use axum::Json;
use axum::body::Body;
use axum::extract::{RawQuery, State};
use fathom_metrics::{JobId, JobInfo, Jobs, unknown_job};
use fathom_requests::{Command, Disks, JobOrder, Request};
use fathom_spec::text;
use serde::Deserialize;
use utoipa::ToSchema;

/// Options of a job that can be changed while it runs.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct JobChange {
    /// Maximum number of bytes copied per second, or such as "100M". Null or 0: no limit.
    #[serde(deserialize_with = "text::size")]
    #[schema(value_type = Option<String>)]
    speed: Option<u64>,
}

/// List the jobs of all disks
///
/// Returns backups, mirrors, commits and streams that are in progress, or that have ended and are
/// still shown: the progress of each, and the problem if there is one.
#[utoipa::path(get, path = "/v1/jobs", tag = "disks", operation_id = "listJobs",
    responses((status = 200, body = Jobs)))]
pub async fn list(State(server): State<ServerHandle>) -> Result<Json<Jobs>, Problem> {
    let Disks { disks, .. } = server.ask(Request::List).await?;
    let jobs = disks.iter().flat_map(|disk| disk.state.jobs());
    Ok(Json(Jobs {
        jobs: jobs.collect(),
    }))
}

/// Show a job
///
/// A job that has ended is shown until it is deleted, or until another job of the disk begins.
#[utoipa::path(get, path = "/v1/jobs/{id}", tag = "disks", operation_id = "showJob",
    params(("id" = String, Path, description = "Identity of the job")),
    responses(
        (status = 200, body = JobInfo),
        (status = 409, description = "The disk is being added or removed")))]
pub async fn show(
    State(server): State<ServerHandle>,
    name: Named,
) -> Result<Json<JobInfo>, Problem> {
    let id = job_id(&name)?;
    let disk = server.show(&id.disk).await?;
    Ok(Json(disk.state.job(&id)?))
}

/// Change the speed of a job
///
/// The limit applies at once. Returns the job.
#[utoipa::path(patch, path = "/v1/jobs/{id}", tag = "disks", operation_id = "changeJob",
    params(("id" = String, Path, description = "Identity of the job")),
    request_body = JobChange,
    responses(
        (status = 200, body = JobInfo),
        (status = 409, description = "The job is a backup, which has no such limit, or does not run yet")))]
pub async fn change(
    State(server): State<ServerHandle>,
    name: Named,
    body: Body,
) -> Result<Json<JobInfo>, Problem> {
    let id = job_id(&name)?;
    let JobChange { speed: limit } = parse(read(body).await?)?;
    order(&server, id, JobOrder::SetSpeed { limit }).await
}

/// End a job
///
/// Ends the job with this identity, and no other job of the disk. Ends a mirror or a commit of the
/// top image as DELETE of `/v1/disks/{name}/mirror` does: if it is not ready, only with `force`.
/// Returns the job's last state.
#[utoipa::path(delete, path = "/v1/jobs/{id}", tag = "disks", operation_id = "endJob",
    params(
        ("id" = String, Path, description = "Identity of the job"),
        ("force" = Option<bool>, Query, description = "End a mirror at once, and leave an incomplete target")),
    responses((status = 200, body = JobInfo, description = "The last state")))]
pub async fn end(
    State(server): State<ServerHandle>,
    name: Named,
    RawQuery(query): RawQuery,
) -> Result<Json<JobInfo>, Problem> {
    let id = job_id(&name)?;
    let force = Flags::parse(query, &["force"])?.flag("force");
    order(&server, id, JobOrder::End { force }).await
}

async fn order(
    server: &ServerHandle,
    id: JobId,
    order: JobOrder,
) -> Result<Json<JobInfo>, Problem> {
    let disk = id.disk.clone();
    let command = Command::Job { id, order };
    server.ask_host(&disk, command).await.map(Json)
}

fn job_id(name: &Named) -> Result<JobId, Problem> {
    let text = name.get("id")?;
    let id = text.parse();
    Ok(id.map_err(|()| unknown_job(text))?)
}
