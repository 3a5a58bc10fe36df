//! `fathom jobs`: what is done with disks beside their users.

use crate::servers::running;
use clap::Args;
use fathom_daemon::{JobInfo, Jobs};
use fathom_units::Size;
use std::io::Write;

/// List backups, mirrors, commits, streams and moves
///
/// The list has the jobs of all servers on this host. A completed job is listed until `stop` removes it or
/// another job of the disk starts.
#[derive(Args, Debug)]
pub struct JobsArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &JobsArgs) -> anyhow::Result<()> {
    let mut jobs = Vec::new();
    for (pid, server) in running() {
        match server.get(&["v1", "jobs"]).send::<Jobs>() {
            Ok(found) => jobs.extend(found.jobs),
            // It may have ended meanwhile.
            Err(error) if error.is_gone() => {}
            Err(error) => eprintln!("fathom: server {pid}: {error}"),
        }
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&jobs)?)?;
        return Ok(());
    }
    for job in jobs {
        writeln!(out, "{}", told(&job))?;
    }
    Ok(())
}

fn told(job: &JobInfo) -> String {
    let JobInfo {
        disk,
        kind,
        phase,
        copied,
        left,
        target,
        problem,
        ..
    } = job;
    let copied = match left {
        Some(left) => format!("{} copied, {} left", Size(*copied), Size(*left)),
        None => format!("{} kept", Size(*copied)),
    };
    let target = target
        .as_ref()
        .map_or(String::new(), |target| format!(", {target}"));
    let problem = problem
        .as_ref()
        .map_or(String::new(), |problem| format!(": {problem}"));
    format!("{disk}: {kind} is {phase}, {copied}{target}{problem}")
}
