//! What is done with disks beside their users.

use super::problem::Problem;
use super::state::Asking;
use crate::command::Command;
use crate::jobs::Jobs;
use crate::reply::Disks;
use axum::Json;
use axum::extract::State;

/// List the jobs of all disks
///
/// Returns backups, mirrors, commits and streams that are in progress, or that have ended and are still shown:
/// the progress of each, and the problem if there is one.
#[utoipa::path(get, path = "/v1/jobs", tag = "disks", operation_id = "listJobs",
    responses((status = 200, body = Jobs)))]
pub async fn list(State(asking): State<Asking>) -> Result<Json<Jobs>, Problem> {
    let Disks { disks, .. } = asking.ask(None, Command::List).await?;
    let jobs = disks.iter().flat_map(|disk| disk.state.jobs());
    Ok(Json(Jobs {
        jobs: jobs.collect(),
    }))
}
