//! `fathom group`: manages throttle groups, whose disks share limits.

use crate::filters::{changes, parse_option};
use crate::servers::named_or_only;
use clap::{Args, Subcommand};
use fathom_requests::ThrottleGroup;
use fathom_stack::FilterInfo;
use serde::Deserialize;
use std::io::Write;

/// List and change throttle groups
///
/// The disks of a server whose throttle filters have the same group=NAME form a group and share its
/// limits.
#[derive(Args, Debug)]
pub struct GroupCommand {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    List(ListArgs),
    Set(SetArgs),
}

pub fn run(args: GroupCommand) -> anyhow::Result<()> {
    match args.command {
        Command::List(args) => list(args),
        Command::Set(args) => set(args),
    }
}

#[derive(Args, Debug)]
struct Common {
    /// Process id or API socket of the server [default: the only server on this host]
    #[arg(long, value_name = "PID|SOCKET")]
    server: Option<String>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// List the throttle groups of a server with their limits and disks
#[derive(Args, Debug)]
struct ListArgs {
    #[command(flatten)]
    common: Common,
}

fn list(args: ListArgs) -> anyhow::Result<()> {
    let server = named_or_only(args.common.server.as_deref())?;
    let Groups { groups } = server.get(&["v1", "throttle-groups"]).send()?;
    print(&groups, args.common.json)
}

/// Change the limits of a throttle group
///
/// The change also applies to the stored definitions of the disks. An option without a value
/// (iops-total=) is reset to its default; `fathom filters throttle` lists the options. If tenants
/// have processes of their own, each of them has its own group of this name, and the limits apply
/// to each group separately.
#[derive(Args, Debug)]
struct SetArgs {
    /// Name of the group, as in group=NAME of the filters
    #[arg(value_name = "GROUP")]
    group: String,

    /// Limits with their new values, such as iops-total=1000
    #[arg(value_name = "OPTION=VALUE", required = true, value_parser = parse_option)]
    options: Vec<(String, String)>,

    /// Undo the change when the server restarts
    #[arg(long = "transient", alias = "temporary")]
    temporary: bool,

    #[command(flatten)]
    common: Common,
}

fn set(args: SetArgs) -> anyhow::Result<()> {
    let options = changes("throttle", args.options)?;
    let server = named_or_only(args.common.server.as_deref())?;
    let set = server.patch(&["v1", "throttle-groups", &args.group]);
    let set = set.flag("temporary", args.temporary).json(&options);
    let Groups { groups } = set.patiently().send()?;
    print(&groups, args.common.json)
}

#[derive(Deserialize)]
struct Groups {
    groups: Vec<ThrottleGroup>,
}

fn print(groups: &[ThrottleGroup], json: bool) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if json {
        writeln!(out, "{}", serde_json::to_string(groups)?)?;
        return Ok(());
    }
    for group in groups {
        let tenant = group.tenant.as_ref();
        let tenant = tenant.map_or(String::new(), |tenant| format!(" (tenant {tenant})"));
        let limits = FilterInfo {
            name: "throttle".into(),
            options: group.options.clone(),
            held_ns: None,
        };
        let disks: Vec<_> = group.disks.iter().map(String::as_str).collect();
        let disks = disks.join(", ");
        writeln!(out, "{}{tenant}: {limits}: {disks}", group.name)?;
    }
    Ok(())
}
