//! Counts finished requests in histograms, in batches.

use crate::clock::Clock;
use crate::histogram::{COARSE, Counts, Histogram, Occupied, add};
use crate::ring::TraceRecord;
#[cfg(test)]
use crate::ring::Wire;
use crate::slow::{SlowTables, SlowWriter};
use crate::stage::{Op, Stage, Stamps};
use serde::{Deserialize, Serialize};
use std::alloc::{Layout, handle_alloc_error};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Histograms of one worker: for each operation, one per stage and one of the total.
///
/// The tables take half a MiB of address space, of which only written pages occupy memory. An
/// unused disk occupies no memory, and a disk that is only read occupies little.
pub struct StageHistograms(NonNull<Tables>);

/// Number of counters of errors: one per Linux errno, and the first for unknown errors.
const ERRNOS: usize = 134;

/// Tables of a worker; all bytes zero is an empty table.
struct Tables {
    ops: [[Histogram; Stage::COUNT + 1]; Op::COUNT],
    /// Number of requests that failed, by operation and errno.
    errors: [[AtomicU64; ERRNOS]; Op::COUNT],
    /// Number of bytes of the requests that succeeded, by operation.
    bytes: [AtomicU64; Op::COUNT],
    slow: SlowTables,
}

// SAFETY: this type owns its tables, which are `Send`.
unsafe impl Send for StageHistograms {}
// SAFETY: other threads get only shared references to the tables, which are `Sync`.
unsafe impl Sync for StageHistograms {}

impl Default for StageHistograms {
    fn default() -> StageHistograms {
        let (protection, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: creates a new mapping at an address of the kernel's choice.
        let map = unsafe { libc::mmap(null_mut(), LEN, protection, flags, -1, 0) };
        match NonNull::new(map) {
            Some(map) if map.as_ptr() != libc::MAP_FAILED => {
                // A huge page would occupy memory for all tables. The call fails on a kernel
                // without huge pages.
                // SAFETY: the advice concerns only this mapping, and does not change its content.
                unsafe { libc::madvise(map.as_ptr(), LEN, libc::MADV_NOHUGEPAGE) };
                StageHistograms(map.cast())
            }
            _ => handle_alloc_error(Layout::new::<Tables>()),
        }
    }
}

const LEN: usize = size_of::<Tables>();

impl StageHistograms {
    fn tables(&self) -> &Tables {
        // SAFETY: the tables are mapped until the drop, aligned to a page, and valid if all zero.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for StageHistograms {
    fn drop(&mut self) {
        // SAFETY: `default` made the mapping with this length, and no reference to it is left.
        unsafe { libc::munmap(self.0.as_ptr().cast(), LEN) };
    }
}

impl StageHistograms {
    /// Returns the histograms of the stages of `op` in the order of [`Stage::ALL`], then of the
    /// total.
    pub fn counts(&self, op: Op) -> Vec<Counts<COARSE>> {
        let stages = &self.tables().ops[op as usize];
        stages.iter().map(Histogram::counts).collect()
    }

    /// Returns the number of requests that failed.
    pub fn errors(&self, op: Op) -> u64 {
        self.errnos(op).map(|(_, n)| n).sum()
    }

    /// Returns the number of failed requests for each errno that occurred.
    pub fn errnos(&self, op: Op) -> impl Iterator<Item = (u8, u64)> + '_ {
        let all = self.tables().errors[op as usize].iter();
        let counts = all.map(|n| n.load(Ordering::Relaxed));
        (0..).zip(counts).filter(|(_, n)| *n > 0)
    }

    /// Returns the slowest recent requests, the slowest first.
    pub fn slow(&self) -> Vec<TraceRecord> {
        self.tables().slow.read()
    }

    /// Returns the number of bytes of the requests that succeeded.
    pub fn bytes(&self, op: Op) -> u64 {
        self.tables().bytes[op as usize].load(Ordering::Relaxed)
    }
}

/// Histograms in a form for another process of the same machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HistogramsState {
    /// Whether the values are TSC cycles, and the resolution of the buckets.
    tsc: bool,
    bits: u32,
    /// For each operation: the histograms of the stages, and the number of failed requests.
    ops: Vec<(Vec<Occupied>, u64)>,
    /// Number of bytes of requests that succeeded, for each operation. Absent in states of older
    /// servers.
    #[serde(default)]
    bytes: Vec<u64>,
    /// Errnos with the numbers of failed requests, for each operation. Absent in states of older
    /// servers.
    #[serde(default)]
    errnos: Vec<Vec<(u8, u64)>>,
}

