//! Random requests to a disk, and checks of their results.

use super::driver::{Driver, MAX_LEN, Request};
use super::kinds::SIZE;
use std::ops::Range;
use std::time::Duration;

/// Returns the index of the first byte at which the slices differ.
pub fn differ(ours: &[u8], theirs: &[u8]) -> Option<usize> {
    assert_eq!(ours.len(), theirs.len());
    // Comparing slices is much faster than comparing bytes.
    if ours == theirs {
        return None;
    }
    ours.iter()
        .zip(theirs)
        .position(|(one, other)| one != other)
}

/// Returns the number in an environment variable.
pub fn variable(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is no number: {text}")),
    )
}

/// Pseudo-random numbers (xorshift), the same in every run. FATHOM_SEED selects other numbers.
pub struct Random(u64);

impl Random {
    pub fn new(number: usize) -> Random {
        let seed = variable("FATHOM_SEED").unwrap_or(0);
        Random((seed << 16 | number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }

    /// Returns a range of sectors on the disk; short ranges are as likely as long ones.
    fn range(&mut self, longest: u64) -> Range<u64> {
        let bits = self.below(u64::from(longest.ilog2()) + 1);
        let len = (1 + self.below(1 << bits))
            .next_multiple_of(512)
            .min(longest);
        let start = self.below((SIZE - len) / 512 + 1) * 512;
        start..start + len
    }

    fn request(&mut self) -> (Request, Range<u64>) {
        let kind = self.below(8);
        let range = self.range(match kind {
            0..5 => MAX_LEN as u64,
            _ => 3 << 20,
        });
        let (offset, len) = (range.start, range.end - range.start);
        let request = match kind {
            0..4 => {
                let (first, step) = (self.below(251), 1 + self.below(7));
                let data = (0..len).map(|n| (first + n / 512 * step) as u8).collect();
                Request::Write { offset, data }
            }
            4 => Request::Read {
                offset,
                len: len as usize,
            },
            5 | 6 => Request::WriteZeroes {
                offset,
                len,
                unmap: kind == 5,
            },
            _ => Request::Discard { offset, len },
        };
        (request, range)
    }
}

/// Executes random requests, many at once, none of which overlap.
///
/// Afterwards `model` has the contents of the disk.
pub fn exercise(disk: &mut Driver<'_>, model: &mut [u8], random: &mut Random) {
    for _ in 0..12 {
        let mut batch: Vec<(Request, Range<u64>)> = Vec::new();
        while batch.len() < 24 {
            let (request, range) = random.request();
            let apart = |other: &Range<u64>| other.end <= range.start || range.end <= other.start;
            if batch.iter().all(|(_, other)| apart(other)) || batch.len() < 2 {
                batch.retain(|(_, other)| apart(other));
                batch.push((request, range));
            } else if random.below(8) == 0 {
                break;
            }
        }
        let mut requests: Vec<_> = batch.iter().map(|(request, _)| request.clone()).collect();
        requests.push(Request::Flush);
        let outcomes = disk.all(&requests);
        for ((request, range), outcome) in batch.into_iter().zip(outcomes) {
            let read = outcome.unwrap_or_else(|errno| panic!("{request:?}: errno {errno}"));
            let part = &mut model[range.start as usize..range.end as usize];
            match request {
                Request::Write { data, .. } => part.copy_from_slice(&data),
                Request::WriteZeroes { .. } => part.fill(0),
                Request::Read { .. } => assert_eq!(differ(&read, part), None, "{range:?}"),
                Request::Discard { .. } => discarded(disk, part, range),
                Request::Flush => {}
            }
        }
    }
}

/// Each discarded sector is unchanged or zeroes. The contents of the sector are then fixed.
fn discarded(disk: &mut Driver<'_>, part: &mut [u8], range: Range<u64>) {
    let chunks = part.chunks_mut(MAX_LEN).zip(range.step_by(MAX_LEN));
    for (part, offset) in chunks {
        let len = part.len();
        let read = disk.all(&[Request::Read { offset, len }]).remove(0);
        let read = read.expect("read");
        for (old, new) in part.chunks(512).zip(read.chunks(512)) {
            assert!(old == new || new.iter().all(|b| *b == 0), "after a discard");
        }
        part.copy_from_slice(&read);
    }
}

/// Rounds of a test that kills a server during an operation.
///
/// A kill may come before or after the operation's completion.
pub struct KillRounds {
    wanted: usize,
    begun: usize,
    completed: usize,
    /// Factor of the pauses: it follows the time that an operation takes on this machine.
    scale: f64,
}

/// Limits of [`KillRounds::scale`].
const SCALES: [f64; 2] = [0.01, 50.0];

impl KillRounds {
    /// Creates 10 rounds, or 10 times FATHOM_ROUNDS.
    pub fn new() -> KillRounds {
        KillRounds {
            wanted: 10 * variable("FATHOM_ROUNDS").unwrap_or(1) as usize,
            begun: 0,
            completed: 0,
            scale: 1.0,
        }
    }

    /// Returns a time from the start of the operation to the kill: up to `longest` in the first
    /// round.
    pub fn pause(&self, random: &mut Random, longest: Duration) -> Duration {
        let longest = longest.mul_f64(self.scale);
        Duration::from_micros(random.below(longest.as_micros() as u64 + 1))
    }

    /// Returns the number of the next round, from 0.
    ///
    /// Rounds continue beyond the wanted number until both outcomes have been seen.
    pub fn next(&mut self) -> Option<usize> {
        let has_seen_both = (1..self.begun).contains(&self.completed);
        if self.begun >= self.wanted && has_seen_both {
            return None;
        }
        let said = format!("{} of {} were completed", self.completed, self.begun);
        assert!(self.begun < 8 * self.wanted, "{said}");
        self.begun += 1;
        Some(self.begun - 1)
    }

    /// Records whether the operation of this round was completed.
    pub fn note(&mut self, is_completed: bool) {
        self.completed += usize::from(is_completed);
        let factor = if is_completed { 0.8 } else { 1.25 };
        self.scale = (self.scale * factor).clamp(SCALES[0], SCALES[1]);
    }
}
