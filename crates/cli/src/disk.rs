//! `fathom disk` and `fathom list`: adds, changes, removes and lists disks of running servers.

use crate::filters::{self, in_this_directory};
use crate::location_arg::{LOCATION_HELP, location_help, location_parser};
use crate::servers::{
    FailedDisk, Shown, absolute, all_disks, named_or_only, note_not_shown, note_owner, note_reply,
    running,
};
use crate::show::{self, ShowArgs};
use crate::stats;
use crate::target::Target;
use clap::{Args, Subcommand};
use fathom_control::Owner;
use fathom_metrics::Info;
use fathom_spec::{DiskSpec, SocketSpec, check_name};
use fathom_storage::Location;
use fathom_trace::Summary;
use fathom_units::{Size, Timeout};
use serde::Deserialize;
use serde_json::{Value, json};
use std::io::Write;

/// Add, change and remove disks of a running server
#[derive(Args, Debug)]
pub struct DiskCommand {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Add(Box<AddArgs>),
    List(ListArgs),
    Show(ShowArgs),
    Change(ChangeArgs),
    Set(filters::SetArgs),
    Resize(stats::ResizeArgs),
    Freeze(FreezeArgs),
    Thaw(ThawArgs),
    Adopt(AdoptArgs),
    Remove(RemoveArgs),
}

pub fn run(args: DiskCommand) -> anyhow::Result<()> {
    match args.command {
        Command::Add(args) => add(*args),
        Command::List(args) => list(args),
        Command::Show(args) => show::run(args),
        Command::Change(args) => change(args),
        Command::Set(args) => filters::set(args),
        Command::Resize(args) => stats::resize(args),
        Command::Freeze(args) => freeze(args),
        Command::Thaw(args) => thaw(args),
        Command::Adopt(args) => adopt(args),
        Command::Remove(args) => remove(args),
    }
}

/// Add a disk to a running server
///
/// Other disks of the server are not interrupted. If the server's configuration has a disks-dir,
/// the disk is written there and added again when the server restarts. Otherwise the disk is
/// removed when the server stops.
#[derive(Args, Debug)]
struct AddArgs {
    /// Name of the new disk: at most 64 letters, digits, -, _ and ., not starting with a dot
    #[arg(value_name = "NAME")]
    name: String,

    #[arg(value_name = "DISK", value_parser = location_parser(), help = LOCATION_HELP,
          long_help = location_help())]
    disk: Location,

    #[command(flatten)]
    of_disk: DiskSpec,

    /// Pool of threads of the server that serves the disk [default: threads of its own]
    #[arg(long, value_name = "NAME", conflicts_with_all = ["aio", "iothreads", "cpus", "poll"],
          help_heading = "Threads and I/O")]
    pool: Option<String>,
    /// Tenant whose process serves the disk [default: a new tenant]
    ///
    /// Only for servers with a process for each tenant.
    #[arg(long, value_name = "NAME", help_heading = "Security")]
    tenant: Option<String>,

    /// Export the disk to NBD clients, even if some are not authenticated
    ///
    /// [default: export, unless a listener accepts TCP clients without --tls-verify-peer]
    #[arg(long, conflicts_with = "no_nbd", help_heading = "NBD")]
    nbd: bool,
    /// Do not export the disk to NBD clients
    #[arg(long, help_heading = "NBD")]
    no_nbd: bool,

    /// Process id or API socket of the server [default: the only server on this host]
    #[arg(long, value_name = "PID|SOCKET", help_heading = "Server")]
    server: Option<String>,

    /// Do not add the disk again when the server restarts
    #[arg(long = "transient", alias = "temporary", help_heading = "Server")]
    temporary: bool,

    /// Print JSON
    #[arg(long, help_heading = "Server")]
    json: bool,
}

