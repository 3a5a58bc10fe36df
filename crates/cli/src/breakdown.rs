//! `fathom breakdown`: measures where the requests of a running guest spend their time.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{ArgGroup, Args};
use fathom_lab::attach::{self, Options, Served};
use fathom_lab::tracers::fathom::Api;
use fathom_lab::tracers::{qemu, remove_all_on_abort};
use fathom_run::Run;

use crate::report::{self, ReportArgs};
use crate::servers::find;
use crate::target::Disk;
use fathom_units::parse_seconds;

/// Trace a running guest's disk requests through all layers
///
/// With --pid the command attaches to a running QEMU from the host and changes nothing. The command
/// records KVM's kicks and interrupts, the host's block layer and Fathom's own trace, and then for
/// the same time the system calls of the threads. The run directory keeps the recording for
/// `fathom report` and --join.
///
/// With --server it records a disk of a Fathom server. If that disk is on another server
/// (`nbd://`), record the same time on that host and use --join, to show the network, that server
/// and its I/O as layers.
///
/// With --qemu-trace it reads a trace file of QEMU, and shows the time of each step within QEMU.
#[derive(Debug, Args)]
#[group(skip)]
#[command(group(ArgGroup::new("source").required(true).args(["pid", "server", "join", "qemu_trace"])))]
pub struct BreakdownArgs {
    /// Process id of the QEMU to attach to
    #[arg(long, value_name = "PID", help_heading = "Source")]
    pid: Option<u32>,

    /// Disk of a Fathom server: its name, or the process id or API socket of the server
    #[arg(long, value_name = "NAME|PID|SOCKET", help_heading = "Source")]
    server: Option<String>,

    /// Disk to record, if there are several: QEMU's id of the disk, with --server its name
    #[arg(long, value_name = "NAME", help_heading = "Source", conflicts_with_all = ["join", "qemu_trace"])]
    disk: Option<String>,

    /// QMP socket of QEMU without another client, to identify disks, also hot-plugged ones
    #[arg(long, value_name = "SOCKET", requires = "pid", help_heading = "Source")]
    qmp: Option<PathBuf>,

    /// Time of each recording, such as 500ms; --pid makes two recordings
    #[arg(long, visible_alias = "runtime", value_name = "SECONDS", default_value = "5s", value_parser = parse_window, conflicts_with_all = ["join", "qemu_trace"])]
    seconds: Duration,

    /// Run directories to join, which were recorded at the same time: the host's first
    ///
    /// The others are of the guest (`fathom guest record`), of the server that the requests go to
    /// (`fathom breakdown --server` there), or of both.
    #[arg(long, num_args = 2..=3, value_names = ["HOST.RUN", "OTHER.RUN"], help_heading = "Source")]
    join: Vec<PathBuf>,

    /// File with QEMU's trace events
    ///
    /// A log of QEMU (with -msg timestamp=on), or a trace of its simple backend in format 2 to 4.
    #[arg(long, value_name = "FILE", help_heading = "Source")]
    qemu_trace: Option<PathBuf>,

    /// The file trace-events-all of that QEMU, which traces of the simple backend require
    #[arg(
        long,
        value_name = "FILE",
        requires = "qemu_trace",
        help_heading = "Source"
    )]
    qemu_events: Option<PathBuf>,

    /// Run directory to create [default: fathom-PID.run, fathom-DISK.run, joined.run or TRACE.run]
    #[arg(long, short, value_name = "DIR")]
    output: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Parses a time of 10ms to 1h, such as `5` or `500ms`.
pub fn parse_window(text: &str) -> Result<Duration, String> {
    let duration = parse_seconds(text)?;
    let sane = Duration::from_millis(10)..=Duration::from_secs(3600);
    if !sane.contains(&duration) {
        return Err("must be 10ms to 1h".into());
    }
    Ok(duration)
}

