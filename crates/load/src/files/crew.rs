//! Lets all workers do one thing at the same time, and watches over them.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::control::{Control, Phase, Seat};
use crate::error::{Error, Result};
use crate::run::Progress;

/// Longest time without a look at the workers.
const TICK: Duration = Duration::from_millis(10);
/// Between two calls of the progress function.
const PROGRESS: Duration = Duration::from_millis(500);

/// What a worker sees of the others.
#[derive(Clone, Copy, Debug)]
pub struct Watched<'a> {
    control: &'a Control,
    seat: &'a Seat,
}

impl Watched<'_> {
    /// So many operations are done: whether to go on.
    ///
    /// # Errors
    /// When another worker has failed.
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
pub struct Crew<'a> {
    stop: &'a AtomicBool,
    progress: &'a mut dyn FnMut(&Progress),
}

impl<'a> Crew<'a> {
    /// `stop` ends ramp and measurement early.
    pub fn new(stop: &'a AtomicBool, progress: &'a mut dyn FnMut(&Progress)) -> Crew<'a> {
        Crew { stop, progress }
    }

    /// Runs `work` with each of the workers, on a thread each, for `time` at most. `phase` is what
    /// the progress function is told.
    ///
    /// # Errors
    /// The first error of a worker; the others end, too, then.
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
            // What was measured is verified also when it was stopped.
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
