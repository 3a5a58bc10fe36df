//! What is done with disks beside their users.

use super::problem::Problem;
use super::state::Asking;
use crate::command::Command;
use crate::info::Info;
use crate::jobs::Jobs;
use axum::Json;
use axum::extract::State;
use serde::Deserialize;

/// List the jobs of all disks
///
/// Returns backups, mirrors, commits and streams that are in progress, or that have ended and are still shown:
/// the progress of each, and the problem if there is one.
#[utoipa::path(get, path = "/v1/jobs", tag = "disks", operation_id = "listJobs",
    responses((status = 200, body = Jobs)))]
pub async fn list(State(asking): State<Asking>) -> Result<Json<Jobs>, Problem> {
    let disks = asking.ask(None, Command::List).await?;
    let disks = disks["disks"].as_array().into_iter().flatten();
    // (Of a disk whose process says something else nothing is known.)
    let infos = disks.filter_map(|disk| Info::deserialize(&disk["state"]).ok());
    let jobs = infos.flat_map(|info| info.jobs());
    Ok(Json(Jobs {
        jobs: jobs.collect(),
    }))
}