impl HistogramsState {
    /// Returns the histograms of an operation that has occurred.
    ///
    /// The stages are in the order of [`Stage::ALL`], then the total follows.
    pub fn of(&self, op: Op) -> &[Occupied] {
        let of_op = self.ops.get(op as usize);
        of_op.map_or(&[], |(stages, _)| stages)
    }

    /// Adds up the counts of several workers of this machine.
    pub fn merged(workers: &[HistogramsState]) -> HistogramsState {
        let all = StageHistograms::default();
        workers.iter().for_each(|worker| all.absorb(worker));
        all.state()
    }

    /// Returns the number of bytes of the operation's requests that succeeded.
    pub fn bytes(&self, op: Op) -> u64 {
        self.bytes.get(op as usize).copied().unwrap_or(0)
    }

    /// Returns the numbers of failed requests by errno; 0 stands for an unknown errno.
    pub fn errnos(&self, op: Op) -> &[(u8, u64)] {
        self.errnos.get(op as usize).map_or(&[], Vec::as_slice)
    }
}

impl StageHistograms {
    /// Returns the counts so far, for another process that continues or merges them.
    pub fn state(&self) -> HistogramsState {
        let counts = |op| {
            let stages = &self.tables().ops[op as usize];
            match stages[Stage::COUNT].is_empty() {
                true => Vec::new(),
                false => stages.iter().map(Histogram::occupied).collect(),
            }
        };
        HistogramsState {
            tsc: Clock::get().is_tsc(),
            bits: COARSE,
            ops: Op::ALL.map(|op| (counts(op), self.errors(op))).into(),
            bytes: Op::ALL.map(|op| self.bytes(op)).into(),
            errnos: Op::ALL.map(|op| self.errnos(op).collect()).into(),
        }
    }

    /// Adds the counts of another process, unless its values or buckets have another meaning.
    ///
    /// Only the writer of these histograms may call this.
    pub fn absorb(&self, state: &HistogramsState) {
        if state.tsc != Clock::get().is_tsc() || state.bits != COARSE {
            return;
        }
        let tables = self.tables();
        for (i, (stages, errors)) in state.ops.iter().enumerate().take(Op::COUNT) {
            let pairs = tables.ops[i].iter().zip(stages);
            pairs.for_each(|(histogram, counts)| histogram.absorb(counts));
            let known = state.errnos.get(i).into_iter().flatten();
            let mut left = *errors;
            for (errno, n) in known {
                count_errors(&tables.errors[i], (*errno).into(), *n);
                left = left.saturating_sub(*n);
            }
            count_errors(&tables.errors[i], 0, left);
        }
        let pairs = tables.bytes.iter().zip(&state.bytes);
        pairs.for_each(|(all, bytes)| add(all, *bytes));
    }
}

fn count_errors(errors: &[AtomicU64; ERRNOS], errno: usize, n: u64) {
    add(errors.get(errno).unwrap_or(&errors[0]), n);
}

/// The only writer of a worker's histograms.
///
/// Requests of one batch often have the same stamps. The recorder counts such requests as a run,
/// and adds them to the histograms together. Therefore seven histograms are affordable for each
/// request.
pub struct Recorder {
    histograms: Arc<StageHistograms>,
    op: Op,
    spent: [u64; Stage::COUNT],
    run: u64,
    /// Number of bytes of the run.
    bytes: u64,
    slow: SlowWriter,
}

impl Recorder {
    /// Creates the writer of these histograms, which must have no other writer.
    pub fn new(histograms: Arc<StageHistograms>) -> Recorder {
        Recorder {
            histograms,
            op: Op::Read,
            spent: [0; Stage::COUNT],
            run: 0,
            bytes: 0,
            slow: SlowWriter::new(),
        }
    }

    /// Counts a finished request of `bytes` bytes, which is visible after [`Recorder::flush`].
    ///
    /// Callers pass 0 `bytes` for a failed request. `whole` is called only if the request is one of
    /// the slowest.
    #[inline]
    pub fn record(
        &mut self,
        op: Op,
        bytes: u64,
        stamps: &Stamps,
        whole: impl FnOnce() -> TraceRecord,
    ) {
        if cfg!(fathom_unstamped) {
            return;
        }
        if self.op == op && self.spent == *stamps.spent() {
            self.run += 1;
            self.bytes += bytes;
            return;
        }
        self.flush();
        // The first request of a run represents the whole run.
        if self.slow.wants(stamps.total(), stamps.last()) {
            self.slow.keep(&self.histograms.tables().slow, &whole());
        }
        self.op = op;
        self.spent = *stamps.spent();
        self.run = 1;
        self.bytes = bytes;
    }

