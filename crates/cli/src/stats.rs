//! `fathom stats`, `show`, `resize` and `quit`: requests to a running server.

use crate::servers::{disks, find, note_reply};
use crate::target::{Disk, Target};
use anyhow::{Context, bail};
use clap::Args;
use fathom_client::{Client, ClientError};
use fathom_metrics::{Info, TenantLimits};
use fathom_trace::{Stage, Summary};
use fathom_units::{NewSize, Size};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::Write;
use std::time::Duration;

/// Converts the replies about disks to JSON: one reply as it is, several as an object by name.
fn to_json<T: Serialize>(answers: &[(String, T)]) -> serde_json::Result<String> {
    match answers {
        [(_, answer)] => serde_json::to_string(answer),
        several => {
            let by_name: BTreeMap<_, _> = several.iter().map(|(n, a)| (n, a)).collect();
            serde_json::to_string(&by_name)
        }
    }
}

/// Show where a disk's requests spend their time
///
/// The table covers the time since the disk was added, or with --watch each interval. The stages
/// are explained below the table.
#[derive(Args, Debug)]
pub struct StatsArgs {
    #[command(flatten)]
    target: Target,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Print the requests of each interval of this many seconds, until the server stops
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    watch: Option<Duration>,
}

pub fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|s| (0.01..=86400.0).contains(s));
    let seconds = seconds.ok_or("not a number of seconds from 0.01 to 86400")?;
    Ok(Duration::from_secs_f64(seconds))
}

pub fn run(args: StatsArgs) -> anyhow::Result<()> {
    let (server, disks) = args.target.disks()?;
    let disks: Vec<_> = disks.into_iter().map(|disk| disk.name).collect();
    let mut last = summaries(&server, &disks)?;
    let Some(interval) = args.watch else {
        print(&last, args.json, false)?;
        let is_table = last
            .iter()
            .any(|(_, summary)| !summary.operations.is_empty());
        return match is_table && !args.json {
            true => explain(),
            false => Ok(()),
        };
    };
    loop {
        std::thread::sleep(interval);
        let now = match summaries(&server, &disks) {
            Err(error) if error.is_gone() => return Ok(()),
            other => other?,
        };
        let pairs = now.iter().zip(&last);
        let pairs = pairs.map(|((disk, now), (_, last))| (disk.clone(), now.since(last)));
        print(&pairs.collect(), args.json, true)?;
        if !args.json {
            writeln!(std::io::stdout())?;
        }
        last = now;
    }
}

/// Explains the rows of the table.
fn explain() -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out)?;
    for stage in Stage::ALL {
        writeln!(out, "{:<8}{}", stage.name(), stage.meaning())?;
    }
    writeln!(out, "{:<8}sum of all stages", "total")?;
    Ok(out.flush()?)
}

type Summaries = Vec<(String, Summary)>;

fn summaries(server: &Client, disks: &[String]) -> Result<Summaries, ClientError> {
    let of = |disk: &String| {
        let summary = server.get(&["v1", "disks", disk, "stats"]).send()?;
        Ok((disk.clone(), summary))
    };
    disks.iter().map(of).collect()
}

fn print(summaries: &Summaries, json: bool, is_interval: bool) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if json {
        writeln!(out, "{}", to_json(summaries)?)?;
        return Ok(out.flush()?);
    }
    for (disk, summary) in summaries {
        if summaries.len() > 1 {
            writeln!(out, "{disk}:")?;
        }
        match (summary.operations.is_empty(), summary.seconds) {
            (true, Some(seconds)) if is_interval => {
                let n = summary.in_flight;
                writeln!(out, "no request completed in {seconds:.1} s; {n} in flight")?;
            }
            _ => write!(out, "{summary}")?,
        }
    }
    Ok(out.flush()?)
}

/// Prints the state of a disk, or of all disks of a server.
pub fn info(target: &Target, json: bool) -> anyhow::Result<()> {
    let (_, infos) = target.disks()?;
    let mut out = std::io::stdout().lock();
    if json {
        let named: Vec<_> = infos
            .into_iter()
            .map(|info| (info.name.clone(), info))
            .collect();
        writeln!(out, "{}", to_json(&named)?)?;
        return Ok(());
    }
    for (i, info) in infos.iter().enumerate() {
        if infos.len() > 1 {
            let blank = if i > 0 { "\n" } else { "" };
            writeln!(out, "{blank}name:       {}", info.name)?;
        }
        print_info(&mut out, info)?;
    }
    Ok(())
}

