//! Collects the replies of several tenants.

use fathom_requests::{Answer, Reply, Responder};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Instant;

/// For each disk, in order: the reply so far, and whether the tenant has replied.
type Places = Arc<Mutex<Vec<Place>>>;

type Place = (Option<Reply>, bool);

/// Takes the collected replies.
pub type Told = Box<dyn FnOnce(Vec<Reply>) + Send>;

pub struct Listing {
    told: Option<Told>,
    pub until: Instant,
    places: Places,
}

impl Listing {
    pub fn new(told: Told, until: Instant) -> Listing {
        Listing {
            told: Some(told),
            until,
            places: Places::default(),
        }
    }

    /// Returns the responder of the next disk. The disk's reply replaces the `known` reply; an
    /// error does not.
    pub fn place(&self, index: usize, known: Option<Reply>) -> Responder {
        let places = self.places.clone();
        lock(&places).push((known, false));
        Box::new(move |answer: Answer| {
            if let Some(place) = lock(&places).get_mut(index) {
                *place = (answer.ok().or_else(|| place.0.take()), true);
            }
        })
    }

    /// Passes the replies on if all tenants have replied, or at the timeout. Returns whether that
    /// is done.
    pub fn tell(&mut self, now: Instant) -> bool {
        let mut places = lock(&self.places);
        if now < self.until && !places.iter().all(|(_, is_answered)| *is_answered) {
            return false;
        }
        let known = places.iter_mut().filter_map(|(reply, _)| reply.take());
        if let Some(told) = self.told.take() {
            told(known.collect());
        }
        true
    }
}

fn lock(places: &Places) -> parking_lot::MutexGuard<'_, Vec<Place>> {
    places.lock()
}
