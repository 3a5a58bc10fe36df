//! Jobs beside the guest.

use super::model::SECTOR;
use super::run::{Run, Start};
use super::worker::{Ask, DEPTH, Flight};
use fathom_core::{Disk, Op};
use fathom_formats::served::Beside;

impl Start<'_> {
    /// What some of the workers read becomes the image's own. (Its size stays.)
    pub fn copying(mut self) -> Self {
        self.options.beside = Some(Beside::CopyOnRead);
        self.options.rebasing = true;
        self.workers += 1;
        self
    }

    /// A worker more writes to the image below.
    pub fn committing(mut self) -> Self {
        self.options.beside = Some(Beside::Below(1));
        self.options.rebasing = true;
        self.workers += 1;
        self
    }
}

impl Run {
    /// Has what the image itself has somewhere be read, and written to the one below.
    pub fn commit_some(&mut self) {
        let (first, sectors) = self.place(false);
        let bytes = |sector: u64| sector * SECTOR as u64;
        let mut mapper = self.disk.mapper().expect("it is active");
        let range = bytes(first)..bytes(first + sectors);
        let own: Vec<_> = { mapper.extents(range, 1) }
            .map(|extent| extent.expect("its tables are read"))
            .filter(|extent| !extent.is_below())
            .collect();
        for extent in own {
            if self.workers[0].in_flight() < DEPTH {
                let first = extent.start / SECTOR as u64;
                let sectors = extent.len / SECTOR as u64;
                let flight = Flight {
                    ask: Ask::plain(Op::Read, first, sectors),
                    submitted: self.world.tick(),
                    action: None,
                    buffer: vec![0xa5; extent.len as usize],
                    goes_below: true,
                };
                self.workers[0].submit(flight, &mut self.rng);
            }
        }
        self.steps(3);
    }

    /// It has been read.
    pub(super) fn commit(&mut self, flight: Flight) {
        let last = self.workers.last_mut().filter(|_| flight.goes_below);
        let below = self.disk.beside().map_or(0, |below| below.info().size);
        let end = (flight.ask.first + flight.ask.sectors) * SECTOR as u64;
        if let Some(worker) = last.filter(|worker| worker.in_flight() < DEPTH && end <= below) {
            let flight = Flight {
                ask: Ask::plain(Op::Write, flight.ask.first, flight.ask.sectors),
                goes_below: false,
                ..flight
            };
            worker.submit(flight, &mut self.rng);
        }
    }
}
