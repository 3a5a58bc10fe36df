//! Jobs that run while the guest uses the disk.

use super::model::SECTOR;
use super::run::{Run, Start};
use super::worker::{Ask, DEPTH, Flight, Worker};
use fathom_core::{Disk, Op};
use fathom_formats::Format;
use fathom_formats::offline::backing::NewBacking;
use fathom_formats::served::SideViewKind;

impl Start<'_> {
    /// Some of the workers copy on read. The image file keeps its size.
    pub fn copying(mut self) -> Self {
        self.options.side_view = Some(SideViewKind::CopyOnRead);
        self.options.rebasing = true;
        self.workers += 1;
        self
    }

    /// Two additional workers commit the image below the top image to the image below that.
    pub fn leaving_out(mut self) -> Self {
        self.options.side_view = Some(SideViewKind::Between { top: 1, base: 2 });
        self.options.rebasing = true;
        self.workers += 2;
        self
    }

    /// An additional worker writes to the image below.
    pub fn committing(mut self) -> Self {
        self.options.side_view = Some(SideViewKind::Below(1));
        self.options.rebasing = true;
        self.workers += 1;
        self
    }
}

/// Number of sectors per commit request.
const PIECE: u64 = 64;

impl Run {
    /// Commits the image below the top image to the one below that, while guests continue, and then
    /// makes the top image name that one as its backing file. Waits until the data is durable if
    /// `waits` is set.
    pub fn leave_out(&mut self, name: &str, waits: bool) {
        let reader = self.workers.len() - 2;
        let end = self.disk.side_view().expect("there are two").info().size;
        let mut mapper = self.disk.mapper_from(1).expect("it is active");
        let own: Vec<_> = { mapper.extents(0..end, 1) }
            .map(|extent| extent.expect("its tables are read"))
            .filter(|extent| !extent.is_below())
            .map(|extent| (extent.start / SECTOR as u64, extent.len / SECTOR as u64))
            .collect();
        assert!(!own.is_empty(), "there is nothing to bring down");
        for (first, sectors) in own {
            for at in (0..sectors).step_by(PIECE as usize) {
                let len = PIECE.min(sectors - at);
                self.submit_job(reader, Ask::plain(Op::Read, first + at, len));
                self.requests(2);
            }
        }
        self.drain();
        if waits {
            self.submit_job(reader + 1, Ask::plain(Op::Flush, 0, 0));
            self.drain();
        }
        let backing = NewBacking {
            name: name.as_bytes(),
            format: Format::Raw,
        };
        let named = self.disk.set_backing(0, Some(backing));
        named.expect("it can be written");
    }

    /// Submits a request of the job once there is room for it.
    fn submit_job(&mut self, worker: usize, ask: Ask) {
        // The last worker writes what is read, and must have room for it.
        let in_flight = |run: &Run| run.workers[worker..].iter().map(Worker::in_flight).sum();
        while DEPTH <= in_flight(self) {
            assert!(self.goes_on(), "requests that never end");
        }
        let buffer = vec![0xa5; ask.sectors as usize * SECTOR];
        let flight = Flight {
            ask,
            submitted: self.world.tick(),
            action: None,
            buffer,
            goes_below: true,
        };
        self.workers[worker].submit(flight, &mut self.rng);
    }

    /// Commits what the top image has in a random range to the image below.
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

    /// Writes the result of a commit job's read to the image below.
    pub(super) fn commit(&mut self, flight: Flight) {
        let last = self.workers.last_mut().filter(|_| flight.goes_below);
        let below = self.disk.side_view().map_or(0, |below| below.info().size);
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