fn add(args: AddArgs) -> anyhow::Result<()> {
    check_name(&args.name).map_err(anyhow::Error::msg)?;
    let server = named_or_only(args.server.as_deref())?;
    let mut table = DiskSpec {
        name: args.name,
        image: args.disk,
        pool: args.pool,
        tenant: args.tenant,
        ..args.of_disk
    };
    table.nbd = match (args.nbd, args.no_nbd) {
        (true, _) => Some(true),
        (false, true) => Some(false),
        (false, false) => None,
    };
    let table = as_seen_elsewhere(table)?;
    let added = server
        .put(&["v1", "disks", &table.name])
        .header("if-none-match", "*")
        .flag("temporary", args.temporary)
        .json(&table)
        .patiently();
    let added: Shown = added.send()?;
    let info = added.info();
    if let Some(holder) = &info.held_by {
        eprintln!(
            "fathom: {} is in use by {holder}; the disk can be used here when {holder} has closed it",
            info.disk
        );
    }
    print_disk(&info, args.json)
}

/// Change options of a disk while it is in use
///
/// Requests wait for some milliseconds, and guests and clients stay connected. A guest does not
/// learn of the change: if the disk becomes read-only, the guest's writes fail. If the new options
/// do not work, the disk keeps its old options.
#[derive(Args, Debug)]
struct ChangeArgs {
    #[command(flatten)]
    target: Target,

    /// Options with their new values, such as readonly=true or cache=writethrough
    ///
    /// The names are those of fathom.toml(5): readonly, cache, discard, poll, iothreads, cpus, aio,
    /// pool and others. An option without a value (cache=) is reset to its default.
    #[arg(value_name = "OPTION=VALUE", required = true, value_parser = filters::parse_option)]
    options: Vec<(String, String)>,

    /// Undo the change when the server restarts
    #[arg(long = "transient", alias = "temporary")]
    temporary: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn change(args: ChangeArgs) -> anyhow::Result<()> {
    let disk = args.target.disk()?;
    let place = ["v1", "disks", &disk.name];
    let mut shown: Value = disk.server.get(&place).send()?;
    let Some(table) = shown["options"].as_object_mut() else {
        anyhow::bail!("the options of disk '{}' are not known", disk.name);
    };
    for (option, value) in args.options {
        if value.is_empty() {
            // The default is sent explicitly: for a static disk, the server keeps missing options.
            let usual = [json!(null), json!([]), json!(false), json!("")];
            let usual = usual.into_iter().find(|usual| {
                let mut tried = table.clone();
                tried.insert(option.clone(), usual.clone());
                serde_json::from_value::<DiskSpec>(Value::Object(tried)).is_ok()
            });
            table.insert(option, usual.unwrap_or_default());
            continue;
        }
        let text = Value::from(value.as_str());
        let parsed = serde_json::from_str(&value).unwrap_or_else(|_| text.clone());
        // Some strings look like numbers. A value that is invalid either way is sent as a string,
        // and the server rejects it.
        let mut tried = table.clone();
        tried.insert(option.clone(), parsed.clone());
        let tried = serde_json::from_value::<DiskSpec>(Value::Object(tried));
        table.insert(option, if tried.is_ok() { parsed } else { text });
    }
    let table = Value::Object(std::mem::take(table));
    // (Otherwise the request would make a transient disk persistent.)
    let is_transient = shown["owner"] == Owner::Transient.name();
    let put = disk.server.put(&place).header("if-match", "*").json(&table);
    let put = put.flag("temporary", args.temporary || is_transient);
    let put = put.patiently();
    let changed: Shown = put.send()?;
    let info = changed.info();
    note_owner(&disk.name, info.owner);
    print_disk(&info, args.json)
}

/// Pause a disk and close its image
///
/// Requests in flight complete first. Then the image is closed and unlocked, and can be copied or
/// changed by other programs. New requests of guests and clients wait until `fathom disk thaw`.
/// Data in the guest's own caches is not in the image; freeze the guest's file systems first for a
/// consistent copy.
#[derive(Args, Debug)]
struct FreezeArgs {
    #[command(flatten)]
    target: Target,

