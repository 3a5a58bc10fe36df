//! Sequential O_DIRECT reads in the guest, one request at a time. No requests overlap, so that the
//! results show the cost of every layer.

use std::path::{Path, PathBuf};
use std::time::Duration;

use fathom_run::evidence::Bare;

use super::{Context, Experiment, Kind, Need, Parameter, Session, Settings, Yield, shared};
use crate::bed::{DISK, GuestBed, Job, image};
use crate::error::Result;
use crate::machine::{Aio, Machine};
use crate::scratch::Scratch;
use crate::server::{self, Spec};
use crate::work::{AROUND_FIO, Shape, Worked, fio_script};
use crate::workload::{self, Limit};

pub struct Seqread;

const PARAMETERS: &[Parameter] = &[
    shared::DISK,
    shared::aio("io_uring"),
    shared::image_size("1G"),
    Parameter::new(
        "image",
        "Raw image to read [default: a new one]",
        Kind::Text,
        "",
    ),
    shared::RUNTIME,
    shared::SERVE,
];

impl Experiment for Seqread {
    fn name(&self) -> &'static str {
        "seqread"
    }

    fn about(&self) -> &'static str {
        "Cost of every layer: 4k sequential O_DIRECT reads, one at a time"
    }

    fn description(&self) -> &'static str {
        "fio in a guest reads the disk: 4 KiB at a time with O_DIRECT, one request after \
         the other. No requests overlap. Therefore a request's latency is the sum of all \
         layers, and IOPS is the inverse of the latency.\n\n\
         The figures are those of fio in the guest. Fathom's own times by stage are in \
         `server.txt` of the cell's folder. The difference between the two is the time of \
         the guest's kernel, KVM and QEMU. The experiment `wiki` follows each request \
         through these layers.\n\n\
         Without hardware virtualisation the guest is emulated, and all times are \
         stretched."
    }

    fn parameters(&self) -> &'static [Parameter] {
        PARAMETERS
    }

    fn check(&self, settings: &Settings) -> Result<()> {
        let cell = Cell::new(settings)?;
        cell.disk.check(&cell.spec())
    }

    fn needs(&self, _settings: &Settings) -> Result<Vec<Need>> {
        Ok([&Need::GUEST[..], &[Need::Program("fio")]].concat())
    }

    fn estimate(&self, settings: &Settings) -> Duration {
        const AROUND: Duration = Duration::from_secs(20);
        Cell::new(settings).map_or(AROUND, |cell| AROUND + cell.runtime)
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

    /// The disk, without its image.
    fn spec(&self) -> Spec<'static> {
        Spec {
            name: DISK,
            aio: self.aio,
            options: self.options.clone(),
            ..Spec::default()
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
            (None, server::Kind::Socket(_)) => PathBuf::new(), // the server has its own image
            (None, _) => {
                progress(&format!("writing an image of {} MiB", cell.size >> 20));
                let path = dir.path().join("disk.img");
                image::fill(&path, cell.size)?;
                path
            }
        };
        let spec = Spec {
            fathom: &self.fathom,
            dir: dir.path(),
            image: &image,
            ..cell.spec()
        };
        let mut bed = GuestBed::boot(Machine::default(), &cell.disk, &spec, progress)?;
        let seconds = cell.runtime.as_secs().max(1);
        progress(&format!("reading 4k blocks in the guest for {seconds} s"));
        let seen = bed.measure(&Job {
            script: &script(&bed.device, seconds),
            timeout: cell.runtime + AROUND_FIO,
            parse: &|text| Worked::of_fio(text, ONE),
        })?;
        let mut found = Yield::from(seen);
        // The image of a disk served by another program is not known.
        if !image.as_os_str().is_empty() {
            progress("reading the image itself, on the host");
            found.compare(bare(&image, cell.runtime)?);
        }
        progress("powering the guest off");
        bed.end_into(folder)?;
        Ok(found)
    }
}

/// A single thread with one request in flight.
const ONE: Shape = Shape {
    threads: 1,
    depth: 1,
};

fn script(device: &str, seconds: u64) -> String {
    fio_script(&format!(
        "--name=seqread --filename={device} --readonly --rw=read --bs=4k --direct=1 \
         --ioengine=psync --time_based --runtime={seconds} --group_reporting \
         --output-format=json"
    ))
}

/// Runs the same reads on the host. A part of the time is enough, because no cache is involved.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_go_together_is_said() {
        let settings = Settings::defaults(PARAMETERS);
        Seqread.check(&settings).unwrap();
        let refused = settings.with("disk", "qsd").with("serve", "--poll=off");
        let error = Seqread.check(&refused).unwrap_err().to_string();
        assert!(error.contains("not with --disk qsd"), "{error}");
    }
}
