//! Answers of several that are put together.

use crate::reply::{Answer, Reply, Responder};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// In the order in which they were asked: what is known, and whether it was answered.
type Places = Arc<Mutex<Vec<Place>>>;

type Place = (Option<Reply>, bool);

/// Takes what is known of all.
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

    /// The next one, who puts his answer in place of what was `known`; a error says nothing.
    pub fn place(&self, index: usize, known: Option<Reply>) -> Responder {
        let places = self.places.clone();
        lock(&places).push((known, false));
        Box::new(move |answer: Answer| {
            if let Some(place) = lock(&places).get_mut(index) {
                *place = (answer.ok().or_else(|| place.0.take()), true);
            }
        })
    }

    /// Whether that is over: all have answered, or have had their time.
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

fn lock(places: &Places) -> std::sync::MutexGuard<'_, Vec<Place>> {
    places.lock().unwrap_or_else(PoisonError::into_inner)
}