    /// Time after which the disk resumes without `thaw`, such as 30s [default: none]
    #[arg(long = "for", value_name = "TIME")]
    timeout: Option<Timeout>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn freeze(args: FreezeArgs) -> anyhow::Result<()> {
    let disk = args.target.disk()?;
    let timeout = args.timeout.and_then(|timeout| timeout.0);
    let timeout = timeout.map(|timeout| timeout.as_millis() as u64);
    let body = json!({ "timeout_ms": timeout });
    let freeze = disk.server.post(&disk.below("freeze")).json(&body);
    print_if(args.json, &freeze.patiently().send()?)
}

/// Resume a disk after `fathom disk freeze`
#[derive(Args, Debug)]
struct ThawArgs {
    #[command(flatten)]
    target: Target,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn thaw(args: ThawArgs) -> anyhow::Result<()> {
    let disk = args.target.disk()?;
    let thaw = disk.server.post(&disk.below("thaw"));
    print_if(args.json, &thaw.patiently().send()?)
}

/// Make a disk persistent
///
/// Writes the disk's present options to the server's disks-dir, so that the disk is served again
/// after a restart. If the configuration defines the disk, remove it there first, and run this
/// command before the server reads the configuration again: a name has one definition.
#[derive(Args, Debug)]
struct AdoptArgs {
    #[command(flatten)]
    target: Target,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn adopt(args: AdoptArgs) -> anyhow::Result<()> {
    let disk = args.target.disk()?;
    let adopted: Shown = disk.server.post(&disk.below("adopt")).patiently().send()?;
    print_disk(&adopted.info(), args.json)
}

fn print_disk(info: &Info, json: bool) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match json {
        true => writeln!(out, "{}", serde_json::to_string(info)?)?,
        false => writeln!(out, "{}: {} ({})", info.name, info.disk, Size(info.size))?,
    }
    Ok(())
}

/// Prints the server's reply with --json; without --json it has nothing of interest.
fn print_if(json: bool, answer: &Value) -> anyhow::Result<()> {
    if json {
        writeln!(std::io::stdout(), "{answer}")?;
    }
    Ok(())
}

/// Makes all paths absolute, because the server has another working directory.
fn as_seen_elsewhere(mut table: DiskSpec) -> anyhow::Result<DiskSpec> {
    if let Some(path) = table.image.path() {
        table.image = Location::file(absolute(path)?);
    }
    if let Some(SocketSpec::Path(path)) = &mut table.vhost_user {
        *path = absolute(path)?;
    }
    if let Some(base) = &mut table.base {
        let location = Location::cached(base).map_err(anyhow::Error::msg)?;
        *base = location.remote().unwrap_or_default().to_owned();
    }
    for path in table.files_mut() {
        *path = absolute(path)?;
    }
    for filter in &mut table.filters {
        for (option, value) in &mut filter.options {
            *value = in_this_directory(&filter.name, option, std::mem::take(value))?;
        }
    }
    Ok(table)
}

/// Stop serving a disk
///
/// Requests in flight complete first. The image is not deleted. A disk in use is not removed
/// without --force.
#[derive(Args, Debug)]
struct RemoveArgs {
    #[command(flatten)]
    target: Target,

    /// Remove the disk even if it is in use, and disconnect its guest and NBD clients
    #[arg(long)]
    force: bool,

