//! What the parts of the join speak of: requests by what they ask, and a request's way.

use fathom_run::flags;

use super::merge::Side;

use crate::analysis::{Delivery, HostClass, Joined, Layer, Point};

/// What a request asks, as both sides can tell it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Class {
    Read,
    Write,
    Flush,
    Discard,
    /// Not known: a kick was seen, and nothing of what it brought.
    Any,
}

impl Class {
    /// Of the flags of an event; `length` tells a flush from a write that flushes first.
    pub(crate) fn of(flags: u64, length: u64) -> Class {
        if flags & flags::DISCARD != 0 {
            Class::Discard
        } else if flags & flags::FLUSH != 0 && length == 0 {
            Class::Flush
        } else if flags & flags::WRITE != 0 {
            Class::Write
        } else {
            Class::Read
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Class::Read => "read",
            Class::Write => "write",
            Class::Flush => "flush",
            Class::Discard => "discard",
            Class::Any => "request",
        }
    }
}

/// What a request is known by on both sides: bytes of the guest's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) class: Class,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

impl Key {
    /// In bytes.
    pub(crate) fn new(flags: u64, offset: u64, length: u64) -> Key {
        let class = Class::of(flags, length);
        // A flush is of the whole disk, whatever sector it is told with.
        let offset = if class == Class::Flush { 0 } else { offset };
        Key {
            class,
            offset,
            length,
        }
    }

    /// Of a block event's sectors.
    pub(crate) fn sectors(flags: u64, sector: u64, sectors: u64) -> Key {
        Key::new(flags, sector.wrapping_mul(512), sectors.wrapping_mul(512))
    }

    pub(crate) fn end(&self) -> u64 {
        self.offset.saturating_add(self.length)
    }

    /// Bytes that both touch, if both ask the same; flushes touch each other in 1.
    pub(crate) fn common(&self, other: &Key) -> u64 {
        if self.class != other.class {
            return 0;
        }
        if self.class == Class::Flush {
            return 1;
        }
        let from = self.offset.max(other.offset);
        self.end().min(other.end()).saturating_sub(from)
    }
}

/// Number of [`Point`]s.
const POINTS: usize = Point::ALL.len();

/// Whose clock tells a point.
fn side_of(point: Point) -> Side {
    use Point::*;
    match point {
        Call | Bio | Issue | Kick | Handler | Complete | Return => Side::Guest,
        RemoteWake | RemotePop | RemoteMap | RemoteDevice | RemoteResult | RemoteSent => {
            Side::Remote
        }
        _ => Side::Host,
    }
}

/// How far the clocks of two sides may be off each other.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Errors {
    /// Of the guest's and the host's.
    pub(crate) guest: i64,
    /// Of the remote host's and this one's.
    pub(crate) remote: i64,
}

impl Errors {
    fn between(self, a: Side, b: Side) -> i64 {
        match (a, b) {
            (a, b) if a == b => 0,
            (Side::Remote, _) | (_, Side::Remote) => self.remote,
            _ => self.guest,
        }
    }
}

/// The points of one request that were seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Points([Option<i64>; POINTS]);

impl Points {
    pub(crate) fn get(&self, point: Point) -> Option<i64> {
        self.0[point as usize]
    }

    pub(crate) fn set(&mut self, point: Point, at: i64) {
        self.0[point as usize] = Some(at);
    }

    pub(crate) fn put(&mut self, point: Point, at: Option<i64>) {
        self.0[point as usize] = at;
    }

    /// Those that were seen, in the order of the way.
    pub(crate) fn seen(&self) -> impl DoubleEndedIterator<Item = (Point, i64)> + '_ {
        let all = Point::ALL.iter().zip(&self.0);
        all.filter_map(|(&point, &at)| Some((point, at?)))
    }
}

/// One request's way, joined.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Way {
    pub(crate) number: u64,
    pub(crate) key: Key,
    pub(crate) points: Points,
    pub(crate) delivery: Delivery,
    pub(crate) batch: u32,
    pub(crate) host: HostClass,
    /// A handler that was already running took it.
    pub(crate) reaped: bool,
    /// It had more than one possible counterpart.
    pub(crate) ambiguous: bool,
    /// It lacks a point that was watched.
    pub(crate) incomplete: bool,
    /// Its signal may have been a little before the time that is known.
    pub(crate) told_late: bool,
    /// Effects seen before their causes.
    pub(crate) violations: u32,
}

impl Way {
    /// When it began, and how long it took.
    pub(crate) fn extent(&self) -> (i64, i64) {
        let mut seen = self.points.seen();
        let first = seen.next().map_or(0, |(_, at)| at);
        let last = seen.next_back().map_or(first, |(_, at)| at);
        (first, last - first)
    }

    /// Its layers, in order; they add up to its time exactly. A layer may come twice.
    pub(crate) fn layers(&self) -> impl Iterator<Item = (Layer, i64)> + '_ {
        let next = self.points.seen().skip(1);
        self.points
            .seen()
            .zip(next)
            .map(|((a, at), (b, then))| (self.between(a, b), then - at))
    }

    /// Effects that were seen before their causes; between two clocks, by more than their error.
    pub(crate) fn misordered(&self, errors: Errors) -> u32 {
        let next = self.points.seen().skip(1);
        let pairs = self.points.seen().zip(next);
        let wrong = pairs.filter(|&((cause, then), (effect, at))| {
            let error = errors.between(side_of(cause), side_of(effect));
            let excused = cause == Point::Signal && self.told_late;
            !excused && at < then - error
        });
        wrong.count() as u32
    }

    fn between(&self, a: Point, b: Point) -> Layer {
        match (a, b) {
            (Point::Issue, Point::Pop) if self.delivery == Delivery::Polled => Layer::GuestBatch,
            (Point::Used, Point::Complete) if self.reaped => Layer::GuestBottomHalf,
            // It was on another host, and is not told apart there.
            (Point::Device, Point::Result)
                if matches!(self.host, HostClass::Remote | HostClass::Split) =>
            {
                Layer::Unattributed
            }
            _ => Layer::between(a, b),
        }
    }

    /// As reports show it.
    pub(crate) fn joined(&self) -> Joined {
        let (start, total) = self.extent();
        let mut layers: Vec<(Layer, i64)> = Vec::new();
        for (layer, time) in self.layers() {
            match layers.iter_mut().find(|(known, _)| *known == layer) {
                Some((_, sum)) => *sum += time,
                None => layers.push((layer, time)),
            }
        }
        Joined {
            number: self.number,
            operation: self.key.class.name(),
            offset: self.key.offset,
            length: self.key.length,
            start,
            points: self.points.seen().map(|(p, at)| (p, at - start)).collect(),
            layers,
            total,
            delivery: self.delivery,
            batch: self.batch,
            host: self.host,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_tell_operations_apart() {
        let flush = Key::sectors(flags::WRITE | flags::FLUSH, u64::MAX, 0);
        assert_eq!(flush, Key::new(flags::FLUSH, 0, 0));
        let fua = Key::sectors(flags::WRITE | flags::FLUSH | flags::FUA, 8, 8);
        assert_eq!(fua, Key::new(flags::WRITE, 4096, 4096));
        assert_eq!(fua.common(&Key::new(flags::WRITE, 6144, 4096)), 2048);
        assert_eq!(fua.common(&Key::new(flags::WRITE, 8192, 4096)), 0);
        assert_eq!(fua.common(&Key::new(0, 4096, 4096)), 0);
    }
}
