//! `fathom stats` and its like: asking a running daemon.

use anyhow::{Context, anyhow};
use clap::Args;
use fathom_daemon::Summary;
use fathom_daemon::control::{Client, ClientError, Info, Request, path_of};
use fathom_daemon::size::Size;
use std::io::Write;
use std::time::Duration;

/// The daemon that is meant.
#[derive(Args, Debug)]
pub struct Target {
    /// Process id of a daemon, or the path of its control socket
    #[arg(value_name = "PID|SOCKET")]
    daemon: String,
}

impl Target {
    fn connect(&self) -> anyhow::Result<Client> {
        connect(&self.daemon)
    }
}

/// Connect to a daemon by process id or path.
pub fn connect(daemon: &str) -> anyhow::Result<Client> {
    let path = path_of(daemon).ok_or_else(|| {
        anyhow!("XDG_RUNTIME_DIR is not set; give the path of the daemon's control socket")
    })?;
    Ok(Client::connect(&path)?)
}

/// Show where a running daemon's requests spend their time
#[derive(Args, Debug)]
pub struct StatsArgs {
    #[command(flatten)]
    target: Target,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Print again every so many seconds, until the daemon ends
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    watch: Option<Duration>,
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|s| (0.01..=86400.0).contains(s));
    let seconds = seconds.ok_or("it is not a number of seconds from 0.01 to 86400")?;
    Ok(Duration::from_secs_f64(seconds))
}

pub fn run(args: StatsArgs) -> anyhow::Result<()> {
    let mut client = args.target.connect()?;
    print(&client.ask(&Request::Stats)?, args.json)?;
    let Some(interval) = args.watch else {
        return Ok(());
    };
    loop {
        std::thread::sleep(interval);
        let summary = match client.ask(&Request::Stats) {
            Err(ClientError::Closed(_)) => return Ok(()),
            other => other?,
        };
        if !args.json {
            writeln!(std::io::stdout())?;
        }
        print(&summary, args.json)?;
    }
}

fn print(summary: &Summary, json: bool) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if json {
        writeln!(out, "{}", serde_json::to_string(summary)?)?;
    } else {
        write!(out, "{summary}")?;
    }
    Ok(out.flush()?)
}

/// Show what a running daemon serves, and how
#[derive(Args, Debug)]
pub struct InfoArgs {
    #[command(flatten)]
    target: Target,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn info(args: InfoArgs) -> anyhow::Result<()> {
    let info: Info = args.target.connect()?.ask(&Request::Info)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&info)?)?;
        return Ok(());
    }
    let access = if info.read_only { ", read-only" } else { "" };
    let cache = info.cache.map_or(String::new(), |c| format!(", cache={c}"));
    let front_end = match info.front_end {
        Some(peer) => format!("process {}", peer.pid),
        None => "none".into(),
    };
    let trace = match info.trace {
        Some(path) => path.display().to_string(),
        None => "off".into(),
    };
    writeln!(
        out,
        "disk:       {} ({}, {}{access})",
        info.disk,
        Size(info.size),
        info.format
    )?;
    writeln!(out, "engine:     {}{cache}", info.engine)?;
    writeln!(out, "vhost-user: {}", info.vhost_user)?;
    writeln!(out, "front-end:  {front_end}")?;
    writeln!(
        out,
        "queues:     {} running, {} at most",
        info.queues_running, info.max_queues
    )?;
    for (i, w) in info.workers.iter().enumerate() {
        writeln!(
            out,
            "worker {i}:   {} requests, {} interrupts, {} sleeps",
            w.requests, w.notifications, w.sleeps
        )?;
    }
    if let Some(bounced) = info.bounced {
        writeln!(
            out,
            "bounced:    {bounced} requests that O_DIRECT could not take"
        )?;
    }
    writeln!(out, "trace:      {trace}")?;
    writeln!(
        out,
        "daemon:     process {}, version {}, up {} s",
        info.pid, info.version, info.uptime_seconds
    )?;
    Ok(())
}

/// Make a running daemon read its image's size again, and tell the guest
#[derive(Args, Debug)]
pub struct ResizeArgs {
    #[command(flatten)]
    target: Target,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn resize(args: ResizeArgs) -> anyhow::Result<()> {
    let answer: serde_json::Value = args.target.connect()?.ask(&Request::Resize)?;
    let size = answer["size"]
        .as_u64()
        .context("the daemon named no size")?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{answer}")?;
    } else {
        writeln!(out, "the disk has {} ({size} bytes)", Size(size))?;
    }
    Ok(())
}

/// End a running daemon as SIGTERM does
#[derive(Args, Debug)]
pub struct QuitArgs {
    #[command(flatten)]
    target: Target,
}

pub fn quit(args: QuitArgs) -> anyhow::Result<()> {
    let _: serde_json::Value = args.target.connect()?.ask(&Request::Quit)?;
    Ok(())
}
