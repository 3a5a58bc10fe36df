//! Records a guest from inside: `fathom guest record`.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fathom_run::{Clocks, Environment, Round, Run, RunKind};

use super::{NAME, Options, start};
use crate::environment;
use crate::error::{Context, Error, Result};
use crate::tracers::ftrace::Mode;
use crate::tracers::{Tracefs, pair};

/// Options of the recording.
#[derive(Clone, Debug)]
pub struct RecordOptions<'a> {
    /// Name of the disk, such as `vda`. If `None`, the only virtio disk.
    pub device: Option<&'a str>,
    /// Length of the recording.
    pub window: Duration,
    /// Trace memory of all CPUs together, in MiB. If `None`, an eighth of the available memory, at
    /// most 256 MiB.
    pub buffer_mib: Option<u32>,
    /// The run directory to create.
    pub output: &'a Path,
    /// The caller sets this flag to end the recording early.
    pub stop: &'a AtomicBool,
}

const ROUND: &str = "guest";
const LOOK: Duration = Duration::from_millis(20);
const LEAST_KIB: u32 = 1 << 10;
const MOST_KIB: u32 = 256 << 10;

/// Records this machine's virtio disk into a new run directory. The trace stays in memory until the
/// window has ended. Calls `started` when tracing has started.
///
/// # Errors
/// When there is no such disk, the kernel cannot trace, or the directory cannot be written. If only
/// some layers cannot be traced, the run with the other layers is written before the error returns.
pub fn record(options: &RecordOptions, started: &mut dyn FnMut()) -> Result<Run> {
    if options.output.join("run.json").exists() {
        return Err(Error::Unusable {
            path: options.output.to_owned(),
            reason: "already contains a run; choose a new directory with --output".into(),
        });
    }
    let tracefs = Tracefs::open()?;
    let folder = options.output.join(ROUND);
    fs::create_dir_all(&folder).context(|| format!("cannot create {}", folder.display()))?;
    let mut guest = start(
        &tracefs,
        &Options {
            device: options.device,
            mode: Mode::Buffered {
                kib_per_cpu: buffer(options.buffer_mib),
            },
        },
    )?;
    let machine = environment::machine(guest.clock());
    let before = pair();
    started();
    wait(options);
    guest.halt()?;
    let pairs = vec![before, pair()];
    let untraced = guest.untraced().map(str::to_owned);
    let (collected, disks) = guest.stop(&folder)?;
    let is_the_one = disks.len() == 1;
    let run = Run {
        environment: Environment {
            guest: Some(machine),
            fathom: env!("CARGO_PKG_VERSION").into(),
            ..Environment::default()
        },
        disks: disks.iter().map(|disk| disk.to_disk(is_the_one)).collect(),
        rounds: vec![Round {
            name: ROUND.into(),
            traced: vec![NAME.into()],
            clocks: Clocks {
                guest: pairs,
                ..Clocks::default()
            },
            streams: collected.streams,
            ..Round::default()
        }],
        problems: collected.problems,
        ..Run::new(RunKind::Guest, "guest")
    };
    run.save(options.output)?;
    match untraced {
        None => Ok(run),
        Some(why) => Err(Error::Unusable {
            path: options.output.to_owned(),
            reason: format!("the guest's layers are missing: {why}"),
        }),
    }
}

/// Returns the buffer size per CPU in KiB.
fn buffer(mib: Option<u32>) -> u32 {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let cpus = std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u32);
    let all = match mib {
        Some(mib) => mib.saturating_mul(1024),
        None => (available_kib(&meminfo) / 8).min(MOST_KIB),
    };
    (all / cpus).max(LEAST_KIB)
}

fn available_kib(meminfo: &str) -> u32 {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let number = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    u32::try_from(number.unwrap_or(0)).unwrap_or(u32::MAX)
}

fn wait(options: &RecordOptions) {
    let end = Instant::now() + options.window;
    while !options.stop.load(Ordering::Relaxed) {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        std::thread::sleep(left.min(LOOK));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_buffer_is_a_share_of_what_is_free() {
        assert_eq!(
            available_kib("MemTotal: 9 kB\nMemAvailable:   800 kB\n"),
            800
        );
        assert_eq!(available_kib(""), 0);
        assert!(buffer(None) >= LEAST_KIB);
        assert!(buffer(Some(4096)) >= buffer(Some(8)));
    }
}
