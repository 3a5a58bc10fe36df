//! `fathom breakdown`: where the requests of a running guest spend their time.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{ArgGroup, Args};
use fathom_lab::attach::{self, Options};
use fathom_lab::tracers::{qemu, remove_all_on_abort};
use fathom_run::{Disk, Run};

use crate::report::{self, ReportArgs};
use fathom_units::parse_seconds;

/// Show where a running guest's disk requests spend their time
///
/// Attaches to a running QEMU from the host alone and changes nothing: it
/// records KVM's kicks and interrupts, the host's block layer and Fathom's own
/// trace for a while, then for as long the system calls of the threads. What
/// was recorded stays in the run directory, for `fathom report` and --join.
///
/// With --qemu-trace it reads a trace that some QEMU has written, by its log
/// or by its simple backend, and shows how long each step within QEMU took.
#[derive(Debug, Args)]
#[group(skip)]
#[command(group(ArgGroup::new("source").required(true).args(["pid", "join", "qemu_trace"])))]
pub struct BreakdownArgs {
    /// Process id of the QEMU to attach to
    #[arg(long)]
    pid: Option<u32>,

    /// The guest's disk, where it has several: QEMU's id for it
    #[arg(long, value_name = "NAME", requires = "pid")]
    disk: Option<String>,

    /// A QMP socket of QEMU's that nobody else uses: tells disks apart by their
    /// addresses, and finds those that were plugged in
    #[arg(long, value_name = "SOCKET", requires = "pid")]
    qmp: Option<PathBuf>,

    /// How long each of the two recordings takes
    #[arg(long, value_name = "SECONDS", default_value = "5s", value_parser = parse_window, requires = "pid")]
    seconds: Duration,

    /// Put a host's run and a guest's (of `fathom guest record`), recorded at
    /// the same time, together
    #[arg(long, num_args = 2, value_names = ["HOST.RUN", "GUEST.RUN"])]
    join: Vec<PathBuf>,

    /// A file of QEMU's own trace events: of its log (with -msg timestamp=on)
    /// or of its simple backend, formats 2 to 4
    #[arg(long, value_name = "FILE")]
    qemu_trace: Option<PathBuf>,

    /// That QEMU's trace-events-all, which a file of the simple backend cannot
    /// be read without; a log needs none
    #[arg(long, value_name = "FILE", requires = "qemu_trace")]
    qemu_events: Option<PathBuf>,

    /// The run directory to make (default: fathom-PID.run, joined.run, or the
    /// trace's name with .run)
    #[arg(long, short, value_name = "DIR")]
    output: Option<PathBuf>,

    /// Print JSON (docs/report.md)
    #[arg(long)]
    json: bool,
}

/// `5` or `500ms`, within reason.
pub fn parse_window(text: &str) -> Result<Duration, String> {
    let duration = parse_seconds(text)?;
    let sane = Duration::from_millis(10)..=Duration::from_secs(3600);
    if !sane.contains(&duration) {
        return Err("it is not between 10 ms and an hour".into());
    }
    Ok(duration)
}

/// Runs the command; progress goes to standard error, tables to standard output.
pub fn run(args: BreakdownArgs) -> anyhow::Result<()> {
    let output = |default: &dyn Fn() -> PathBuf| args.output.clone().unwrap_or_else(default);
    let (dir, run) = match (args.pid, args.join.as_slice(), &args.qemu_trace) {
        (Some(pid), ..) => {
            let dir = output(&|| format!("fathom-{pid}.run").into());
            let run = record(&args, pid, &dir)?;
            (dir, run)
        }
        (None, [host, guest], _) => {
            let dir = output(&|| "joined.run".into());
            let run = attach::join(host, guest, &dir)?;
            (dir, run)
        }
        (None, _, Some(trace)) => {
            let dir = output(&|| run_of(trace));
            let run = qemu::import(trace, args.qemu_events.as_deref(), &dir)?;
            (dir, run)
        }
        (None, _, None) => bail!("--pid, --join or --qemu-trace is needed"),
    };
    list_disks(&run);
    match args.json {
        true => report::run(ReportArgs::of(vec![dir.clone()], true))?,
        false => report::print_run(&dir)?,
    }
    eprintln!("breakdown: the run is in {}", dir.display());
    Ok(())
}

/// Here, named after the trace.
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

/// From now on the first SIGINT or SIGTERM asks for an early end; a second one ends the process.
pub fn stop_on_signal() -> anyhow::Result<Arc<AtomicBool>> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        // The order matters: the first signal must not find its own mark.
        signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&stop))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&stop)))
            .context("cannot catch signals")?;
    }
    Ok(stop)
}

/// Every disk of the guest, the one under test marked.
fn list_disks(run: &Run) {
    for disk in &run.disks {
        // Names in it may be a stranger's.
        eprintln!("breakdown: {}", fathom_img::shown(&line_of(disk)));
    }
}

/// `* d0  vhost-user-blk  /images/a.img on vda, served by 1234, told by eventfd-id`
fn line_of(disk: &Disk) -> String {
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
        Some(by) => line.push_str(&format!(", told by {by}")),
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
        let mut disk = Disk {
            name: "d0".into(),
            device: "virtio-blk".into(),
            under_test: true,
            ..Disk::default()
        };
        assert_eq!(line_of(&disk), "* d0  virtio-blk, unidentified");
        disk.identified_by = Some("qmp".into());
        disk.server_pid = Some(7);
        assert_eq!(
            line_of(&disk),
            "* d0  virtio-blk, served by process 7, told by qmp"
        );
    }
}
