//! Disks that get other sizes.

use super::Objects;
use crate::answer::{Asker, Kind, Refusal};
use crate::objects::changes;
use fathom_core::DiskError;
use serde_json::json;
use std::time::{Duration, Instant};

struct Resizing {
    /// The disk's.
    name: String,
    /// Who wants to hear of it, and until when he waits.
    waiting: Option<(Asker, Instant)>,
}

/// All of a daemon.
#[derive(Default)]
pub(super) struct Resizings(Vec<Resizing>);

impl Resizings {
    /// Why nothing else can be done with that disk now.
    pub(super) fn in_the_way(&self, name: &str) -> Option<Refusal> {
        let is_one = self.0.iter().any(|one| one.name == name);
        let text = || format!("disk '{name}' is just getting another size");
        is_one.then(|| Kind::Conflict.because(text()))
    }

    /// Until somebody has waited for too long.
    pub(super) fn patience(&self) -> Option<Duration> {
        let waiting = self.0.iter().filter_map(|one| one.waiting.as_ref());
        let first = waiting.map(|(_, until)| *until).min()?;
        Some(first.saturating_duration_since(Instant::now()))
    }

    /// Tells those who have.
    pub(super) fn tell_late(&mut self) {
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
    fn end(&mut self, name: &str) -> Option<Asker> {
        let index = self.0.iter().position(|one| one.name == name)?;
        let (asker, _) = self.0.swap_remove(index).waiting?;
        Some(asker)
    }
}

impl Objects {
    pub(super) fn resize(&mut self, index: usize, size: Option<u64>, shrink: bool, asker: Asker) {
        let disk = &self.disks[index];
        let name = disk.name().to_owned();
        if let Some(refusal) = self.resizing.in_the_way(&name) {
            return asker(Err(refusal));
        }
        if let Err(error) = changes::resize(disk, size, shrink, self.mail.post()) {
            let text = format!("cannot start a thread: {error}");
            return asker(Err(Kind::Failed.because(text)));
        }
        let until = Instant::now() + self.stop_timeout.0;
        self.resizing.0.push(Resizing {
            name,
            waiting: Some((asker, until)),
        });
    }

    pub(super) fn take_in_resized(&mut self, name: &str, resized: Result<u64, DiskError>) {
        let disk = self.disks.iter_mut().find(|disk| disk.name() == name);
        if let Some(disk) = disk {
            disk.resized();
        }
        if let Err(error) = &resized {
            tracing::warn!("disk '{name}' cannot be resized: {error}");
        }
        if let Some(asker) = self.resizing.end(name) {
            let answer = resized.map(|size| json!({ "size": size }));
            asker(answer.map_err(|error| Kind::Failed.because(error.to_string())));
        }
    }
}
