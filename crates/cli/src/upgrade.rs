//! `fathom upgrade`: another process goes on.

use crate::servers::{absolute, find};
use anyhow::bail;
use clap::Args;
use serde_json::{Value, json};
use std::io::Write;
use std::path::PathBuf;

/// Have a new process go on with everything that a server does, by another version of the program
///
/// Virtual machines stay connected: their requests wait for some milliseconds. Where the new process
/// cannot go on, the server does. Of a server with tenants, each gets a new process, too; one that
/// cannot keeps its old one, and the exit status is 1.
#[derive(Args, Debug)]
pub struct UpgradeArgs {
    /// Its process id, the path of its API's socket, or the name of a disk that it serves
    #[arg(value_name = "PID|SOCKET|NAME")]
    server: String,

    /// The program that is to go on [default: the file that is now where the server's came from]
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,

    /// End NBD clients by TLS, which cannot go along; they have to connect again
    #[arg(long)]
    disconnect: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: UpgradeArgs) -> anyhow::Result<()> {
    let (server, _) = find(&args.server)?;
    let binary = args.binary.as_deref().map(absolute).transpose()?;
    let upgrade = server.post(&["v1", "server", "upgrade"]).patiently();
    let answer: Value = upgrade
        .json(&json!({ "binary": binary, "disconnect": args.disconnect }))
        .send()?;
    let mut out = std::io::stdout().lock();
    match args.json {
        true => writeln!(out, "{answer}")?,
        false => writeln!(
            out,
            "process {} goes on; requests waited for {:.1} ms",
            answer["pid"],
            answer["pause_ms"].as_f64().unwrap_or_default()
        )?,
    }
    let tenants = answer["tenants"].as_array();
    let stay: Vec<_> = tenants.into_iter().flatten().filter_map(stays).collect();
    match stay.is_empty() {
        true => Ok(()),
        false => bail!("not every tenant has handed over: {}", stay.join("; ")),
    }
}

/// A tenant that has not handed over, and why.
fn stays(tenant: &Value) -> Option<String> {
    let problem = tenant["problem"].as_str()?;
    let name = tenant["tenant"].as_str().unwrap_or_default();
    Some(format!("tenant '{name}': {problem}"))
}
