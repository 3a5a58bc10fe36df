//! A worker without a thread.

use super::model::SECTOR;
use super::rng::Rng;
use super::world::World;
use fathom_core::testing::PollEngine;
use fathom_core::{Channel, Cx, Disk, Op, Owner, RequestId, Stage, Stamps};
use libc::iovec;
use std::collections::HashMap;

/// Maximum number of requests in flight per worker.
pub const DEPTH: usize = 32;

/// A request for a worker, in sectors.
#[derive(Clone, Debug)]
pub struct Ask {
    pub op: Op,
    pub first: u64,
    pub sectors: u64,
    pub fua: bool,
    pub unmap: bool,
}

impl Ask {
    pub fn plain(op: Op, first: u64, sectors: u64) -> Ask {
        Ask {
            op,
            first,
            sectors,
            fua: false,
            unmap: false,
        }
    }
}

/// A request in flight.
pub struct Flight {
    pub ask: Ask,
    pub submitted: u64,
    /// The action's number in the model, if the request changes anything.
    pub action: Option<usize>,
    pub buffer: Vec<u8>,
    /// Whether the data that is read will be written to the image below.
    pub goes_below: bool,
}

pub struct Worker {
    cx: Cx,
    channel: Box<dyn Channel>,
    in_flight: HashMap<u32, Flight>,
}

impl Worker {
    pub fn new(disk: &dyn Disk, world: &World, number: usize) -> Worker {
        world.state().worker = number;
        let mut cx = Cx::new(PollEngine::boxed().expect("an engine"));
        cx.slab.grow(DEPTH);
        let channel = disk.channel(&mut cx).expect("a channel");
        Worker {
            cx,
            channel,
            in_flight: HashMap::new(),
        }
    }

    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// The requests in flight.
    pub fn flights(&self) -> impl Iterator<Item = &Flight> {
        self.in_flight.values()
    }

    pub fn submit(&mut self, flight: Flight, rng: &mut Rng) {
        let id = self.cx.slab.take().expect("as many as there is room for");
        let now = self.cx.tick();
        let ask = flight.ask.clone();
        let request = &mut self.cx.slab[id];
        request.stamps = Stamps::start(now);
        (request.op, request.fua, request.unmap) = (ask.op, ask.fua, ask.unmap);
        (request.owner, request.error) = (Owner::SOURCE, 0);
        (request.offset, request.at) = (ask.first * SECTOR as u64, ask.first * SECTOR as u64);
        request.len = ask.sectors * SECTOR as u64;
        request.segments.clear();
        self.in_flight.insert(id.0, flight);
        let buffer = &mut self
            .in_flight
            .get_mut(&id.0)
            .expect("just put there")
            .buffer;
        let mut rest = &mut buffer[..];
        while !rest.is_empty() {
            let len = match ask.op {
                Op::BlockStatus => rest.len(),
                _ => piece(rest.len(), rng),
            };
            let (part, more) = rest.split_at_mut(len);
            request.segments.push(iovec {
                iov_base: part.as_mut_ptr().cast(),
                iov_len: len,
            });
            rest = more;
        }
        self.cx.enter(id, Stage::Queue);
        self.channel.submit(&mut self.cx, id);
    }

    /// Carries out a pending storage operation and completes it.
    pub fn carry_out(&mut self, world: &World, pending: &super::world::Pending) {
        let result = world.carry_out(pending, &self.cx.slab[pending.id]);
        self.cx.tick();
        self.channel.complete(&mut self.cx, pending.id, 0, result);
    }

    /// Carries out a pending operation after the worker's server was killed.
    pub fn abandon(&self, world: &World, pending: &super::world::Pending) {
        world.abandon(pending, &self.cx.slab[pending.id]);
    }

    /// Polls tasks that another worker may have woken.
    pub fn look_again(&mut self) {
        let tag = self.cx.newest_tag();
        self.channel
            .complete(&mut self.cx, RequestId::NOBODY, tag, 0);
        self.cx.tick();
        self.channel.timer(&mut self.cx);
    }

    /// Returns the requests that have ended, with their errors.
    pub fn reap(&mut self) -> Vec<(Flight, i32)> {
        let mut reaped = Vec::new();
        for id in self.cx.take_done() {
            let flight = self.in_flight.remove(&id.0).expect("it is done once");
            reaped.push((flight, self.cx.slab[id].error));
            self.cx.slab.put(id);
        }
        reaped
    }
}

/// Returns a random length for a request's next segment.
fn piece(left: usize, rng: &mut Rng) -> usize {
    match rng.below(8) {
        0..4 => left,
        4..7 => (SECTOR * (1 + rng.below(8) as usize)).min(left),
        _ => 1 + rng.below(left as u64) as usize,
    }
}
