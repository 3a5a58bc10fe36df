//! Which disks are getting other sizes, and who waits for it.

use crate::answer::{Asker, Kind, Refusal};
use std::time::{Duration, Instant};

struct Resizing {
    /// The disk's.
    name: String,
    /// Who wants to hear of it, and until when he waits.
    waiting: Option<(Asker, Instant)>,
}

/// All of a daemon.
#[derive(Default)]
pub struct Resizings(Vec<Resizing>);

impl Resizings {
    pub fn begin(&mut self, name: String, asker: Asker, patience: Duration) {
        self.0.push(Resizing {
            name,
            waiting: Some((asker, Instant::now() + patience)),
        });
    }

    /// Why nothing else can be done with that disk now.
    pub fn in_the_way(&self, name: &str) -> Option<Refusal> {
        let is_one = self.0.iter().any(|one| one.name == name);
        let text = || format!("disk '{name}' is just getting another size");
        is_one.then(|| Kind::Conflict.because(text()))
    }

    /// Until somebody has waited for too long.
    pub fn patience(&self) -> Option<Duration> {
        let waiting = self.0.iter().filter_map(|one| one.waiting.as_ref());
        let first = waiting.map(|(_, until)| *until).min()?;
        Some(first.saturating_duration_since(Instant::now()))
    }

    /// Tells those who have.
    pub fn tell_late(&mut self) {
        let now = Instant::now();
        for one in &mut self.0 {
            if let Some((asker, _)) = one.waiting.take_if(|(_, until)| *until <= now) {
                let name = &one.name;
                let text = format!("disk '{name}' takes long to get another size, and goes on");
                asker(Err(Kind::Late.because(text)));
            }
        }
    }

    /// It is over; who has waited for it until now.
    pub fn end(&mut self, name: &str) -> Option<Asker> {
        let index = self.0.iter().position(|one| one.name == name)?;
        let (asker, _) = self.0.swap_remove(index).waiting?;
        Some(asker)
    }
}
