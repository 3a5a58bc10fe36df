//! A sequential O_DIRECT read in the guest, one request at a time: the experiment that shows the
//! cost of every layer, because nothing overlaps.

mod fio;

use std::path::{Path, PathBuf};
use std::time::Duration;

use fathom_run::evidence::{Bare, Evidence, Held, Layer, Processors, ThreadRole};
use fathom_run::{Better, Measure, Series, Unit};
use serde_json::Value;

use self::fio::Reads;

use super::{Context, Experiment, Kind, Need, Parameter, Session, Settings, Yield};
use crate::bed::{DISK, GuestBed, image};
use crate::error::{Context as _, Error, Result};
use crate::evidence::{self, Sampler};
use crate::guest::Guest;
use crate::machine::{Aio, Machine};
use crate::scratch::Scratch;
use crate::server::{self, Spec};
use crate::tracers::fathom::Control;
use crate::workload::{self, Limit};

/// In a cell's folder: what the server printed at its end (Fathom's times by stage).
const SERVER_LOG: &str = "server.txt";

pub struct Seqread;

const PARAMETERS: &[Parameter] = &[
    Parameter::new(
        "disk",
        "Who serves the disk",
        Kind::of::<server::Kind>("fathom, qemu, qemu-main, qemu-mapped, qsd, socket:PATH"),
        "fathom",
    ),
    Parameter::new(
        "aio",
        "How the server reads and writes the image",
        Kind::of::<Aio>("io_uring, native, threads"),
        "io_uring",
    ),
    Parameter::new(
        "size",
        "Size of the image that is made for the run",
        Kind::Size {
            least: 1 << 20,
            most: 1 << 40,
        },
        "1G",
    ),
    Parameter::new(
        "image",
        "Read this raw image instead of making one",
        Kind::Text,
        "",
    ),
    Parameter::new(
        "runtime",
        "How long to read",
        Kind::Time {
            least: Duration::from_secs(1),
            most: Duration::from_secs(3600),
        },
        "10s",
    ),
    Parameter::new(
        "serve",
        "More options for `fathom serve`, such as --serve=--poll=off",
        Kind::List,
        "",
    ),
];

impl Experiment for Seqread {
    fn name(&self) -> &'static str {
        "seqread"
    }

    fn about(&self) -> &'static str {
        "4k sequential reads with O_DIRECT, one at a time: the cost of every layer"
    }

    fn description(&self) -> &'static str {
        "A guest reads its disk with fio: 4 KiB at a time, past the page cache, one request after \
         the other. Nothing overlaps, so that a request's latency is the sum of what every layer \
         costs, and IOPS are its inverse.\n\nThe figures are fio's in the guest. Fathom's own times, \
         stage by stage, are in `server.txt` of the cell's folder: what lies between the two is \
         the guest's, KVM's and QEMU's. `wiki` follows each request through all of them.\n\nWithout \
         hardware virtualisation the guest is emulated: its times are stretched."
    }

    fn parameters(&self) -> &'static [Parameter] {
        PARAMETERS
    }

    fn check(&self, settings: &Settings) -> Result<()> {
        let cell = Cell::new(settings)?;
        cell.disk
            .check(&cell.spec(Path::new(""), Path::new(""), Path::new("")))
    }

    fn needs(&self, _settings: &Settings) -> Result<Vec<Need>> {
        Ok(vec![
            Need::Qemu(6, 0),
            Need::Kernel,
            Need::Program("busybox"),
            Need::Program("fio"),
        ])
    }

    fn estimate(&self, settings: &Settings) -> Duration {
        const AROUND: Duration = Duration::from_secs(20);
        let runtime = settings.time("runtime").ok().flatten();
        AROUND + runtime.unwrap_or_default()
    }

    fn begin(&self, context: &Context) -> Box<dyn Session> {
        Box::new(Reading {
            fathom: context.fathom.clone(),
        })
    }
}

struct Cell {
    disk: server::Kind,
    aio: Aio,
    size: u64,
    image: Option<PathBuf>,
    runtime: Duration,
    options: Vec<String>,
}

impl Cell {
    fn new(settings: &Settings) -> Result<Cell> {
        let image = Some(settings.text("image")).filter(|path| !path.is_empty());
        Ok(Cell {
            disk: settings.word("disk")?,
            aio: settings.word("aio")?,
            size: Settings::needed("size", settings.size("size")?)?,
            image: image.map(PathBuf::from),
            runtime: Settings::needed("runtime", settings.time("runtime")?)?,
            options: settings.list("serve"),
        })
    }

