//! Types that the parts of the join share: a request's key and its way.

use fathom_run::flags;

use super::merge::Side;

use crate::analysis::{Delivery, HostClass, Joined, Layer, Point};

/// The operation of a request, as both sides know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Class {
    Read,
    Write,
    Flush,
    Discard,
    /// Unknown: only a kick was seen, and none of its requests.
    Any,
}

impl Class {
    /// Returns the class for an event's flags; `length` distinguishes a flush from a write that
    /// flushes first.
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

/// Identifies a request on both sides: its operation and its bytes on the guest's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) class: Class,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

impl Key {
    /// Creates a key; `offset` and `length` are in bytes.
    pub(crate) fn new(flags: u64, offset: u64, length: u64) -> Key {
        let class = Class::of(flags, length);
        // A flush covers the whole disk, so its sector has no meaning.
        let offset = if class == Class::Flush { 0 } else { offset };
        Key {
            class,
            offset,
            length,
        }
    }

    /// Creates a key from a block event's sectors.
    pub(crate) fn sectors(flags: u64, sector: u64, sectors: u64) -> Key {
        Key::new(flags, sector.wrapping_mul(512), sectors.wrapping_mul(512))
    }

    pub(crate) fn end(&self) -> u64 {
        self.offset.saturating_add(self.length)
    }

    /// Returns the number of bytes that both keys cover, 0 if their classes differ. Two flushes
    /// have 1 in common.
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

/// Returns the side whose clock a point's time is from.
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

/// The largest errors between the clocks of two sides, in ns.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Errors {
    /// Between the guest's and the host's clock.
    pub(crate) guest: i64,
    /// Between the remote host's and this host's clock.
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

    /// Returns the points that were seen, in the order of the way.
    pub(crate) fn seen(&self) -> impl DoubleEndedIterator<Item = (Point, i64)> + '_ {
        let all = Point::ALL.iter().zip(&self.0);
        all.filter_map(|(&point, &at)| Some((point, at?)))
    }
}

/// The joined way of one request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Way {
    pub(crate) number: u64,
    pub(crate) key: Key,
    pub(crate) points: Points,
    pub(crate) delivery: Delivery,
    pub(crate) batch: u32,
    pub(crate) host: HostClass,
    /// A handler that was already running took the request.
    pub(crate) reaped: bool,
    /// The request had more than one possible counterpart.
    pub(crate) ambiguous: bool,
    /// The request lacks a point that was watched.
    pub(crate) incomplete: bool,
    /// The signal may have preceded the known time a little.
    pub(crate) told_late: bool,
    /// Number of effects that were seen before their causes.
    pub(crate) violations: u32,
}

impl Way {
    /// Returns the time of the first point and the duration, in ns.
    pub(crate) fn extent(&self) -> (i64, i64) {
        let mut seen = self.points.seen();
        let first = seen.next().map_or(0, |(_, at)| at);
        let last = seen.next_back().map_or(first, |(_, at)| at);
        (first, last - first)
    }

    /// Returns the layers in order; they add up to the duration exactly. A layer may occur twice.
    pub(crate) fn layers(&self) -> impl Iterator<Item = (Layer, i64)> + '_ {
        let next = self.points.seen().skip(1);
        self.points
            .seen()
            .zip(next)
            .map(|((a, at), (b, then))| (self.between(a, b), then - at))
    }

    /// Returns the number of effects seen before their causes, between two clocks by more than
    /// their error.
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
            // Another host did the I/O, and its stages are not known.
            (Point::Device, Point::Result)
                if matches!(self.host, HostClass::Remote | HostClass::Split) =>
            {
                Layer::Unattributed
            }
            _ => Layer::between(a, b),
        }
    }

    /// Converts the way for reports.
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
