//! Those who look. All who want the same interval share a sampler, which goes when they do.

use super::sample::Sample;
use super::sampler::Sampler;
use crate::{Measures, ProcessInfo};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::broadcast::{Receiver, Sender, WeakSender, channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::{MissedTickBehavior, interval_at};

/// Who listen at the same time.
const LISTENERS: usize = 16;
/// Different intervals of theirs: each measures all disks.
const SAMPLERS: usize = 4;
/// Samples that a listener may be late by, before it loses the oldest.
const KEPT: usize = 2;

/// There are as many listeners as there may be: one line for the user.
#[derive(Debug)]
pub struct Full(pub String);

/// A sample, and the line that tells it, which all listeners have in common.
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

    /// With one of its disks only, or without any if it is not there.
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

/// One of those who look; no longer when dropped.
pub struct Listener {
    told: Receiver<Arc<Told>>,
    _place: OwnedSemaphorePermit,
}

impl Listener {
    /// The next sample that is not lost; None: there is none any more.
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

/// All of them.
#[derive(Clone)]
pub struct Listeners {
    places: Arc<Semaphore>,
    samplers: Arc<Mutex<BTreeMap<Duration, Running>>>,
}

/// A sampler, which has the one that keeps listeners waiting: they hear of its end.
struct Running {
    to: WeakSender<Arc<Told>>,
    task: AbortHandle,
}

impl Running {
    /// None: nobody listens, or it has ended.
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
    /// Listen to what comes every `interval`. `measure` is how all disks are asked; None says that nothing will come any more.
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
        let mut samplers = self.samplers.lock().unwrap_or_else(PoisonError::into_inner);
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

/// Measures as long as somebody listens.
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
        // On a thread of its own, for this one has other clients.
        let taken = tokio::task::spawn_blocking(move || {
            let told = take(&mut sampler, measured, at);
            (sampler, told)
        });
        let Ok((back, told)) = taken.await else {
            return;
        };
        sampler = back;
        if let Some(told) = told {
            // They may have gone just now.
            let _ = to.send(Arc::new(told));
        }
    }
}

fn take(sampler: &mut Sampler, measured: Measures, at: Instant) -> Option<Told> {
    let sample = sampler.take(measured.read(), ProcessInfo::own(), at);
    sample.map(Told::new)
}
