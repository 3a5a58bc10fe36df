//! Who waits for something that may take long, and for how long he does.

use crate::reply::Asker;
use fathom_control::ErrorKind;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Who is told, once.
type Place = Arc<Mutex<Option<Asker>>>;

struct One {
    asker: Place,
    until: Instant,
    /// What he is told then.
    text: String,
}

#[derive(Default)]
pub struct Waiting(Vec<One>);

impl Waiting {
    /// Who takes the answer to `asker`, unless that comes too late: he was told `text` by then.
    pub fn until(&mut self, until: Instant, text: String, asker: Asker) -> Asker {
        let place: Place = Arc::new(Mutex::new(Some(asker)));
        let asker = place.clone();
        self.0.push(One { asker, until, text });
        Box::new(move |answer| {
            if let Some(asker) = take(&place) {
                asker(answer);
            }
        })
    }

    /// Until somebody has waited for too long.
    pub fn patience(&self) -> Option<Duration> {
        let first = self.0.iter().map(|one| one.until).min()?;
        Some(first.saturating_duration_since(Instant::now()))
    }

    /// Tells those who have.
    pub fn tell_late(&mut self) {
        let now = Instant::now();
        self.0.retain(|one| {
            if one.until <= now
                && let Some(asker) = take(&one.asker)
            {
                tracing::warn!("{}", one.text);
                asker(Err(ErrorKind::Late.because(one.text.clone())));
            }
            one.asker
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .is_some()
        });
    }
}

fn take(place: &Place) -> Option<Asker> {
    place.lock().unwrap_or_else(PoisonError::into_inner).take()
}
