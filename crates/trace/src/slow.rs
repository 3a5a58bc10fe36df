//! A flight recorder that is always on: the slowest recent requests, with all their stamps.
//!
//! The recorder keeps the four slowest requests of each of the last 64 seconds with requests, and
//! of each of the last 64 minutes with requests. A request that is not kept costs two comparisons.
//! Only one thread writes; other threads read whole records, or none.

use crate::clock::Clock;
use crate::ring::{TraceRecord, Wire};
use crate::stage::{Op, Stage};
use std::cmp::Reverse;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

/// Number of slowest requests that are kept of each period.
const BEST: usize = 4;
/// Number of periods that are kept.
const ROWS: usize = 64;
/// Durations of the two kinds of periods.
const TIMES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

const STAMPS: usize = Stage::COUNT + 1;
/// Number of words in a record: the stamps, offset, length, and one word with the rest.
const WORDS: usize = STAMPS + 3;

/// The records of both kinds of periods; all bytes zero is an empty table.
pub(crate) struct SlowTables([[[Slot; BEST]; ROWS]; TIMES.len()]);

/// A record; the slot is empty if the record's last stamp is zero.
struct Slot {
    /// Sequence number, which is odd while the record is being written.
    turn: AtomicU64,
    words: [AtomicU64; WORDS],
}

