//! Copies original data to the scratch file before users overwrite it.

use super::terms::Failed;
use fathom_core::{AlignedBuffer, Op, is_zero};
use fathom_stack::{Client, DiskReply, DiskRequest, Job, Past, block_of};
use fathom_units::{Size, cause};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes per read, unless a block is longer, and number of reads in flight.
const PIECE: u64 = 1 << 20;
const DEPTH: usize = 8;

/// Maximum wait between two checks whether the backup is over.
const TICK: Duration = Duration::from_millis(500);

/// Maximum time that users' writes are held until [`Past::begin`] resumes them.
const HELD: Duration = Duration::from_secs(5);

/// The state of the copy-before-write thread.
pub(super) struct Keeper {
    pub(super) past: Arc<Past>,
    pub(super) job: Job,
    /// The disk below the tap at which users' writes wait.
    pub(super) disk: Client,
    /// The scratch file, which has the size of the disk and is initially empty.
    pub(super) scratch: File,
    pub(super) most: u64,
    /// Number of bytes of the disk in the scratch file.
    pub(super) kept: Arc<AtomicU64>,
    pub(super) failed: Failed,
}

impl Keeper {
    /// Copies data before it is overwritten, until the backup is over.
    pub(super) fn run(mut self) {
        let mut free = Vec::new();
        let mut held = None;
        while !self.past.is_over() {
            if self.past.holds() && held.get_or_insert_with(Instant::now).elapsed() > HELD {
                self.past
                    .give_up("the disk's requests were held for too long".into());
            }
            let wanted = self.past.wanted(TICK);
            if let Err(problem) = self.keep_all(wanted, &mut free) {
                self.past.give_up(problem);
            }
        }
        if let Some(problem) = self.past.problem() {
            (self.failed)(problem);
        }
    }

    fn keep_all(
        &mut self,
        wanted: Vec<Range<u64>>,
        free: &mut Vec<AlignedBuffer>,
    ) -> Result<(), String> {
        let most = PIECE.max(block_of(self.past.size()));
        let pieces = wanted.into_iter().flat_map(|range| pieces(range, most));
        let mut pieces: VecDeque<_> = pieces.collect();
        let (mut in_flight, mut outcome) = (0, Ok(()));
        loop {
            while in_flight < DEPTH
                && outcome.is_ok()
                && let Some(piece) = pieces.pop_front()
            {
                match free
                    .pop()
                    .map_or_else(|| AlignedBuffer::try_new(most as usize), Ok)
                {
                    Ok(pages) => {
                        let len = piece.end - piece.start;
                        self.disk
                            .ask(DiskRequest::new(Op::Read, piece.start, len, Some(pages)));
                        in_flight += 1;
                    }
                    Err(error) => {
                        outcome = Err(format!("no memory to copy data: {}", cause(error)))
                    }
                }
            }
            if in_flight == 0 {
                return outcome;
            }
            let DiskReply { ask, errno, .. } = self.job.wait();
            in_flight -= 1;
            let Some(pages) = ask.pages else { continue };
            let range = ask.offset..ask.offset + ask.len;
            let bytes = &pages.bytes()[..ask.len as usize];
            let kept = match errno {
                0 => self.keep(range, bytes),
                errno => Err(format!(
                    "cannot read data before it is overwritten: {}",
                    cause(io::Error::from_raw_os_error(errno))
                )),
            };
            outcome = outcome.and(kept);
            free.push(pages);
        }
    }

    fn keep(&self, range: Range<u64>, bytes: &[u8]) -> Result<(), String> {
        // Zeroes need no write: holes read as zeroes.
        if !is_zero(bytes) {
            let kept = self.kept.load(Ordering::Relaxed) + bytes.len() as u64;
            if kept > self.most {
                return Err(format!(
                    "the overwritten data exceeds its limit of {} (--scratch-size)",
                    Size(self.most)
                ));
            }
            let written = self.scratch.write_all_at(bytes, range.start);
            written.map_err(|error| format!("cannot write the scratch file: {}", cause(error)))?;
            self.kept.store(kept, Ordering::Relaxed);
        }
        self.past.keep(range);
        Ok(())
    }
}

/// Splits a range of whole blocks into pieces at multiples of `len`.
fn pieces(range: Range<u64>, len: u64) -> impl Iterator<Item = Range<u64>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        (at < range.end).then(|| {
            let piece = at..range.end.min((at / len + 1) * len);
            at = piece.end;
            piece
        })
    })
}