    /// Counts an error of a request, by errno. The request must also be recorded.
    #[cold]
    pub fn failed(&mut self, op: Op, error: i32) {
        let errors = &self.histograms.tables().errors[op as usize];
        count_errors(errors, usize::try_from(error).unwrap_or(0), 1);
    }

    /// Makes all recorded requests visible. Called once per batch.
    #[inline]
    pub fn flush(&mut self) {
        if self.run == 0 {
            return;
        }
        let tables = self.histograms.tables();
        add(&tables.bytes[self.op as usize], self.bytes);
        let histograms = &tables.ops[self.op as usize];
        let mut total = 0;
        for (histogram, spent) in histograms.iter().zip(self.spent) {
            histogram.record_n(spent, self.run);
            total += spent;
        }
        histograms[Stage::COUNT].record_n(total, self.run);
        (self.run, self.bytes) = (0, 0);
    }
}

/// Returns a record with these stamps, and arbitrary other values.
#[cfg(test)]
pub(crate) fn some_record(stamps: &Stamps) -> TraceRecord {
    TraceRecord {
        stamps: stamps.raw(),
        offset: 0,
        len: 512,
        queue: 0,
        op: Op::Read,
        error: 0,
        polled: false,
        wire: Wire::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_over_is_counted_alike() {
        let histograms = Arc::new(StageHistograms::default());
        let mut recorder = Recorder::new(histograms.clone());
        for ticks in [5, 700, 1 << 40] {
            let mut stamps = Stamps::start(0);
            stamps.enter(Stage::Device, 1);
            stamps.end(1 + ticks);
            recorder.record(Op::Write, 512, &stamps, || some_record(&stamps));
        }
        recorder.failed(Op::Write, libc::EIO);
        recorder.flush();
        let text = serde_json::to_string(&histograms.state()).unwrap();
        let mut state: HistogramsState = serde_json::from_str(&text).unwrap();
        let taken = StageHistograms::default();
        taken.absorb(&state);
        for stage in 0..=Stage::COUNT {
            let (old, new) = (histograms.counts(Op::Write), taken.counts(Op::Write));
            assert!(old[stage].occupied().eq(new[stage].occupied()), "{stage}");
            assert_eq!(old[stage].sum(), new[stage].sum());
            assert_eq!(old[stage].max(), new[stage].max());
        }
        assert_eq!(taken.errors(Op::Write), 1);
        assert!(taken.errnos(Op::Write).eq([(libc::EIO as u8, 1)]));
        assert_eq!(taken.bytes(Op::Write), 3 * 512);
        state.bits += 1;
        let strange = StageHistograms::default();
        strange.absorb(&state);
        assert_eq!(strange.counts(Op::Write)[Stage::COUNT].count(), 0);
    }

    #[test]
    fn runs_and_single_requests_count_alike() {
        let histograms = Arc::new(StageHistograms::default());
        let mut recorder = Recorder::new(histograms.clone());
        for (op, ticks) in [
            (Op::Read, 5),
            (Op::Read, 5),
            (Op::Write, 5),
            (Op::Read, 9),
            (Op::Read, 5),
        ] {
            let mut stamps = Stamps::start(0);
            stamps.enter(Stage::Device, 1);
            stamps.end(1 + ticks);
            recorder.record(op, 512, &stamps, || some_record(&stamps));
            if ticks == 9 {
                recorder.flush();
                recorder.record(op, 512, &stamps, || some_record(&stamps));
            }
        }
        recorder.flush();
        let reads = histograms.counts(Op::Read);
        assert_eq!(reads[Stage::Device as usize].count(), 5);
        assert_eq!(reads[Stage::Device as usize].sum(), 33);
        assert_eq!(reads[Stage::Wake as usize].sum(), 5);
        assert_eq!(reads[Stage::COUNT].sum(), 38);
        assert_eq!(histograms.bytes(Op::Read), 5 * 512);
        assert_eq!(histograms.counts(Op::Write)[Stage::COUNT].count(), 1);
    }
}