impl Slot {
    fn write(&self, words: [u64; WORDS]) {
        let turn = self.turn.load(Ordering::Relaxed);
        self.turn.store(turn.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        for (to, word) in self.words.iter().zip(words) {
            to.store(word, Ordering::Relaxed);
        }
        self.turn.store(turn.wrapping_add(2), Ordering::Release);
    }

    /// Returns the record, or `None` if the slot is empty or is being written.
    fn read(&self) -> Option<TraceRecord> {
        let turn = self.turn.load(Ordering::Acquire);
        if turn == 0 || turn % 2 == 1 {
            return None;
        }
        let words = self
            .words
            .each_ref()
            .map(|word| word.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let is_whole = self.turn.load(Ordering::Relaxed) == turn;
        is_whole.then(|| record(&words)).flatten()
    }
}

fn words(record: &TraceRecord) -> [u64; WORDS] {
    let mut words = [0; WORDS];
    words[..STAMPS].copy_from_slice(&record.stamps);
    words[STAMPS] = record.offset;
    words[STAMPS + 1] = record.len;
    words[STAMPS + 2] = u64::from(record.queue)
        | (record.op as u64) << 16
        | u64::from(record.polled) << 24
        | u64::from(record.error as u32) << 32;
    words
}

fn record(words: &[u64; WORDS]) -> Option<TraceRecord> {
    let mut stamps = [0; STAMPS];
    stamps.copy_from_slice(&words[..STAMPS]);
    let rest = words[STAMPS + 2];
    (stamps[STAMPS - 1] > 0).then_some(TraceRecord {
        stamps,
        offset: words[STAMPS],
        len: words[STAMPS + 1],
        queue: rest as u16,
        op: Op::from_u8((rest >> 16) as u8)?,
        error: (rest >> 32) as u32 as i32,
        polled: rest >> 24 & 1 == 1,
        wire: Wire::None,
    })
}

impl SlowTables {
    /// Returns all records without duplicates, the slowest first.
    pub(crate) fn read(&self) -> Vec<TraceRecord> {
        let slots = self.0.iter().flatten().flatten();
        let mut all: Vec<_> = slots.filter_map(Slot::read).collect();
        let total = |one: &TraceRecord| one.stamps[STAMPS - 1] - one.stamps[0];
        all.sort_unstable_by_key(|one| Reverse((total(one), one.stamps[0], one.offset, one.queue)));
        all.dedup();
        all
    }
}

/// The only writer of a table.
pub(crate) struct SlowWriter {
    times: [Time; TIMES.len()],
}

/// The current period: a second, or a minute.
struct Time {
    ticks: u64,
    /// Clock ticks at the end of the period.
    until: u64,
    row: usize,
    /// Total times of the slowest requests of the period, in ticks.
    best: [u64; BEST],
    /// The smallest of these times.
    floor: u64,
}

impl SlowWriter {
    pub(crate) fn new() -> SlowWriter {
        let time = |duration| Time {
            ticks: Clock::get().ticks(duration),
            until: 0,
            row: 0,
            best: [0; BEST],
            floor: 0,
        };
        SlowWriter {
            times: TIMES.map(time),
        }
    }

    /// Returns whether a request of `total` ticks that ended at `end` is to be kept.
    #[inline(always)]
    pub(crate) fn wants(&self, total: u64, end: u64) -> bool {
        let [second, _] = &self.times;
        total > second.floor || end >= second.until
    }

    #[cold]
    pub(crate) fn keep(&mut self, tables: &SlowTables, record: &TraceRecord) {
        let end = record.stamps[STAMPS - 1];
        let total = end - record.stamps[0];
        for (time, rows) in self.times.iter_mut().zip(&tables.0) {
            if end >= time.until {
                time.begin(end);
            }
            if let Some(place) = time.place_for(total) {
                rows[time.row][place].write(words(record));
            }
        }
    }
}

impl Time {
    /// Begins the next period.
    ///
    /// The records of its row are 64 periods old, and are overwritten one by one. While the new
    /// period has few requests, some of the old records remain.
    fn begin(&mut self, now: u64) {
        self.until = now + self.ticks;
        self.row = (self.row + 1) % ROWS;
        self.best = [0; BEST];
        self.floor = 0;
    }

    /// Returns the place of a request that took `total` ticks, or `None` if the request is not
    /// among the slowest.
    fn place_for(&mut self, total: u64) -> Option<usize> {
        let least = (0..BEST).min_by_key(|place| self.best[*place])?;
        if total <= self.best[least] {
            return None;
        }
        self.best[least] = total;
        self.floor = self.best.iter().copied().min().unwrap_or(0);
        Some(least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recorder::{Recorder, StageHistograms, some_record};
    use crate::stage::Stamps;
    use std::sync::Arc;

    /// Records a request that ended at `at_ms` milliseconds, after `total` ticks.
    fn count(recorder: &mut Recorder, at_ms: u64, total: u64, offset: u64) {
        let end = Clock::get().ticks(Duration::from_millis(at_ms)) + (1 << 40);
        let mut stamps = Stamps::start(end - total);
        stamps.enter(Stage::Device, end - total + 1);
        stamps.end(end);
        let record = TraceRecord {
            offset,
            queue: 3,
            op: Op::Write,
            error: 5,
            polled: true,
            wire: Wire::None,
            ..some_record(&stamps)
        };
        recorder.record(Op::Write, 4096, &stamps, || record);
    }

    #[test]
    fn the_slowest_of_each_second_stay() {
        let histograms = Arc::new(StageHistograms::default());
        let mut recorder = Recorder::new(histograms.clone());
        for second in 0..3u64 {
            for n in 0..100u64 {
                // Each request has a different duration, in no order.
                let total = 1000 + (n * 37) % 100 + 1000 * second;
                count(&mut recorder, 2000 * second + n, total, n);
            }
        }
        let slow = histograms.slow();
        let totals = |second: u64| -> Vec<_> {
            let of = |one: &&TraceRecord| {
                let total = one.stamps[STAMPS - 1] - one.stamps[0];
                total / 1000 == second + 1
            };
            let mut all: Vec<_> = { slow.iter().filter(of) }
                .map(|one| (one.stamps[STAMPS - 1] - one.stamps[0]) % 1000)
                .collect();
            all.sort_unstable();
            all
        };
        for second in 0..3 {
            let all = totals(second);
            assert_eq!(all[all.len() - 4..], [96, 97, 98, 99], "{second}");
        }
        let one = slow[0];
        assert_eq!(one.stamps[STAMPS - 1] - one.stamps[0], 3099);
        assert_eq!(
            (one.len, one.queue, one.op, one.error, one.polled),
            (512, 3, Op::Write, 5, true)
        );
        assert_eq!(one.stamps[1] - one.stamps[0], 1);
    }

    #[test]
    fn minutes_remember_what_seconds_forget() {
        let histograms = Arc::new(StageHistograms::default());
        let mut recorder = Recorder::new(histograms.clone());
        count(&mut recorder, 0, 1 << 30, 7);
        for second in 1..=200u64 {
            for n in 0..8 {
                count(&mut recorder, 1000 * second + n, 500 + second + n, n);
            }
        }
        let slow = histograms.slow();
        assert!(
            slow.iter().any(|one| one.offset == 7),
            "the slowest of its minute"
        );
        assert!(slow.len() <= TIMES.len() * ROWS * BEST);
        let totals = slow
            .iter()
            .map(|one| one.stamps[STAMPS - 1] - one.stamps[0]);
        assert!(totals.is_sorted_by(|a, b| a >= b) && slow.len() > ROWS * BEST);
    }

    #[test]
    fn who_reads_sees_whole_records_or_none() {
        let histograms = Arc::new(StageHistograms::default());
        let reader = histograms.clone();
        let writes = std::thread::spawn(move || {
            let mut recorder = Recorder::new(histograms);
            for n in 1..200_000u64 {
                count(&mut recorder, n, 1000 + n, n);
            }
        });
        while !writes.is_finished() {
            for one in reader.slow() {
                let total = one.stamps[STAMPS - 1] - one.stamps[0];
                assert_eq!(total, 1000 + one.offset);
            }
        }
        writes.join().unwrap();
    }
}
