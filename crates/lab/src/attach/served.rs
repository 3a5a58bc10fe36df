//! Records a disk of a Fathom server, with any client: `fathom breakdown --server`.

use fathom_units::cause;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fathom_run::{Disk, Run, RunKind};

use super::image::{Located, extents_since, locate};
use super::process::server_threads;
use super::window::{refuse_to_overwrite, take, trace_clock};
use crate::environment;
use crate::error::Result;
use crate::tracers::fathom::{self, Api, Info};
use crate::tracers::ftrace::Mode;
use crate::tracers::{Collector, Tracefs, block};

/// Options of the recording.
pub struct Served<'a> {
    /// The disk on its server.
    pub api: Api,
    /// Length of the recording.
    pub window: Duration,
    /// The run directory to create.
    pub output: &'a Path,
    /// The caller sets this flag to end the recording early. The events until then stay usable.
    pub stop: &'a AtomicBool,
}

const LAYERS: &str = "layers";
const KIB_PER_CPU: u32 = 16 << 10;

/// Records the disk's requests, and the host's block layer if this user may trace it.
///
/// # Errors
/// When the server does not respond or cannot trace, or the directory cannot be written.
pub fn record_served(served: Served, say: &mut dyn FnMut(&str)) -> Result<Run> {
    refuse_to_overwrite(served.output)?;
    let info = served.api.info()?;
    let mut problems = Vec::new();
    let image = Path::new(&info.disk);
    let located = match image.is_absolute().then(|| locate(image)) {
        Some(Ok(located)) => located,
        Some(Err(error)) => {
            problems.push(error.to_string());
            Located::default()
        }
        None => Located::default(),
    };
    problems.extend(located.problems.iter().cloned());
    let mut collectors = below(&located, &mut problems);
    collectors.push(Box::new(fathom::start(served.api)?));
    say(&format!("{LAYERS}: {} s", served.window.as_secs_f32()));
    let folder = served.output.join(LAYERS);
    let mut taken = take(collectors, &folder, served.window, || {
        served.stop.load(Ordering::Relaxed)
    })?;
    taken.round.name = LAYERS.into();
    problems.append(&mut taken.problems);
    let is_flat = info.is_flat() && located.device.is_some();
    let extents = match is_flat.then(|| extents_since(image, &located.extents)) {
        Some(Ok(extents)) => extents,
        Some(Err(problem)) => {
            problems.push(format!("{}: {problem}", info.name));
            Vec::new()
        }
        None => Vec::new(),
    };
    let located = Located { extents, ..located };
    let run = run_of(&info, located, taken.round, problems);
    run.save(served.output)?;
    Ok(run)
}

/// Returns the collector of the device below the image, if there is one and this user may trace it.
fn below(located: &Located, problems: &mut Vec<String>) -> Vec<Box<dyn Collector>> {
    let Some(device) = &located.device else {
        return Vec::new();
    };
    let options = block::Options {
        dev: device.dev,
        partitions: &located.partitions,
        mode: Mode::Live {
            kib_per_cpu: KIB_PER_CPU,
        },
    };
    let started = Tracefs::open().and_then(|tracefs| block::start(&tracefs, &options));
    match started {
        Ok(collector) => vec![Box::new(collector)],
        Err(error) => {
            problems.push(format!("{}: {}", block::NAME, cause(error)));
            Vec::new()
        }
    }
}

fn run_of(info: &Info, located: Located, round: fathom_run::Round, problems: Vec<String>) -> Run {
    let image = Path::new(&info.disk);
    let disk = Disk {
        name: info.name.clone(),
        under_test: true,
        device: "fathom".into(),
        image: image.is_absolute().then(|| image.to_owned()),
        server_pid: Some(info.pid),
        identified_by: Some("server".into()),
        host: located.device,
        extents: located.extents,
        ..Disk::default()
    };
    let cache = info.cache.as_ref();
    let title = format!(
        "disk {} of server {} ({}{})",
        info.name,
        info.pid,
        info.engine,
        cache.map_or(String::new(), |cache| format!(", cache={cache}"))
    );
    let rounds = vec![round];
    Run {
        environment: environment::here(trace_clock(&rounds)),
        disks: vec![disk],
        threads: server_threads(info.pid),
        rounds,
        problems,
        ..Run::new(RunKind::Host, title)
    }
}
