//! What is done with disks beside their users.

use super::problem::Problem;
use super::state::Asking;
use crate::command::Command;
use crate::info::Info;
use crate::jobs::Jobs;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Deserialize;

/// As much as is needed of a list of disks.
#[derive(Deserialize)]
struct Disks {
    disks: Vec<Shown>,
}

#[derive(Deserialize)]
struct Shown {
    state: Info,
}

/// All jobs
///
/// What is under way with any disk, or has ended and is not forgotten: how far it is, and why it does not go on.
#[utoipa::path(get, path = "/v1/jobs", tag = "disks", operation_id = "listJobs",
    responses((status = 200, body = Jobs)))]
pub async fn list(State(asking): State<Asking>) -> Result<Json<Jobs>, Problem> {
    let disks = asking.ask(None, Command::List).await?;
    let disks: Disks = serde_json::from_value(disks).map_err(|error| {
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        Problem::new(status, "internal", error.to_string())
    })?;
    let jobs = disks.disks.iter().flat_map(|disk| disk.state.jobs());
    Ok(Json(Jobs {
        jobs: jobs.collect(),
    }))
}
