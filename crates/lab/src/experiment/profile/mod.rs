//! CPU profile: perf samples the CPUs of guest and host while fio works in the guest. The samples
//! are folded by stack, for tables and flame graphs.

mod components;
mod fold;
mod locks;
mod record;
mod sampling;

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Context, Experiment, Kind, Need, Parameter, Session, Settings, Yield, shared};
use crate::bed::{DISK, GuestBed, Job, image};
use crate::error::Result;
use crate::machine::{Aio, Machine};
use crate::scratch::Scratch;
use crate::server::{self, Spec};
use crate::work::{AROUND_FIO, Shape, Worked, fio_file, fio_on_host, fio_script, host_time};
use crate::workload::Rw;
use record::Recorder;
use sampling::{CallGraph, Sampling};

pub struct Profiling;

const PARAMETERS: &[Parameter] = &[
    shared::DISK,
    shared::aio("io_uring"),
    shared::image_size("1G"),
    shared::RW,
    shared::block_size("4k"),
    shared::DEPTH,
    shared::THREADS,
    shared::vcpus("1"),
    shared::RUNTIME,
    Parameter::new(
        "frequency",
        "Samples per second of each CPU",
        Kind::Count {
            least: 1,
            most: 10_000,
        },
        "499",
    ),
    Parameter::new(
        "call-graph",
        "Whether to record the callers, by frame pointers (fp) or not",
        Kind::of::<CallGraph>(CallGraph::FORM),
        "fp",
    )
    .rarely(),
];

impl Experiment for Profiling {
    fn name(&self) -> &'static str {
        "profile"
    }

    fn about(&self) -> &'static str {
        "CPU time in guest and host: by component, by symbol, as flame graphs"
    }

    fn description(&self) -> &'static str {
        "fio works in a guest whose disk has a queue for each CPU. perf samples the CPUs in \
         the guest and on the host at the same time, each with its own symbols. The report \
         has flame graphs of the guest, QEMU and the disk's server, a table of the symbols \
         with most samples, and shares by component.\n\n\
         `profile.guest.*` are percentages of the guest's samples, and `profile.host.*` of \
         the host's samples, without idle CPUs. On the host the innermost frame of KVM, the \
         block layer or a file system decides the component; without such a frame, the \
         process does. `host.guest` is the time of virtual CPUs in the guest, which the \
         guest's own samples explain. `host.folded` and `guest.folded` in the cell's folder \
         are for other tools.\n\n\
         perf finds callers by frame pointers. Programs without frame pointers (most \
         packaged ones) have call chains that end early. perf itself takes time: do not \
         compare the figures with other experiments. Without hardware virtualisation, the \
         guest's code appears as QEMU's."
    }

    fn parameters(&self) -> &'static [Parameter] {
        PARAMETERS
    }

    fn check(&self, settings: &Settings) -> Result<()> {
        let cell = Cell::new(settings)?;
        cell.disk.check(&cell.spec())
    }

    fn needs(&self, _settings: &Settings) -> Result<Vec<Need>> {
        let programs = [Need::Program("fio"), Need::Program("perf")];
        Ok([&Need::GUEST[..], &programs].concat())
    }

    fn estimate(&self, settings: &Settings) -> Duration {
        const AROUND: Duration = Duration::from_secs(40);
        Cell::new(settings).map_or(AROUND, |cell| AROUND + cell.runtime)
    }

    fn begin(&self, context: &Context) -> Box<dyn Session> {
        Box::new(Cells {
            fathom: context.fathom.clone(),
        })
    }
}

struct Cell {
    disk: server::Kind,
    aio: Aio,
    size: u64,
    rw: Rw,
    bs: u64,
    shape: Shape,
    vcpus: u16,
    runtime: Duration,
    sampling: Sampling,
}

impl Cell {
    fn new(settings: &Settings) -> Result<Cell> {
        fn count<T: std::str::FromStr>(settings: &Settings, name: &str) -> Result<T> {
            Settings::needed(name, settings.count(name)?)
        }
        Ok(Cell {
            disk: settings.word("disk")?,
            aio: settings.word("aio")?,
            size: Settings::needed("size", settings.size("size")?)?,
            rw: settings.word("rw")?,
            bs: Settings::needed("bs", settings.size("bs")?)?,
            shape: Shape {
                threads: count(settings, "threads")?,
                depth: count(settings, "iodepth")?,
            },
            vcpus: count(settings, "vcpus")?,
            runtime: Settings::needed("runtime", settings.time("runtime")?)?,
            sampling: Sampling {
                frequency: count(settings, "frequency")?,
                graph: settings.word("call-graph")?,
            },
        })
    }

    /// The disk, without its image.
    fn spec(&self) -> Spec<'static> {
        Spec {
            name: DISK,
            aio: self.aio,
            queues: self.vcpus,
            ..Spec::default()
        }
    }

    fn machine(&self) -> Machine {
        Machine {
            cpus: self.vcpus.into(),
            profiler: true,
            ..Machine::default()
        }
    }

    /// Returns fio's arguments for a file or device.
    fn job(&self, file: &str, runtime: Duration) -> Vec<String> {
        let Shape { threads, depth } = self.shape;
        let engine = if depth > 1 { "libaio" } else { "psync" };
        let mut job = vec![
            format!("--filename={file}"),
            format!("--rw={}", self.rw),
            format!("--bs={}", self.bs),
            format!("--iodepth={depth}"),
            format!("--numjobs={threads}"),
            format!("--ioengine={engine}"),
            format!("--runtime={}ms", runtime.as_millis()),
        ];
        let same = "--name=profile --thread --direct=1 --norandommap --time_based \
                    --group_reporting --output-format=json";
        job.extend(same.split(' ').map(str::to_owned));
        job
    }
}

struct Cells {
    fathom: PathBuf,
}

impl Session for Cells {
    fn cell(
        &mut self,
        settings: &Settings,
        folder: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield> {
        let cell = Cell::new(settings)?;
        let dir = Scratch::on_disk()?;
        let mut image = PathBuf::new();
        if !matches!(cell.disk, server::Kind::Socket(_)) {
            progress(&format!("writing an image of {} MiB", cell.size >> 20));
            image = dir.path().join("disk.img");
            image::fill(&image, cell.size)?;
        }
        let spec = Spec {
            fathom: &self.fathom,
            dir: dir.path(),
            image: &image,
            ..cell.spec()
        };
        let mut bed = GuestBed::boot(cell.machine(), &cell.disk, &spec, progress)?;
        progress(&format!(
            "working in the guest for {} s",
            cell.runtime.as_secs()
        ));
        let recorder = Recorder::start(&mut bed, dir.path(), cell.sampling);
        let seen = bed.measure(&Job {
            script: &fio_script(&cell.job(&bed.device, cell.runtime).join(" ")),
            timeout: cell.runtime + AROUND_FIO,
            parse: &|text| Worked::of_fio(text, cell.shape),
        });
        let recorder = recorder.stop(&mut bed);
        let mut found = Yield::from(seen?);
        progress("reading what perf has recorded");
        recorder.tell(&mut bed, folder, &mut found)?;
        progress("powering the guest off");
        bed.end()?;
        if !image.as_os_str().is_empty() {
            progress("the same on the host");
            let job = cell.job(&fio_file(&image), host_time(cell.runtime));
            found.compare(fio_on_host(&job, cell.shape)?);
        }
        Ok(found)
    }
}
