//! Load on a file or block device of this host.

pub mod aio;
pub mod buffers;
mod open;
mod page_cache;
pub mod psync;
pub mod status;
pub mod uring;

use std::io::{Seek, SeekFrom};
use std::sync::Arc;
use std::time::Duration;

use crate::control::Control;
use crate::cpu::ProcessCpu;
use crate::error::{Error, Result};
use crate::options::{Engine, File as FileOptions, Load, Options, SECTOR};
use crate::port::Port;
use crate::report::{Outcome, Report};
use crate::run::{self, Geometry, Progress, Supervisor};
use aio::Aio;
use psync::Psync;
use uring::Uring;

/// Runs the load.
pub fn run(
    options: &Options,
    target: &FileOptions,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Report> {
    let load = &options.load;
    let file = Arc::new(open::open(target, load)?);
    let mut end = &*file;
    let size = end.seek(SeekFrom::End(0)).map_err(|e| {
        Error::os(
            format!("asking for the size of {}", target.path.display()),
            e,
        )
    })?;
    let geometry = Geometry::new(load, size, SECTOR)?;
    open::refuse_data(&file, target, load, geometry)?;
    let outcome = match target.engine {
        Engine::IoUring => {
            let make = move || Uring::new(file, target, load);
            run_each(load, geometry, make, progress)
        }
        Engine::Aio => run_each(load, geometry, move || Aio::new(file, load), progress),
        Engine::Psync => run_each(load, geometry, move || Psync::new(file, load), progress),
    }?;
    Ok(Report::new(options, &outcome, None))
}

/// Runs one worker per queue, each with its own port.
fn run_each<P: Port>(
    load: &Load,
    geometry: Geometry,
    make: impl FnOnce() -> Result<P> + Send + Clone,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Outcome> {
    let ports = vec![make; load.queues.into()];
    run::run(load, geometry, ports, &mut Nobody, progress)
}

/// Supervisor for a load on a file, where the kernel completes the requests and there is no server
/// process.
struct Nobody;

impl Supervisor for Nobody {
    fn wait(&mut self, time: Duration, control: &Control) -> Result<bool> {
        let end = std::time::Instant::now() + time;
        while !control.all_finished() && std::time::Instant::now() < end {
            std::thread::sleep(time.min(Duration::from_millis(10)));
        }
        Ok(false)
    }

    fn wake(&self) {}

    fn backend_cpu(&self) -> Option<ProcessCpu> {
        None
    }

    fn diagnose(&self, _queue: usize, _completed: u64, _in_flight: u32) -> String {
        "the kernel has not answered".into()
    }
}
