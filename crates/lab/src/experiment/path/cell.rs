//! A cell: makes some requests and follows them.

use std::path::{Path, PathBuf};

use fathom_run::folded::{is_kernel, parts};
use fathom_run::{Better, Measure, RequestPath, Side, Stack, Unit};

use super::bed::Bed;
use super::record::Recorder;
use super::trace::Of;
use crate::bed::{DISK, image};
use crate::error::{Error, Result};
use crate::experiment::network::{self, Technology};
use crate::experiment::{Settings, Yield};
use crate::machine::Aio;
use crate::scratch::Scratch;
use crate::server;

/// Size of the image, in bytes.
const SIZE: u64 = 64 << 20;

pub struct Cell {
    pub technology: Technology,
    pub of: Of,
    disk: server::Kind,
    aio: Aio,
    net: network::Net,
    requests: u64,
}

impl Cell {
    pub fn new(settings: &Settings) -> Result<Cell> {
        Ok(Cell {
            technology: match settings.text("technology") {
                "" => Technology::machine(),
                _ => settings.word("technology")?,
            },
            of: settings.word("of")?,
            disk: settings.word("disk")?,
            aio: settings.word("aio")?,
            net: settings.word("net")?,
            requests: Settings::needed("requests", settings.count("requests")?)?,
        })
    }

    /// Checks the settings before anything is started.
    ///
    /// # Errors
    /// If values do not go together.
    pub fn check(&self) -> Result<()> {
        match self.of {
            Of::Packet => self.network()?.check(),
            Of::Block if matches!(self.disk, server::Kind::Socket(_)) => Err(Error::Protocol(
                "--disk socket:PATH: the disk of a server that runs already cannot be followed \
                 to its device"
                    .into(),
            )),
            Of::Block => self.disk.check(&self.spec()),
        }
    }

    /// Returns the settings of the experiment `network` with which the packets are sent.
    pub fn network_settings(&self) -> Settings {
        Settings::defaults(network::PARAMETERS)
            .with("technology", self.technology)
            .with("net", self.net)
    }

    fn network(&self) -> Result<network::Cell> {
        let cell = network::Cell::new(&self.network_settings())?;
        Ok(cell.with_profiler())
    }

    /// The disk, without its image.
    fn spec(&self) -> server::Spec<'static> {
        server::Spec {
            name: DISK,
            aio: self.aio,
            ..server::Spec::default()
        }
    }

    /// Makes the requests and follows them.
    pub fn run(
        &self,
        fathom: &Path,
        folder: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield> {
        let dir = Scratch::on_disk()?;
        let mut bed = match self.of {
            Of::Block => self.block(fathom, dir.path(), progress)?,
            Of::Packet => {
                progress(&format!("starting two sides ({})", self.technology));
                Bed::network(&self.network()?)?
            }
        };
        progress(&format!("following {} requests", self.requests));
        let recorder = Recorder::start(&mut bed, self.of, dir.path())?;
        let total = bed.work(self.requests);
        let recorder = recorder.stop(&mut bed)?;
        let total_ns = total?;
        progress("reading what perf has recorded");
        let (mut path, problems) = recorder.path(&mut bed)?;
        bed.end()?;
        path.total_ns = total_ns;
        self.expect_sides(&path)?;
        path.save(folder)?;
        Ok(Yield {
            measures: measures(&path),
            problems,
            ..Yield::default()
        })
    }

    fn block(&self, fathom: &Path, dir: &Path, progress: &mut dyn FnMut(&str)) -> Result<Bed> {
        progress(&format!("writing an image of {} MiB", SIZE >> 20));
        let image: PathBuf = dir.join("disk.img");
        image::fill(&image, SIZE)?;
        let spec = server::Spec {
            fathom,
            dir,
            image: &image,
            ..self.spec()
        };
        Bed::block(self.technology, (&self.disk, &spec), progress)
    }

    /// Fails unless each side has handed requests to a device; otherwise the path is incomplete.
    fn expect_sides(&self, path: &RequestPath) -> Result<()> {
        let is_guest = self.technology.accelerator().is_some();
        let sides = is_guest.then_some(Side::Guest).into_iter();
        for side in sides.chain([Side::Host]) {
            if !path.devices.iter().any(|one| one.side == side) {
                return Err(Error::Protocol(format!(
                    "no request was seen at a device of the {}: its device (of a file \
                     system in memory or on a network) reports none",
                    side.name()
                )));
            }
        }
        Ok(())
    }
}

fn measures(path: &RequestPath) -> Vec<Measure> {
    let lower = |name: String, unit, value| Measure::new(name, unit, value, Better::Lower);
    let ns = |name: String, ns: f64| lower(name, Unit::Nanoseconds, ns);
    let mut found = Vec::from_iter(path.total_ns.map(|total| ns("request".into(), total)));
    for side in Side::ALL {
        let Some(last) = path.devices.iter().rfind(|one| one.side == side) else {
            continue;
        };
        let name = |what: &str| format!("{}.{what}", side.name());
        let all = path.devices.iter().filter(|one| one.side == side);
        let frames = all.flat_map(|one| one.stacks.first()).map(kernel_frames);
        let frames = frames.max().unwrap_or(0);
        found.push(lower(name("frames"), Unit::Count, frames as f64).of(last.requests));
        let device = last.device_ns.map(|device| ns(name("device"), device));
        found.extend(device.map(|measure| measure.of(last.requests)));
        let between = path.between.iter().filter(|one| one.side == side);
        found.extend(between.map(|one| {
            let name = name(one.what.name());
            lower(name, Unit::PerRequest, one.per_request).of(last.requests)
        }));
    }
    found
}

fn kernel_frames(stack: &Stack) -> usize {
    let frames = stack.frames.iter();
    frames.filter(|frame| is_kernel(parts(frame).1)).count()
}
