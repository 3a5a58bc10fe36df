//! The KVM wiki's experiment of 2010: one vCPU reads 4 KiB at a time with O_DIRECT, in the guest
//! and on the host, with tracing of every layer in between.

mod bed;
mod cell;
mod in_guest;
mod options;
mod round;

use std::path::Path;
use std::time::Duration;

use fathom_run::evidence::Bare;
use fathom_run::{Better, Measure, Round, Run, Unit};

use super::{Context, Experiment, Kind, Need, Parameter, Session, Settings, Yield, shared};
use crate::error::{Error, Result};
use crate::host::Accelerator;
use crate::server;
use crate::workload::Rw;

pub use in_guest::{GuestRun, run as run_guest};
pub use options::{Injection, Options, Place, Transport};

/// The experiment `wiki`, each cell of which is a complete breakdown.
pub struct Wiki;

const PARAMETERS: &[Parameter] = &[
    Parameter::new(
        "disk",
        "Server of the disk",
        Kind::of::<server::Kind>("fathom, qemu, qemu-main, qemu-mapped, qsd"),
        "fathom",
    ),
    shared::aio("io_uring"),
    Parameter::new(
        "transport",
        "How the guest accesses its disk: legacy by an I/O port, intx without MSI-X",
        Kind::of::<Transport>(Transport::FORM),
        "modern",
    )
    .rarely(),
    Parameter::new(
        "rw",
        "Operation and pattern of the guest's requests",
        Kind::of::<Rw>("read, write, randread, randwrite"),
        "read",
    ),
    shared::block_size("4k"),
    Parameter::new(
        "iodepth",
        "Requests in flight",
        Kind::Count {
            least: 1,
            most: 1024,
        },
        "1",
    ),
    Parameter::new(
        "queues",
        "Number of request queues of the disk",
        Kind::Count { least: 1, most: 64 },
        "1",
    ),
    Parameter::new(
        "rounds",
        "Number of pairs of a traced and an untraced round, all in one guest",
        Kind::Count {
            least: 1,
            most: 100,
        },
        "3",
    ),
    Parameter::new(
        "count",
        "Requests of a round [default: 10000, fewer in an emulated KVM host]",
        Kind::Count {
            least: 1,
            most: 1 << 40,
        },
        "",
    ),
    Parameter::new(
        "seconds",
        "Seconds of a round, instead of --count",
        Kind::Count {
            least: 1,
            most: 3600,
        },
        "",
    ),
    Parameter::new(
        "poll",
        "Whether the server polls for requests before it sleeps",
        Kind::Switch,
        "off",
    ),
    shared::image_size(""),
    Parameter::new(
        "inject",
        "Delay of every other request, to verify the measurement",
        Kind::of::<Injection>("guest, storage, queue or notify, and =TIME"),
        "",
    )
    .rarely(),
    Parameter::new(
        "filter",
        "Filter on Fathom's disk, such as delay:read=1ms (see `fathom filters`)",
        Kind::List,
        "",
    ),
    Parameter::new(
        "pairs-only",
        "Only the pairs, without rounds on the host, of system calls and of QEMU's events",
        Kind::Switch,
        "off",
    )
    .rarely(),
];

