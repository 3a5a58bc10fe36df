//! Clients of live numbers. Clients with the same interval share a sampler, which ends with them.

use super::sample::Sample;
use super::sampler::Sampler;
use crate::{Measures, ProcessInfo};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::broadcast::{Receiver, Sender, WeakSender, channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::{MissedTickBehavior, interval_at};

/// Maximum number of listeners at the same time.
const LISTENERS: usize = 16;
/// Maximum number of different intervals, each of which measures all disks.
const SAMPLERS: usize = 4;
/// Number of samples buffered for a listener, before it loses the oldest.
const KEPT: usize = 2;

/// The error if a limit is reached: one line for the user.
#[derive(Debug)]
pub struct Full(pub String);

/// A sample with its line of text, which all listeners share.
#[derive(Debug)]
pub struct Told {
    pub sample: Sample,
    pub line: String,
}

impl Told {
    fn new(sample: Sample) -> Told {
        let line = line_of(&sample);
        Told { sample, line }
    }

    /// Returns the line with only the named disk, or without any disk if it does not exist.
    pub fn line_with(&self, disk: &str) -> String {
        let disks = self.sample.disks.iter().filter(|one| one.name == disk);
        line_of(&Sample {
            disks: disks.cloned().collect(),
            version: self.sample.version.clone(),
            ..self.sample
        })
    }
}

fn line_of(sample: &Sample) -> String {
    let text = serde_json::to_string(sample);
    text.map_or_else(|_| String::new(), |text| text + "\n")
}

/// A listener, which ends when it is dropped.
pub struct Listener {
    told: Receiver<Arc<Told>>,
    _place: OwnedSemaphorePermit,
}

impl Listener {
    /// Waits for the next sample, skipping lost ones. Returns `None` if none will follow.
    pub async fn next(&mut self) -> Option<Arc<Told>> {
        use tokio::sync::broadcast::error::RecvError;
        loop {
            match self.told.recv().await {
                Ok(told) => return Some(told),
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return None,
            }
        }
    }
}

/// All listeners.
#[derive(Clone)]
pub struct Listeners {
    places: Arc<Semaphore>,
    samplers: Arc<Mutex<BTreeMap<Duration, Running>>>,
}

/// A running sampler, whose task holds the sender: listeners notice when it ends.
struct Running {
    to: WeakSender<Arc<Told>>,
    task: AbortHandle,
}

impl Running {
    /// Returns the sender, or `None` if no client listens or the sampler has ended.
    fn heard(&self) -> Option<Sender<Arc<Told>>> {
        self.to.upgrade().filter(|to| to.receiver_count() > 0)
    }
}

impl Default for Listeners {
    fn default() -> Listeners {
        Listeners {
            places: Arc::new(Semaphore::new(LISTENERS)),
            samplers: Arc::default(),
        }
    }
}

impl Listeners {
    /// Subscribes to samples with this interval.
    ///
    /// `measure` measures all disks; it returns `None` if no more samples will follow.
    pub fn listen<F>(
        &self,
        interval: Duration,
        measure: impl Fn() -> F + Send + 'static,
    ) -> Result<Listener, Full>
    where
        F: Future<Output = Option<Measures>> + Send + 'static,
    {
        let place = self.places.clone().try_acquire_owned();
        let place = place.map_err(|_| {
            Full(format!(
                "{LISTENERS} other clients read live numbers, which is the limit; end one of them"
            ))
        })?;
        let mut samplers = self.samplers.lock();
        samplers.retain(|_, sampler| {
            let is_heard = sampler.heard().is_some();
            if !is_heard {
                sampler.task.abort();
            }
            is_heard
        });
        if let Some(to) = samplers.get(&interval).and_then(Running::heard) {
            let told = to.subscribe();
            return Ok(Listener {
                told,
                _place: place,
            });
        }
        if samplers.len() == SAMPLERS {
            let known = samplers.keys().map(|interval| format!("{interval:?}"));
            let known = known.collect::<Vec<_>>().join(", ");
            let text = format!(
                "other clients read live numbers with {SAMPLERS} different intervals, which is \
                 the limit; choose one of {known}"
            );
            return Err(Full(text));
        }
        let (to, told) = channel(KEPT);
        let weak = to.downgrade();
        let task = tokio::spawn(sample(interval, measure, to)).abort_handle();
        samplers.insert(interval, Running { to: weak, task });
        Ok(Listener {
            told,
            _place: place,
        })
    }
}

/// Measures at each interval while a client listens.
async fn sample<F>(interval: Duration, measure: impl Fn() -> F, to: Sender<Arc<Told>>)
where
    F: Future<Output = Option<Measures>>,
{
    let mut ticks = interval_at(tokio::time::Instant::now(), interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut sampler = Sampler::default();
    loop {
        ticks.tick().await;
        if to.receiver_count() == 0 {
            return;
        }
        let Some(measured) = measure().await else {
            return;
        };
        let at = Instant::now();
        // Processing runs on a separate thread, because this one serves other clients.
        let taken = tokio::task::spawn_blocking(move || {
            let told = take(&mut sampler, measured, at);
            (sampler, told)
        });
        let Ok((back, told)) = taken.await else {
            return;
        };
        sampler = back;
        if let Some(told) = told {
            // The listeners may have left just now.
            let _ = to.send(Arc::new(told));
        }
    }
}

fn take(sampler: &mut Sampler, measured: Measures, at: Instant) -> Option<Told> {
    let sample = sampler.take(measured.read(), ProcessInfo::own(), at);
    sample.map(Told::new)
}
