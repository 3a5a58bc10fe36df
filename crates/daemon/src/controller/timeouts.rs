//! Timeouts of requests.

use fathom_control::ErrorKind;
use fathom_requests::Responder;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A responder, until it is used.
type Slot = Arc<Mutex<Option<Responder>>>;

struct Timeout {
    responder: Slot,
    until: Instant,
    /// The error after the timeout.
    text: String,
}

#[derive(Default)]
pub struct Timeouts(Vec<Timeout>);

impl Timeouts {
    /// Returns a responder that passes the reply on to `responder`. If no reply has arrived at
    /// `until`, `responder` gets the error `text` instead.
    pub fn until(&mut self, until: Instant, text: String, responder: Responder) -> Responder {
        let slot: Slot = Arc::new(Mutex::new(Some(responder)));
        let responder = slot.clone();
        self.0.push(Timeout {
            responder,
            until,
            text,
        });
        Box::new(move |answer| {
            if let Some(responder) = take(&slot) {
                responder(answer);
            }
        })
    }

    /// Time until the next timeout.
    pub fn next(&self) -> Option<Duration> {
        let first = self.0.iter().map(|one| one.until).min()?;
        Some(first.saturating_duration_since(Instant::now()))
    }

    /// Sends the errors of timeouts that have passed.
    pub fn expire(&mut self) {
        let now = Instant::now();
        self.0.retain(|one| {
            if one.until <= now
                && let Some(responder) = take(&one.responder)
            {
                tracing::warn!("{}", one.text);
                responder(Err(ErrorKind::Late.because(one.text.clone())));
            }
            one.responder.lock().is_some()
        });
    }
}

fn take(slot: &Slot) -> Option<Responder> {
    slot.lock().take()
}