impl Experiment for Wiki {
    fn name(&self) -> &'static str {
        "wiki"
    }

    fn about(&self) -> &'static str {
        "Time of each request in every layer, as in a breakdown of the KVM wiki"
    }

    fn description(&self) -> &'static str {
        "A page of the KVM wiki of 2010 showed by hand where a guest's 4k reads spend their \
         time: it subtracted the mean times of each layer's events. This experiment boots a \
         guest with one vCPU that reads with O_DIRECT, and traces the guest, KVM, the \
         disk's server and the host's block layer. The report has the wiki's breakdown, and \
         also joins each request through all layers on one clock, with distributions.\n\n\
         Rounds come in pairs, traced and untraced, which show the cost of tracing. Between \
         the pairs the same work runs on the host. At the end one round records system \
         calls, one records QEMU's own events, and one untraced round records the evidence \
         for the limiter.\n\n\
         Without hardware virtualisation the experiment runs in a KVM host that is itself \
         emulated. Every layer exists there, but all times are stretched."
    }

    fn parameters(&self) -> &'static [Parameter] {
        PARAMETERS
    }

    fn check(&self, settings: &Settings) -> Result<()> {
        let context = Context::default();
        Options::from_settings(settings, &context, Path::new(""))?.check()
    }

    fn needs(&self, _settings: &Settings) -> Result<Vec<Need>> {
        Ok(Need::GUEST.to_vec())
    }

    fn goes_to_kvm_host(&self) -> bool {
        true
    }

    fn estimate(&self, settings: &Settings) -> Duration {
        let context = Context::default();
        let options = Options::from_settings(settings, &context, Path::new(""));
        options.map_or(Duration::from_secs(60), |options| options.estimate())
    }

    fn begin(&self, context: &Context) -> Box<dyn Session> {
        Box::new(Cells(context.clone()))
    }
}

struct Cells(Context);

impl Session for Cells {
    fn cell(
        &mut self,
        settings: &Settings,
        folder: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield> {
        if Accelerator::detect() != Accelerator::Kvm {
            return Err(Error::Protocol(
                "no KVM, which the experiment measures".into(),
            ));
        }
        let options = Options::from_settings(settings, &self.0, folder)?;
        let seen = cell::run(&options, progress)?;
        let run = Run::load(folder)?;
        let mut yielded = seen.map(Yield::from).unwrap_or_default();
        yielded.measures.splice(0..0, measures(&run));
        if let Some(bare) = bare(&run, &options) {
            yielded.compare(bare);
        }
        yielded.environment = Some(run.environment);
        Ok(yielded)
    }
}

/// Returns the mean times of a request in the wanted rounds, in nanoseconds, in ascending order.
fn times(run: &Run, wanted: impl Fn(&Round) -> bool) -> Vec<f64> {
    let rounds = run.rounds.iter().filter(|round| wanted(round));
    let mut times: Vec<f64> = rounds
        .filter_map(|round| Some(round.benchmark.as_ref()?.mean_ns))
        .collect();
    times.sort_by(f64::total_cmp);
    times
}

/// Returns the result of the same requests on the host itself, as the disk's server could make
/// them.
fn bare(run: &Run, options: &Options) -> Option<Bare> {
    let is_positional = |round: &Round| {
        let benchmark = round.benchmark.as_ref();
        round.on_host && benchmark.is_some_and(|one| !["read", "write"].contains(&&*one.call))
    };
    let times = times(run, is_positional);
    let median = *times.get(times.len() / 2)?;
    Some(Bare {
        requests_per_second: 1e9 / median,
        bytes_per_second: options.block_size as f64 * 1e9 / median,
        mean_ns: median * f64::from(options.iodepth),
    })
}

/// Returns the overall results; the breakdown has all others.
fn measures(run: &Run) -> Vec<Measure> {
    let mut measures = Vec::new();
    let mut time = |name: &str, times: &[f64]| {
        let Some(median) = times.get(times.len() / 2) else {
            return;
        };
        let measure = Measure::new(name, Unit::Nanoseconds, *median, Better::Lower);
        measures.push(measure.of(times.len() as u64));
    };
    let control = times(run, |round| round.traced.is_empty() && !round.on_host);
    let traced = times(run, |round| round.name.starts_with("requests-"));
    time("time", &control);
    time("time.traced", &traced);
    time("time.on-host", &times(run, |round| round.on_host));
    if let Some(median) = control.get(control.len() / 2) {
        let iops = Measure::new("iops", Unit::PerSecond, 1e9 / median, Better::Higher);
        measures.insert(0, iops.of(control.len() as u64));
    }
    measures
}