    /// Add the disk again when the server restarts
    #[arg(long = "transient", alias = "temporary")]
    temporary: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn remove(args: RemoveArgs) -> anyhow::Result<()> {
    let disk = args.target.disk()?;
    // The reply to the removal has no image.
    let info = disk.info().ok();
    let removed = disk.server.delete(&disk.place()).patiently();
    let removed = removed.flag("force", args.force);
    let reply: Value = removed.flag("temporary", args.temporary).send()?;
    note_reply(&disk.name, &reply);
    let summary = Summary::deserialize(reply)?;
    let mut out = std::io::stdout().lock();
    match args.json {
        true => writeln!(out, "{}", serde_json::to_string(&summary)?)?,
        false => {
            let image = info.map_or(String::new(), |info| {
                format!(" ({}, {})", info.disk, Size(info.size))
            });
            let line = format!("{}: removed{image}", disk.name);
            writeln!(out, "{}", fathom_img::shown(&line))?;
            write!(out, "{summary}")?;
        }
    }
    Ok(())
}

/// List the disks of all servers on this host
///
/// The list has the servers of the user who runs the command. Use `sudo fathom list` for those of
/// root.
#[derive(Args, Debug)]
pub struct ListArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn list(args: ListArgs) -> anyhow::Result<()> {
    let mut infos = Vec::new();
    let mut empty = Vec::new();
    for (pid, server) in running() {
        let listed = all_disks(&server).map(|all| {
            for FailedDisk { name, problem } in &all.failed {
                let line = format!("server {pid}: disk '{name}' is not served: {problem}");
                eprintln!("fathom: {}", fathom_img::shown(&line));
            }
            all.infos()
        });
        match listed {
            Ok(disks) if disks.is_empty() => empty.push(pid),
            Ok(disks) => infos.extend(disks),
            // The server may have exited in the meantime.
            Err(error) if error.is_gone() => {}
            Err(error) => eprintln!("fathom: server {pid}: {error}"),
        }
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&infos)?)?;
        return Ok(());
    }
    let is_empty = infos.is_empty() && empty.is_empty();
    let rows = infos.iter().map(|info| (info.pid.to_string(), Some(info)));
    let empty = empty.into_iter().map(|pid| (pid.to_string(), None));
    print_list(&mut out, "SERVER", rows.chain(empty))?;
    note_not_shown(is_empty);
    Ok(())
}

/// Prints a table of disks.
///
/// Each row begins with the location of the disk. `None` stands for a server without disks.
pub fn print_list<'a>(
    out: &mut impl Write,
    place: &str,
    disks: impl Iterator<Item = (String, Option<&'a Info>)>,
) -> anyhow::Result<()> {
    let rows = disks.map(|(at, info)| match info {
        Some(info) => row(at, info),
        None => empty_row(at),
    });
    let head = [
        place,
        "DISK",
        "SIZE",
        "FORMAT",
        "IN USE BY",
        "IMAGE",
        "REACHED BY",
    ];
    print(
        out,
        &[vec![head.map(str::to_owned)], rows.collect()].concat(),
    )
}

type Row = [String; 7];

fn row(at: String, info: &Info) -> Row {
    let vhost_user = info
        .vhost_user
        .as_ref()
        .map(|at| format!("vhost-user {at}"));
    let nbd = info
        .nbd
        .as_ref()
        .map(|nbd| format!("NBD as {:?}", nbd.export));
    let fuse = { info.fuse.as_ref() }.map(|fuse| format!("file {}", fuse.file.display()));
    let ways: Vec<_> = vhost_user.into_iter().chain(nbd).chain(fuse).collect();
    [
        at,
        info.name.clone(),
        Size(info.size).to_string(),
        info.format.clone(),
        match (info.users(), &info.held_by) {
            (Some(users), _) => users,
            (None, Some(holder)) => format!("(image: {holder})"),
            (None, None) => "nobody".into(),
        },
        info.disk.clone(),
        ways.join(", "),
    ]
}

fn empty_row(at: String) -> Row {
    let mut row = Row::default();
    (row[0], row[1]) = (at, "(none yet)".into());
    row
}

fn print(out: &mut impl Write, rows: &[Row]) -> anyhow::Result<()> {
    // Another user may have chosen the names: escape control characters.
    let rows: Vec<_> = rows
        .iter()
        .map(|row| row.each_ref().map(|cell| fathom_img::shown(cell)))
        .collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<_> = (0..7).map(|column| width(column).unwrap_or(0)).collect();
    for row in &rows {
        let cells = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:<width$}"));
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
    }
    Ok(())
}
