//! Runs work in an instance and collects evidence about it.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use super::{Body, Instance};
use crate::bed::{Job, Seen};
use crate::error::Result;
use crate::evidence::{self, Kind, Newcomers, Sampler, Watch, Watched};
use crate::process_tree;

/// Command name of a QEMU that the lab has not started itself; the kernel truncates it to 15 bytes.
const QEMU: &str = "qemu-system-x86";

impl Instance {
    /// Returns what to watch from outside while the instance works. For a container, user-mode
    /// Linux or this machine itself, these are the processes so far; each script starts new ones.
    pub fn watch(&mut self) -> Watch {
        let device = evidence::device_below(&self.image).unwrap_or_default();
        let processes = match &mut self.body {
            Body::Guest(bed) => bed.watch().processes,
            Body::Bare(_) | Body::Uml(_) | Body::Container(_) => {
                { process_tree::below(self.pid()).into_iter() }
                    .map(|pid| Watched::new(pid, Kind::Load))
                    .collect()
            }
            Body::Libguestfs(_) => { process_tree::named(self.pid(), QEMU).into_iter() }
                .map(|pid| Watched::new(pid, Kind::Qemu))
                .collect(),
        };
        Watch {
            processes,
            device,
            ..Watch::default()
        }
    }

    /// Does some work. Outside of a virtual machine, a script has its own processes on this
    /// machine, which are the load. Each new process is reported to `newcomers` as soon as it is
    /// seen.
    pub fn watched<T>(&mut self, newcomers: Newcomers, work: impl FnOnce(&mut Instance) -> T) -> T {
        const POLL: Duration = Duration::from_millis(10);
        if matches!(self.body, Body::Guest(_) | Body::Libguestfs(_)) {
            return work(self);
        }
        let pid = self.pid();
        let (done, is_done) = mpsc::channel::<()>();
        // Listed before the work starts processes.
        let mut known = process_tree::below(pid);
        thread::scope(|scope| {
            scope.spawn(move || {
                while is_done.recv_timeout(POLL) == Err(RecvTimeoutError::Timeout) {
                    for pid in process_tree::below(pid) {
                        if known.insert(pid) {
                            newcomers.watch(Watched::new(pid, Kind::Load));
                        }
                    }
                }
            });
            let result = work(self);
            drop(done);
            result
        })
    }

    /// Runs a load in the instance and meanwhile samples its processes and the device below its
    /// image.
    ///
    /// # Errors
    /// When the script fails, or its output cannot be parsed.
    pub fn measure(&mut self, job: &Job) -> Result<Seen> {
        if let Body::Guest(bed) = &mut self.body {
            return bed.measure(job);
        }
        let sampler = Sampler::start(self.watch())?;
        let newcomers = sampler.newcomers();
        let printed = self.watched(newcomers, |own| own.printed(job.script, job.timeout));
        let (mut evidence, series) = sampler.stop();
        let worked = (job.parse)(&printed?)?;
        evidence.load = worked.load;
        Ok(Seen {
            measures: worked.measures,
            series,
            evidence,
        })
    }
}
