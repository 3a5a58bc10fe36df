//! Runs a function concurrently on all workers, and supervises them.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::control::{Control, Phase, Seat};
use crate::error::{Error, Result};
use crate::run::Progress;

/// Maximum time between two checks of the workers.
const TICK: Duration = Duration::from_millis(10);
/// Interval between two calls of the progress function.
const PROGRESS: Duration = Duration::from_millis(500);

/// A worker's connection to the supervising thread.
#[derive(Clone, Copy, Debug)]
pub struct Watched<'a> {
    control: &'a Control,
    seat: &'a Seat,
}

impl Watched<'_> {
    /// Publishes the number of completed operations. Returns whether the worker should continue.
    ///
    /// # Errors
    /// [`Error::Aborted`] if another worker has failed.
    #[inline]
    pub fn goes_on(&self, completed: u64) -> Result<bool> {
        self.seat.publish(completed, 1);
        match self.control.phase() {
            Phase::Ramp | Phase::Measure => Ok(true),
            Phase::Stop => Ok(false),
            Phase::Abort => Err(Error::Aborted),
        }
    }
}

/// The supervising thread.
pub struct WorkerGroup<'a> {
    stop: &'a AtomicBool,
    progress: &'a mut dyn FnMut(&Progress),
}

impl<'a> WorkerGroup<'a> {
    /// Creates a supervisor. `stop` ends ramp and measurement early.
    pub fn new(stop: &'a AtomicBool, progress: &'a mut dyn FnMut(&Progress)) -> WorkerGroup<'a> {
        WorkerGroup { stop, progress }
    }

    /// Runs `work` on each of the workers, each in its own thread, for at most `time`. `phase` is
    /// passed to the progress function.
    ///
    /// # Errors
    /// The first error of a worker. The other workers are stopped after it.
    pub fn work<W: Send>(
        &mut self,
        phase: Phase,
        time: Option<Duration>,
        workers: &mut [W],
        work: fn(&mut W, Watched<'_>) -> Result<()>,
    ) -> Result<()> {
        let control = Control::new(workers.len() as u16);
        let cause = OnceLock::new();
        thread::scope(|scope| {
            let (control, cause) = (&control, &cause);
            for (worker, seat) in workers.iter_mut().zip(control.seats()) {
                scope.spawn(move || {
                    let _finish = seat.finish_on_drop();
                    if let Err(e) = work(worker, Watched { control, seat }) {
                        if !matches!(e, Error::Aborted) {
                            let _ = cause.set(e);
                        }
                        control.set_phase(Phase::Abort);
                    }
                });
            }
            self.watch(phase, time, control);
        });
        cause.into_inner().map_or(Ok(()), Err)
    }

    fn watch(&mut self, phase: Phase, time: Option<Duration>, control: &Control) {
        let start = Instant::now();
        let mut shown = (0, start);
        while !control.all_finished() {
            let elapsed = start.elapsed();
            let is_over = time.is_some_and(|time| elapsed >= time);
            // `stop` does not end the verification, so that an interrupted measurement is also
            // verified.
            let stops = phase != Phase::Stop && self.stop.load(Ordering::Relaxed);
            if is_over || stops {
                control.set_phase(Phase::Stop);
            }
            let since = shown.1.elapsed();
            if since >= PROGRESS {
                let completed = control.completed();
                (self.progress)(&Progress {
                    phase,
                    elapsed,
                    total: time,
                    completed,
                    iops: (completed - shown.0) as f64 / since.as_secs_f64(),
                });
                shown = (completed, Instant::now());
            }
            let rest = time.map_or(TICK, |time| time.saturating_sub(elapsed));
            thread::sleep(rest.clamp(Duration::from_millis(1), TICK));
        }
    }
}
