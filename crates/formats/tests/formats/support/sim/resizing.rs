//! Resizes of disks while requests are in flight.

use super::case::Made;
use super::model::SECTOR;
use super::run::Run;
use super::worker::DEPTH;
use super::world::trace;
use fathom_core::{DiskError, Resize};

impl Run {
    /// Returns a random size, in sectors, that the disk may have.
    pub fn random_size(&mut self) -> u64 {
        let (now, room) = (self.sectors(), self.model.sectors());
        match self.rng.below(4) {
            0 => room - self.rng.below(8),
            1 => (now + self.rng.below(4 * self.cluster)).min(room),
            2 => now.saturating_sub(self.rng.below(4 * self.cluster)).max(64),
            _ => 64 + self.rng.below(room - 64),
        }
    }

    /// Resizes the disk `count` times to random sizes.
    pub fn resizes(&mut self, made: &Made, count: u64) {
        for _ in 0..count {
            let (now, sectors) = (self.sectors(), self.random_size());
            let outcome = self.resize(sectors);
            let refused = made.case.refuses(now, sectors);
            assert_eq!(outcome.is_err(), refused, "{now} to {sectors}: {outcome:?}");
        }
    }

    /// Resizes the disk to `sectors` sectors, with requests in flight. After an error, the size is
    /// unchanged.
    pub fn resize(&mut self, sectors: u64) -> Result<(), DiskError> {
        let ended = self.resize_for(sectors, u64::MAX);
        ended.map(|ended| assert!(ended))
    }

    /// Resizes the disk for at most `steps` steps. Returns false if the resize has not ended.
    pub fn resize_for(&mut self, sectors: u64, steps: u64) -> Result<bool, DiskError> {
        let before = self.sectors();
        let begun = self.world.tick();
        let resizing = self.disk.begin_resize(&Resize {
            size: Some(sectors * SECTOR as u64),
            shrink: true,
            settle: &|| Ok(()),
        })?;
        trace(|| format!("{begun} from {before} to {sectors} sectors"));
        let done = self.model.resizing(begun, before, sectors);
        self.may_fail = Some((before.min(sectors), u64::MAX));
        let mut left = steps;
        let outcome = loop {
            if left == 0 {
                return Ok(false);
            }
            left -= 1;
            let worker = self.rng.below(self.guests) as usize;
            if self.rng.one_in(4) && self.workers[worker].in_flight() < DEPTH {
                let ask = self.random();
                self.submit(worker, ask);
            } else {
                self.step();
            }
            if let Some(outcome) = resizing.poll() {
                break outcome;
            }
        };
        let now = self.world.tick();
        self.world.tick();
        trace(|| format!("{now} resized: {outcome:?}"));
        let flights = self.workers.iter().flat_map(|worker| worker.flights());
        // Without `strict`, a request that waits for space may still be in flight and then checks
        // the size again.
        for flight in flights.filter(|_| outcome.is_ok() && self.strict) {
            let end = flight.ask.first + flight.ask.sectors;
            assert!(end <= sectors, "{:?} outlives the resize", flight.ask);
        }
        self.may_fail = Some((before.min(sectors), now));
        let has_it = outcome.is_ok();
        assert_eq!(self.sectors(), if has_it { sectors } else { before });
        done(&mut self.model, now, has_it);
        self.choose_windows();
        outcome.map(|_| true)
    }
}
