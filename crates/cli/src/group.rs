//! `fathom group`: disks that share limits.

use crate::filters::{changes, parse_option};
use crate::servers::named_or_only;
use clap::{Args, Subcommand};
use fathom_daemon::ThrottleGroup;
use fathom_stack::FilterInfo;
use serde::Deserialize;
use std::io::Write;

/// List throttle groups, and change their limits
///
/// A group is all disks of a server whose filter throttle has the same group=NAME.
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
    /// The server's process id, or the path of its API's socket [default: the only one that runs here]
    #[arg(long, value_name = "PID|SOCKET")]
    server: Option<String>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// List a server's throttle groups: limits and disks
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

/// Change limits for all disks of a group at once
///
/// In the files of disks that are kept, too. An option without a value (iops-total=) is set to its
/// default; `fathom filters throttle` lists them. Where tenants have processes of their own, each of
/// those that have a group of that name counts for itself, and all of them have these limits then.
#[derive(Args, Debug)]
struct SetArgs {
    /// What group=NAME says in the disks' filters
    #[arg(value_name = "GROUP")]
    group: String,

    /// Options with their new values
    #[arg(value_name = "OPTION=VALUE", required = true, value_parser = parse_option)]
    options: Vec<(String, String)>,

    /// Until the server starts again only, for disks that it keeps
    #[arg(long)]
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
