//! `fathom upgrade`: replaces the process of a running server.

use crate::servers::{absolute, find, running};
use anyhow::bail;
use clap::Args;
use fathom_client::Client;
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Replace a server's program without stopping its disks
///
/// A new process takes over the disks. Virtual machines stay connected, and their requests wait for
/// some milliseconds. If the new process fails, the old one continues. With tenants, each tenant's
/// process is replaced too. If a process is not replaced, the exit status is 1.
#[derive(Args, Debug)]
pub struct UpgradeArgs {
    /// Process id or API socket of the server, or the name of one of its disks
    #[arg(value_name = "PID|SOCKET|NAME", required_unless_present_any = ["all", "named"])]
    server: Option<String>,

    /// Server to upgrade: the same as PID|SOCKET
    #[arg(
        id = "named",
        long = "server",
        value_name = "PID|SOCKET",
        conflicts_with = "server"
    )]
    named: Option<String>,

    /// Upgrade all servers of this user that were started from this program file
    ///
    /// The exit status is 1 if a server is not upgraded.
    #[arg(long, conflicts_with_all = ["server", "named", "binary"])]
    all: bool,

    /// New program [default: the file that is now at the path of the server's program]
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,

    /// Disconnect NBD clients that use TLS, which cannot be handed over
    #[arg(long)]
    disconnect: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: UpgradeArgs) -> anyhow::Result<()> {
    let Some(named) = args.named.as_ref().or(args.server.as_ref()) else {
        return all(&args);
    };
    let (server, _) = find(named)?;
    one(&server, &args)
}

fn all(args: &UpgradeArgs) -> anyhow::Result<()> {
    let own = std::env::current_exe()?;
    let mut stay = Vec::new();
    for (pid, server) in running() {
        match program_of(pid) {
            Some(program) if program == own => {}
            _ => continue,
        }
        if let Err(error) = one(&server, args) {
            stay.push(format!("server {pid} was not upgraded: {error:#}"));
        }
    }
    match stay.is_empty() {
        true => Ok(()),
        false => bail!("{}", stay.join("; ")),
    }
}

/// Returns the path of a process's program, where a new version may have replaced the file.
fn program_of(pid: u32) -> Option<PathBuf> {
    let path = fs::read_link(format!("/proc/{pid}/exe")).ok()?;
    let path = path.as_os_str().as_bytes();
    let path = path.strip_suffix(b" (deleted)").unwrap_or(path);
    Some(Path::new(OsStr::from_bytes(path)).to_owned())
}

fn one(server: &Client, args: &UpgradeArgs) -> anyhow::Result<()> {
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
            "process {} continues; requests waited for {:.1} ms",
            answer["pid"],
            answer["pause_ms"].as_f64().unwrap_or_default()
        )?,
    }
    let tenants = answer["tenants"].as_array();
    let stay: Vec<_> = tenants.into_iter().flatten().filter_map(stays).collect();
    match stay.is_empty() {
        true => Ok(()),
        false => bail!("not all tenants were replaced: {}", stay.join("; ")),
    }
}

/// Describes why a tenant was not replaced, or returns `None` if it was.
fn stays(tenant: &Value) -> Option<String> {
    let problem = tenant["problem"].as_str()?;
    let name = tenant["tenant"].as_str().unwrap_or_default();
    Some(format!("tenant '{name}': {problem}"))
}
