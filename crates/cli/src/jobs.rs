//! `fathom jobs`: shows and controls background jobs of disks.

use crate::servers::running;
use clap::{Args, Subcommand};
use fathom_client::Client;
use fathom_metrics::{JobInfo, Jobs};
use fathom_units::{Size, parse_size};
use serde_json::json;
use std::io::Write;
use std::rc::Rc;

/// List, change and end backups, mirrors and other jobs
///
/// The list has the jobs of all servers on this host. A completed job is listed until it is ended
/// or another job of the disk starts.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub struct JobsArgs {
    #[command(subcommand)]
    action: Option<Action>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Action {
    Speed(SpeedArgs),
    End(EndArgs),
}

/// Change the speed of a job
///
/// The limit applies at once, and lasts until the job ends.
#[derive(Args, Debug)]
struct SpeedArgs {
    /// Identity of the job, as in `fathom jobs`. A backup has no speed
    job: String,

    /// Limit in bytes per second, such as 100M, or `none`
    #[arg(value_parser = parse_limit)]
    speed: Limit,
}

/// End a job
///
/// Ends a backup, a mirror, a commit or a stream. A mirror that is not ready ends only with
/// --force.
#[derive(Args, Debug)]
struct EndArgs {
    /// Identity of the job, as in `fathom jobs`
    job: String,

    /// End a mirror at once, and leave an incomplete target
    #[arg(long)]
    force: bool,
}

/// A limit in bytes per second, or none.
#[derive(Clone, Copy, Debug)]
struct Limit(Option<u64>);

fn parse_limit(text: &str) -> Result<Limit, String> {
    match text {
        "none" => Ok(Limit(None)),
        _ => parse_size(text).map(Some).map(Limit),
    }
}

pub fn run(args: &JobsArgs) -> anyhow::Result<()> {
    match &args.action {
        None => list(args.json),
        Some(Action::Speed(args)) => {
            let (server, job) = find(&args.job)?;
            let Limit(speed) = args.speed;
            let change = server.patch(&["v1", "jobs", &job.id]);
            let job: JobInfo = change.json(&json!({ "speed": speed })).send()?;
            told(&job)
        }
        Some(Action::End(args)) => {
            let (server, job) = find(&args.job)?;
            let end = server.delete(&["v1", "jobs", &job.id]);
            let job: JobInfo = end.flag("force", args.force).patiently().send()?;
            told(&job)
        }
    }
}

fn list(as_json: bool) -> anyhow::Result<()> {
    let jobs: Vec<_> = all().into_iter().map(|(_, job)| job).collect();
    if as_json {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}", serde_json::to_string(&jobs)?)?;
        return Ok(());
    }
    jobs.iter().try_for_each(told)
}

/// Returns the jobs of all servers on this host, each with its server.
fn all() -> Vec<(Rc<Client>, JobInfo)> {
    let mut jobs = Vec::new();
    for (pid, server) in running() {
        let server = Rc::new(server);
        match server.get(&["v1", "jobs"]).send::<Jobs>() {
            Ok(found) => jobs.extend(found.jobs.into_iter().map(|job| (server.clone(), job))),
            // The server may have exited in the meantime.
            Err(error) if error.is_gone() => {}
            Err(error) => eprintln!("fathom: server {pid}: {error}"),
        }
    }
    jobs
}

/// Finds a job by its id. The number after the dot can be omitted if the disk has one such job.
fn find(id: &str) -> anyhow::Result<(Rc<Client>, JobInfo)> {
    let is_meant = |job: &JobInfo| {
        let rest = job.id.strip_prefix(id);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let (mut meant, others): (Vec<_>, Vec<_>) =
        { all().into_iter() }.partition(|(_, job)| is_meant(job));
    if meant.len() == 1 {
        return Ok(meant.swap_remove(0));
    }
    let ids = |jobs: &[(Rc<Client>, JobInfo)]| {
        let ids: Vec<_> = jobs.iter().map(|(_, job)| &*job.id).collect();
        ids.join(", ")
    };
    match (meant.is_empty(), others.is_empty()) {
        (false, _) => anyhow::bail!("job '{id}' is not unique; jobs are {}", ids(&meant)),
        (true, false) => anyhow::bail!("no job '{id}'; jobs are {}", ids(&others)),
        (true, true) => anyhow::bail!("no job '{id}': no server on this host has jobs"),
    }
}

/// Prints a job as text.
fn told(job: &JobInfo) -> anyhow::Result<()> {
    let JobInfo {
        id,
        disk,
        kind,
        phase,
        copied,
        left,
        speed,
        target,
        problem,
        ..
    } = job;
    let copied = match left {
        Some(left) => format!("{} copied, {} left", Size(*copied), Size(*left)),
        None => format!("{} kept", Size(*copied)),
    };
    let speed = speed.map_or(String::new(), |speed| {
        format!(", at most {}/s", Size(speed))
    });
    let target = target
        .as_ref()
        .map_or(String::new(), |target| format!(", {target}"));
    let problem = problem
        .as_ref()
        .map_or(String::new(), |problem| format!(": {problem}"));
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{disk}: {kind} is {phase}, {copied}{speed}{target}{problem} ({id})"
    )?;
    Ok(())
}