fn print_info(out: &mut impl Write, info: &Info) -> std::io::Result<()> {
    let access = if info.read_only { ", read-only" } else { "" };
    let cache = info.cache.as_ref();
    let cache = cache.map_or(String::new(), |c| format!(", cache={c}"));
    let trace = match &info.trace {
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
    if let Some(owner) = info.owner {
        writeln!(out, "owner:      {}", owner.describe())?;
    }
    if !info.changed.is_empty() {
        let changed = info.changed.join(", ");
        writeln!(out, "changed:    {changed}, until the server restarts")?;
    }
    writeln!(out, "engine:     {}{cache}", info.engine)?;
    if let Some(sandbox) = &info.sandbox {
        writeln!(out, "sandbox:    {sandbox}")?;
    }
    if let Some(limits) = info.limits.as_ref().and_then(describe) {
        writeln!(out, "limits:     {limits}")?;
    }
    if let Some(pool) = &info.pool {
        writeln!(out, "pool:       {pool}")?;
    }
    if let Some(pull) = &info.pull {
        let (copied, left) = (Size(pull.copied), Size(pull.left));
        write!(
            out,
            "pulled:     {}, {copied} copied, {left} left",
            pull.phase
        )?;
        let problem = pull.problem.as_deref();
        problem.map_or(Ok(()), |problem| write!(out, "; {problem}"))?;
        writeln!(out)?;
    }
    if info.moved {
        writeln!(out, "moved:      another server has taken it over")?;
    }
    if let Some(backup) = &info.backup {
        let kept = Size(backup.kept);
        write!(
            out,
            "backup:     of the disk {} s ago, {kept} preserved",
            backup.seconds
        )?;
        let problem = backup.problem.as_deref();
        problem.map_or(Ok(()), |problem| write!(out, "; failed: {problem}"))?;
        writeln!(out)?;
    }
    if info.frozen {
        writeln!(out, "frozen:     requests wait (fathom disk thaw)")?;
    }
    if let Some(holder) = &info.held_by {
        writeln!(out, "held by:    {holder}")?;
    }
    print_clients(out, info)?;
    for filter in &info.filters {
        writeln!(out, "filter:     {filter}")?;
    }
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
    if let Some(image) = &info.image {
        writeln!(
            out,
            "image:      {} clusters allocated, {} freed, {} times 4 KiB of tables read",
            image.clusters_allocated, image.clusters_freed, image.table_reads
        )?;
        for problem in &image.problems {
            writeln!(out, "problem:    {}", problem.describe())?;
        }
    }
    writeln!(out, "trace:      {trace}")?;
    writeln!(
        out,
        "server:     process {}, version {}, up {} s",
        info.pid, info.version, info.uptime_seconds
    )
}

/// Describes the limits of a tenant and their present use, or returns `None` without limits.
fn describe(limits: &TenantLimits) -> Option<String> {
    let memory = limits.memory_max.map(|max| {
        let used = limits.memory.unwrap_or_default();
        format!("{} of {} of memory", Size(used), Size(max))
    });
    let cpu = limits.cpu_max_percent.map(|max| {
        let time = limits.cpu_held_back_ms.unwrap_or_default() as f64 / 1e3;
        format!("{max}% of a CPU (held back for {time:.1} s)")
    });
    let tasks = limits.tasks_max.map(|max| {
        let there = limits.tasks.unwrap_or_default();
        format!("{there} of {max} tasks")
    });
    let all: Vec<_> = [memory, cpu, tasks].into_iter().flatten().collect();
    (!all.is_empty()).then(|| all.join(", "))
}

/// Prints the front-end, the NBD connections and the mounted file of a disk.
fn print_clients(out: &mut impl Write, info: &Info) -> std::io::Result<()> {
    if let Some(socket) = &info.vhost_user {
        let front_end = match &info.front_end {
            Some(peer) => format!("process {}", peer.pid),
            None => "none".into(),
        };
        writeln!(out, "vhost-user: {socket}")?;
        writeln!(out, "front-end:  {front_end}")?;
        writeln!(
            out,
            "queues:     {} running, {} at most",
            info.queues_running, info.max_queues
        )?;
    }
    if let Some(nbd) = &info.nbd {
        let tls = if nbd.tls { ", TLS" } else { "" };
        let addresses = nbd.addresses.join(", ");
        writeln!(
            out,
            "nbd:        {addresses} (export {:?}{tls})",
            nbd.export
        )?;
        for connection in &nbd.connections {
            let tls = if connection.encrypted { ", TLS" } else { "" };
            writeln!(
                out,
                "connection: {}, worker {}, {} s{tls}",
                connection.client, connection.worker, connection.seconds
            )?;
        }
    }
    if let Some(fuse) = &info.fuse {
        let (file, open) = (fuse.file.display(), fuse.open);
        let access = if fuse.writable {
            "writable"
        } else {
            "read-only"
        };
        writeln!(out, "file:       {file} ({access}, open {open} times)")?;
    }
    Ok(())
}

/// Resize a disk while it is in use
///
/// The guest sees the new size immediately, NBD clients when they connect again. New space reads as
/// zeroes.
#[derive(Args, Debug)]
pub struct ResizeArgs {
    #[command(flatten)]
    target: Target,

    /// New size such as 20G, or a difference such as +5G or -5G [default: the size of the image
    /// file]
    ///
    /// In bytes; k, M, G and T are powers of 1024. Without a size the server adopts the size to
    /// which another program has changed the file or device.
    #[arg(value_name = "[+|-]SIZE", value_parser = NewSize::parse, allow_hyphen_values = true)]
    size: Option<NewSize>,

    /// Allow a smaller size; data behind the new end is lost
    #[arg(long)]
    shrink: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn resize(args: ResizeArgs) -> anyhow::Result<()> {
    let disk = args.target.disk()?;
    let size = match args.size {
        Some(size) => Some(new_size(&disk, size)?),
        None => None,
    };
    let wanted = serde_json::json!({ "size": size, "shrink": args.shrink });
    let resized = disk.server.post(&disk.below("resize")).json(&wanted);
    let answer: serde_json::Value = resized.send()?;
    note_reply(&disk.name, &answer);
    let size = answer["size"]
        .as_u64()
        .context("the server returned no size")?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{answer}")?;
    } else {
        writeln!(out, "the disk has {} ({size} bytes)", Size(size))?;
    }
    Ok(())
}

/// Returns the size in bytes to which a disk is to be resized.
fn new_size(disk: &Disk, size: NewSize) -> anyhow::Result<u64> {
    if let NewSize::To(bytes) = size {
        return Ok(bytes);
    }
    let present = disk.info()?.size;
    let bytes = size.apply(present);
    bytes.with_context(|| {
        format!(
            "disk '{}': the new size is out of range; the disk has {present} bytes",
            disk.name
        )
    })
}

/// Stop a server
///
/// All disks of the server stop, as after SIGTERM. To stop serving one disk, use
/// `fathom disk remove`.
#[derive(Args, Debug)]
pub struct QuitArgs {
    /// Process id or API socket of the server (see `fathom list`)
    ///
    /// The name of a disk is accepted if it is the server's only disk and not in use.
    #[arg(
        value_name = "PID|SOCKET|NAME",
        required_unless_present = "named",
        conflicts_with = "named"
    )]
    server: Option<String>,

    /// Server to stop: the same as PID|SOCKET
    #[arg(id = "named", long = "server", value_name = "PID|SOCKET")]
    named: Option<String>,

    /// Accept a disk name even if the server has other disks or the disk is in use
    #[arg(long)]
    force: bool,
}

pub fn quit(args: QuitArgs) -> anyhow::Result<()> {
    let server = args.named.or(args.server);
    let (server, disk) = find(&server.context("name a server")?)?;
    if let Some(disk) = disk.filter(|_| !args.force) {
        check_only(&disk, &disks(&server)?)?;
    }
    Ok(server.post(&["v1", "server", "quit"]).send()?)
}

/// Fails if the server has other disks than `disk`, or if a disk of the server is in use.
///
/// A user who names a server by one disk may not know about the others.
fn check_only(disk: &str, all: &[Info]) -> anyhow::Result<()> {
    let others: Vec<_> = { all.iter() }
        .filter(|one| one.name != disk)
        .map(|one| one.name.as_str())
        .collect();
    if !others.is_empty() {
        bail!(
            "disk '{disk}': its server has other disks, too ({}): remove this one (`fathom disk remove {disk}`); to end \
             all of them, name the server by its process id or socket, or add --force",
            others.join(", ")
        );
    }
    match all.iter().find_map(Info::users) {
        Some(users) => bail!(
            "disk '{disk}': is in use by {users}: to end its server nevertheless, name the server by its process id or \
             socket, or add --force"
        ),
        None => Ok(()),
    }
}