/// Runs the command; progress goes to standard error, tables to standard output.
pub fn run(args: BreakdownArgs) -> anyhow::Result<()> {
    let output = |default: String| args.output.clone().unwrap_or_else(|| default.into());
    let (dir, run) = if let Some(pid) = args.pid {
        let dir = output(format!("fathom-{pid}.run"));
        let run = record(&args, pid, &dir)?;
        (dir, run)
    } else if let Some(server) = &args.server {
        record_served(&args, server, output)?
    } else if let [host, others @ ..] = args.join.as_slice() {
        let dir = output("joined.run".into());
        let others: Vec<&Path> = others.iter().map(PathBuf::as_path).collect();
        let run = attach::join(host, &others, &dir)?;
        (dir, run)
    } else if let Some(trace) = &args.qemu_trace {
        let dir = args.output.clone().unwrap_or_else(|| run_of(trace));
        let run = qemu::import(trace, args.qemu_events.as_deref(), &dir)?;
        (dir, run)
    } else {
        bail!("no source given; use --pid, --server, --join or --qemu-trace")
    };
    list_disks(&run);
    match args.json {
        true => report::run(ReportArgs::of(vec![dir.clone()], true))?,
        false => report::print_run(&dir)?,
    }
    eprintln!("breakdown: the run is in {}", dir.display());
    Ok(())
}

/// Returns a run directory in the working directory, named after the trace.
fn run_of(trace: &Path) -> PathBuf {
    let mut name = trace.file_name().unwrap_or("qemu".as_ref()).to_owned();
    name.push(".run");
    name.into()
}

fn record(args: &BreakdownArgs, pid: u32, dir: &Path) -> anyhow::Result<Run> {
    remove_all_on_abort();
    let stop = stop_on_signal()?;
    let options = Options {
        pid,
        qmp: args.qmp.as_deref(),
        disk: args.disk.as_deref(),
        window: args.seconds,
        output: dir,
        stop: &stop,
    };
    let progress = &mut |step: &str| eprintln!("breakdown: {step}");
    Ok(attach::record(&options, progress)?)
}

fn record_served(
    args: &BreakdownArgs,
    server: &str,
    output: impl Fn(String) -> PathBuf,
) -> anyhow::Result<(PathBuf, Run)> {
    let (server, named) = find(server)?;
    let Disk { server, name } = Disk::new(server, args.disk.clone().or(named))?;
    let dir = output(format!("fathom-{name}.run"));
    remove_all_on_abort();
    let served = Served {
        api: Api::new(server, name),
        window: args.seconds,
        output: &dir,
        stop: &*stop_on_signal()?,
    };
    let progress = &mut |step: &str| eprintln!("breakdown: {step}");
    let run = attach::record_served(served, progress)?;
    Ok((dir, run))
}

/// From now on, the first SIGINT or SIGTERM sets the flag; a second one ends the process.
pub fn stop_on_signal() -> anyhow::Result<Arc<AtomicBool>> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        // The order matters: if the flag were set first, the first signal would end the process.
        signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&stop))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&stop)))
            .context("cannot catch signals")?;
    }
    Ok(stop)
}

/// Prints all disks of the guest, with a mark at the one under test.
fn list_disks(run: &Run) {
    for disk in &run.disks {
        // Another user may have chosen the names: escape control characters.
        eprintln!("breakdown: {}", fathom_img::shown(&line_of(disk)));
    }
}

/// Returns a line such as `* d0  vhost-user-blk  /images/a.img on vda, served by 1234, told by
/// eventfd-id`.
fn line_of(disk: &fathom_run::Disk) -> String {
    let mark = if disk.under_test { '*' } else { ' ' };
    let mut line = format!("{mark} {}  {}", disk.name, disk.device);
    if let Some(image) = &disk.image {
        line.push_str(&format!("  {}", image.display()));
    }
    if let Some(host) = &disk.host {
        line.push_str(&format!(" on {}", host.name));
    }
    if let Some(pid) = disk.server_pid {
        line.push_str(&format!(", served by process {pid}"));
    }
    match &disk.identified_by {
        Some(by) => line.push_str(&format!(", identified by {by}")),
        None if disk.under_test => line.push_str(", unidentified"),
        None => {}
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_plain_or_with_a_unit() {
        assert_eq!(parse_window("3"), Ok(Duration::from_secs(3)));
        assert_eq!(parse_window("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_window("250ms"), Ok(Duration::from_millis(250)));
        for bad in ["0", "-1", "x", "1e99", "nan", "2h"] {
            assert!(parse_window(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_disk_that_cannot_be_told_from_others_says_so() {
        let mut disk = fathom_run::Disk {
            name: "d0".into(),
            device: "virtio-blk".into(),
            under_test: true,
            ..fathom_run::Disk::default()
        };
        assert_eq!(line_of(&disk), "* d0  virtio-blk, unidentified");
        disk.identified_by = Some("qmp".into());
        disk.server_pid = Some(7);
        assert_eq!(
            line_of(&disk),
            "* d0  virtio-blk, served by process 7, identified by qmp"
        );
    }
}