    fn spec<'a>(&self, fathom: &'a Path, dir: &'a Path, image: &'a Path) -> Spec<'a> {
        Spec {
            fathom,
            dir,
            name: DISK,
            image,
            aio: self.aio,
            cache: "none",
            queues: 1,
            poll: true,
            options: self.options.clone(),
            properties: Vec::new(),
        }
    }
}

struct Reading {
    fathom: PathBuf,
}

impl Session for Reading {
    fn cell(
        &mut self,
        settings: &Settings,
        folder: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield> {
        let cell = Cell::new(settings)?;
        let dir = Scratch::on_disk()?;
        let image = match (&cell.image, &cell.disk) {
            (Some(path), _) => path.clone(),
            (None, server::Kind::Socket(_)) => PathBuf::new(), // its server has one
            (None, _) => {
                progress(&format!("writing an image of {} MiB", cell.size >> 20));
                let path = dir.path().join("disk.img");
                image::fill(&path, cell.size)?;
                path
            }
        };
        let spec = cell.spec(&self.fathom, dir.path(), &image);
        let mut bed = GuestBed::boot(Machine::default(), &cell.disk, &spec, progress)?;
        let seconds = cell.runtime.as_secs();
        progress(&format!("reading 4k blocks in the guest for {seconds} s"));
        let mut seen = measure(&mut bed, &cell, &image)?;
        // Of a disk that somebody else serves, the image is not known.
        if !image.as_os_str().is_empty() {
            progress("reading the image itself, on the host");
            seen.evidence.bare = Some(bare(&image, cell.runtime)?);
        }
        progress("powering the guest off");
        let said = bed.end()?;
        if !said.trim().is_empty() {
            let path = folder.join(SERVER_LOG);
            std::fs::write(&path, said).context(|| format!("cannot write {}", path.display()))?;
        }
        seen.measures.extend(evidence::measures(&seen.evidence));
        Ok(Yield {
            measures: seen.measures,
            series: seen.series,
            evidence: Some(seen.evidence),
            ..Yield::default()
        })
    }
}

/// What one window has shown.
struct Seen {
    measures: Vec<Measure>,
    series: Vec<Series>,
    evidence: Evidence,
}

fn measure(bed: &mut GuestBed, cell: &Cell, image: &Path) -> Result<Seen> {
    let is_fathom = cell.disk == server::Kind::Fathom;
    let mut control = match bed.server.as_ref().and_then(|server| server.control()) {
        Some(path) => Some(Control::connect(path)?),
        None => None,
    };
    let polled = |control: &mut Option<Control>| match control {
        Some(control) => control.polled_ns().map(Some),
        None => Ok(None),
    };
    let before = polled(&mut control)?;
    // Fathom polls unless it is told otherwise, and says for how long.
    let sampler = Sampler::start(bed.watch(image, is_fathom))?;
    let read = read(&mut bed.guest, &bed.device, cell.runtime);
    let (mut evidence, series) = sampler.stop();
    let (Reads { mut measures, load }, guest) = read?;
    let after = polled(&mut control)?;
    let workers = evidence.threads.iter_mut().filter(|one| one.polls);
    let mut workers: Vec<_> = workers.filter(|one| one.role == ThreadRole::Io).collect();
    if let ([worker], Some(before), Some(after)) = (workers.as_mut_slice(), before, after) {
        worker.polled = Some(after.saturating_sub(before) as f64 / 1e9);
    }
    if let Some(control) = &mut control {
        let stages = stages(&control.stats()?);
        evidence.layers = layers(&stages, load.mean_ns);
        evidence.filters.extend(held(&control.filters()?, &stages));
        measures.extend(stages);
    }
    (evidence.load, evidence.guest) = (load, guest);
    Ok(Seen {
        measures,
        series,
        evidence,
    })
}

fn read(guest: &mut Guest, device: &str, runtime: Duration) -> Result<(Reads, Option<Processors>)> {
    let seconds = runtime.as_secs().max(1);
    let script = evidence::guest::around(&format!(
        "fio --name=seqread --filename={device} --readonly --rw=read --bs=4k --direct=1 \
         --ioengine=psync --time_based --runtime={seconds} --output-format=json \
         --output=/tmp/fio.json >/tmp/fio.log 2>&1 || {{ cat /tmp/fio.log; exit 1; }}\n\
         cat /tmp/fio.json"
    ));
    let printed = guest.check(&script, Duration::from_secs(seconds + 120))?;
    let (text, processors) = evidence::guest::split(&printed);
    let reads = Reads::parse(&text);
    let reads = reads.ok_or_else(|| Error::Protocol(format!("not fio's report: {text}")))?;
    Ok((reads, processors))
}

/// The same on the host: for a part of the time, since nothing of it can be in a cache.
fn bare(image: &Path, runtime: Duration) -> Result<Bare> {
    let time = (runtime / 5).clamp(Duration::from_millis(200), Duration::from_secs(10));
    let options = workload::Options::new(image).with_limit(Limit::Time(time));
    let outcome = workload::run(&options)?.benchmark;
    let seconds = outcome.wall_ns as f64 / 1e9;
    let rate = outcome.operations as f64 / seconds.max(1e-9);
    Ok(Bare {
        requests_per_second: rate,
        bytes_per_second: rate * options.block_size as f64,
        mean_ns: outcome.mean_ns,
    })
}

/// What filters held back, which is the stage `queue`. Of several only the sum is known.
fn held(filters: &[String], stages: &[Measure]) -> Option<Held> {
    let queue = stages.iter().find(|one| one.name == "fathom.queue.mean")?;
    (!filters.is_empty()).then(|| Held {
        filter: filters.join(" and "),
        requests: queue.samples,
        mean_ns: queue.value,
    })
}

/// Where a read's time goes: Fathom's stages, and all that is around them.
fn layers(stages: &[Measure], mean_ns: f64) -> Vec<Layer> {
    let mean = |name: &str| {
        let name = format!("fathom.{name}.mean");
        stages
            .iter()
            .find(|one| one.name == name)
            .map(|one| one.value)
    };
    let Some(total) = mean("total") else {
        return Vec::new();
    };
    let layer = |name: &str, mean_ns: f64| Layer {
        name: name.to_owned(),
        mean_ns,
    };
    let mut layers = vec![layer("guest, KVM and QEMU", (mean_ns - total).max(0.0))];
    let stages = ["wake", "queue", "map", "device", "finish", "notify"];
    let told = stages.iter().filter_map(|name| Some((name, mean(name)?)));
    layers.extend(told.map(|(name, mean)| match *name {
        "device" => layer("host: device", mean),
        name => layer(&format!("fathom: {name}"), mean),
    }));
    layers
}

/// Fathom's mean times of reads, stage by stage.
fn stages(stats: &Value) -> Vec<Measure> {
    let operations = stats["operations"].as_array().into_iter().flatten();
    let reads = operations.filter(|operation| operation["op"] == "read");
    let stages = reads
        .filter_map(|reads| reads["stages"].as_array())
        .flatten();
    let measure = |stage: &Value| {
        let name = format!("fathom.{}.mean", stage["stage"].as_str()?);
        let mean = stage["mean_ns"].as_f64()?;
        let measure = Measure::new(name, Unit::Nanoseconds, mean, Better::Lower);
        Some(measure.of(stage["count"].as_u64()?))
    };
    stages.filter_map(measure).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn stages_of_reads_are_measures() {
        let stage = |name, mean| json!({"stage": name, "count": 7, "mean_ns": mean});
        let stats = json!({"operations": [
            {"op": "write", "stages": [stage("device", 9.0)]},
            {"op": "read", "stages": [stage("wake", 3.5), stage("device", 8.0)]},
        ]});
        let measures = stages(&stats);
        let said: Vec<_> = measures
            .iter()
            .map(|m| (m.name.as_str(), m.value, m.samples))
            .collect();
        assert_eq!(
            said,
            [("fathom.wake.mean", 3.5, 7), ("fathom.device.mean", 8.0, 7)]
        );
    }

    #[test]
    fn what_does_not_go_together_is_said() {
        let settings = Settings::defaults(PARAMETERS);
        Seqread.check(&settings).unwrap();
        let refused = settings.with("disk", "qsd").with("serve", "--poll=off");
        let error = Seqread.check(&refused).unwrap_err().to_string();
        assert!(error.contains("not with --disk qsd"), "{error}");
    }
}
