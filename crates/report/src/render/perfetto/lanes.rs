//! Lanes: requests that overlap are on different lanes, and each request is on the same lane of all
//! sides.

use super::requests;
use super::trace::{Trace, Track};
use crate::join::way::Way;

/// The side whose tracks a layer is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Guest,
    Kvm,
    Server,
    HostIo,
    Remote,
}

const SIDES: [(&str, &str); 5] = [
    ("Guest: requests", "request lane"),
    ("Host: KVM, to the guest and back", "KVM lane"),
    ("Host: the disk's server", "server lane"),
    ("Host: I/O", "I/O lane"),
    ("Remote host: server and I/O", "remote lane"),
];

/// The tracks of one lane.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Lane {
    pub(super) tracks: [u64; SIDES.len()],
    /// The end of the last slice of each track; the next slice must not begin earlier.
    pub(super) ends: [i64; SIDES.len()],
    busy_until: i64,
}

/// All lanes.
pub(super) struct Lanes {
    sides: [u64; SIDES.len()],
    lanes: Vec<Lane>,
}

impl Lanes {
    pub(super) fn new(trace: &mut Trace) -> Lanes {
        let mut sides = [0; SIDES.len()];
        for (rank, (uuid, (name, _))) in (1..).zip(sides.iter_mut().zip(SIDES)) {
            *uuid = trace.track(Track::Side(name, rank));
        }
        Lanes {
            sides,
            lanes: Vec::new(),
        }
    }

    /// Adds a request; requests must arrive in the order of their start. `id` is the request's
    /// number in this trace.
    pub(super) fn request(&mut self, trace: &mut Trace, way: &Way, id: u64, round: &str) {
        let (start, total) = way.extent();
        let free = self.lanes.iter().position(|lane| lane.busy_until <= start);
        let index = free.unwrap_or_else(|| {
            let lane = self.lane(trace);
            self.lanes.push(lane);
            self.lanes.len() - 1
        });
        let lane = &mut self.lanes[index];
        let end = requests::draw(trace, lane, way, id, round);
        lane.busy_until = end.max(start + total);
    }

    fn lane(&self, trace: &mut Trace) -> Lane {
        let number = self.lanes.len() as u32 + 1;
        let mut lane = Lane {
            ends: [i64::MIN; SIDES.len()],
            ..Lane::default()
        };
        for (i, track) in lane.tracks.iter_mut().enumerate() {
            *track = trace.track(Track::Lane(self.sides[i], SIDES[i].1, number));
        }
        lane
    }
}
