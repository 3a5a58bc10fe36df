//! `fathom advise`: what to change on a disk in use, and why.
//!
//! - `watch` collects the evidence about a disk, with figures of the `host`;
//! - the crate `fathom-advise` derives changes from the evidence;
//! - `trial` tries changes: `apply` makes them, and `live_disk` sends them to the server;
//! - `interrupt` catches signals, and `print` shows the result.

mod apply;
mod host;
mod interrupt;
mod live_disk;
mod print;
mod trial;
mod watch;

use crate::servers::note_owner;
use crate::target::Target;
use anyhow::Context;
use clap::Args;
use fathom_advise::{Judgement, advise};
use fathom_control::Owner;
use fathom_units::short_duration;
use interrupt::Interrupt;
use live_disk::{Lasting, LiveDisk};
use print::{Offered, Report};
use std::ops::RangeInclusive;
use std::time::Duration;
use trial::{Plan, try_change};

/// Range of `--watch` and `--round`: that of the intervals of a server's live numbers.
const TIMES: RangeInclusive<Duration> = Duration::from_millis(500)..=Duration::from_secs(60);

/// Suggest changes of a disk in use
///
/// Watches the disk while its load runs, and prints at most three changes that can be made while
/// guests and clients use the disk: why each may help, what it costs, and the command. No change
/// weakens durability. If no change will help, the command gives the reason. Without --try the disk
/// is only watched.
#[derive(Args, Debug)]
pub struct AdviseArgs {
    #[command(flatten)]
    target: Target,

    /// Time to watch the disk, 500ms to 60s, such as 10s; a number without a unit is in seconds
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_time)]
    watch: Duration,

    /// Try each change on the disk, and report its effect
    ///
    /// Rounds without and with the change alternate. The disk has its original options again after
    /// the last round, if requests fail, if the 99th percentile of the latency doubles, and after
    /// Ctrl-C.
    #[arg(long = "try", help_heading = "Try the changes")]
    is_tried: bool,

    /// Keep the change with the largest gain, if a change is better
    #[arg(long, requires = "is_tried", help_heading = "Try the changes")]
    keep: bool,

    /// Number of pairs of rounds for each change, 2 to 50; six or more give 95% confidence
    #[arg(long, value_name = "N", default_value_t = 6, requires = "is_tried",
          value_parser = clap::value_parser!(u16).range(2..=50), help_heading = "Try the changes")]
    pairs: u16,

    /// Length of a round, 500ms to 60s, such as 5s
    #[arg(long, value_name = "TIME", default_value = "3s", requires = "is_tried",
          value_parser = parse_time, help_heading = "Try the changes")]
    round: Duration,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn parse_time(text: &str) -> Result<Duration, String> {
    let time = fathom_units::parse_seconds(text)?;
    match TIMES.contains(&time) {
        true => Ok(time),
        false => Err("must be from 500ms to 60s".to_owned()),
    }
}

pub fn run(args: AdviseArgs) -> anyhow::Result<()> {
    let stop = Interrupt::catch()?;
    let (disk, server) = args.target.disk_and_server()?;
    let disk = LiveDisk::new(disk);
    let plan = Plan {
        pairs: args.pairs.into(),
        round: args.round,
    };
    let result = advise_on(&disk, server.as_deref(), &args, plan, &stop);
    match result {
        Err(error) if stop.has_arrived() => {
            eprintln!("fathom: {}", crate::one_line(&error));
            std::process::exit(130);
        }
        result => result,
    }
}

fn advise_on(
    disk: &LiveDisk,
    server: Option<&str>,
    args: &AdviseArgs,
    plan: Plan,
    stop: &Interrupt,
) -> anyhow::Result<()> {
    let name = disk.name();
    eprintln!(
        "advise: watching disk '{name}' for {}",
        short_duration(args.watch)
    );
    let watched = watch::watch(disk, args.watch, stop)?;
    let outcome = advise(&watched.evidence()?);
    let mut report = Report::new(name, &watched, plan, outcome);
    report.server = server;
    if args.is_tried
        && let Ok(offered) = &mut report.outcome
    {
        try_all(disk, offered, &watched, plan, stop)?;
        if args.keep {
            report.kept = keep_best(disk, offered, &watched)?;
        }
    }
    report.print(args.json)
}

/// Tries all changes, one after the other.
fn try_all(
    disk: &LiveDisk,
    offered: &mut [Offered],
    watched: &watch::Watched,
    plan: Plan,
    stop: &Interrupt,
) -> anyhow::Result<()> {
    let original = &watched.after.options;
    for one in offered {
        let change = &one.advice.change;
        eprintln!(
            "advise: trying to {} for at most {}",
            change.title(),
            short_duration(plan.longest())
        );
        one.tried = Some(try_change(disk, change, original, plan, stop)?);
        if stop.has_arrived() {
            anyhow::bail!(
                "interrupted; disk '{}' has its original options",
                disk.name()
            );
        }
    }
    Ok(())
}

/// Makes the change with the largest gain, and returns its index. `None`: no change is better.
fn keep_best(
    disk: &LiveDisk,
    offered: &[Offered],
    watched: &watch::Watched,
) -> anyhow::Result<Option<usize>> {
    let gain = |(index, one): (usize, &Offered)| match one.tried.as_ref()?.judgement()? {
        Judgement::Better(gain) => Some((gain, index)),
        Judgement::Worse | Judgement::NoDifference => None,
    };
    let gains = offered.iter().enumerate().filter_map(gain);
    let Some((_, best)) = gains.max_by(|one, other| one.0.total_cmp(&other.0)) else {
        return Ok(None);
    };
    let change = &offered[best].advice.change;
    let seen = disk.seen()?;
    let options = apply::changed(&seen.options, change).map_err(anyhow::Error::msg)?;
    // (Otherwise the request would make a transient disk persistent.)
    let lasting = match watched.after.owner {
        Some(Owner::Transient) => Lasting::Transient,
        _ => Lasting::Persistent,
    };
    let kept = disk.change(&options, change.option(), lasting);
    let kept = kept.with_context(|| format!("disk '{}': cannot keep the change", disk.name()))?;
    note_owner(disk.name(), kept.owner);
    Ok(Some(best))
}
