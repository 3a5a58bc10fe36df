//! Requests that are processed in pieces.

use fathom_core::{Cx, RequestId};
use std::collections::VecDeque;
use std::ops::Range;

/// The progress of a request.
#[derive(Clone, Copy, Default)]
struct Progress {
    /// Number of bytes that are not done.
    left: u64,
    /// Error number of the first piece that failed; 0 if none.
    errno: i32,
}

/// Requests of one worker, which are split into pieces and completed with their last piece.
#[derive(Default)]
pub(super) struct SplitRequests {
    /// Indexed by the request's slot in the slab.
    progress: Vec<Progress>,
    /// Requests with parts that have not begun, and the offset of the first such part.
    waiting: VecDeque<(RequestId, u64)>,
}

impl SplitRequests {
    /// Adds a request.
    pub(super) fn add(&mut self, cx: &Cx, id: RequestId) {
        let (request, index) = (&cx.slab[id], id.0 as usize);
        if self.progress.len() <= index {
            self.progress.resize(index + 1, Progress::default());
        }
        self.progress[index] = Progress {
            left: request.len,
            errno: 0,
        };
        self.waiting.push_back((id, request.at));
    }

    /// Returns the next piece: its request, and its range from [`Request::at`] on.
    ///
    /// `end` returns the greatest offset at which a piece may end that begins at an offset. The
    /// rest of a request that has failed is skipped.
    ///
    /// [`Request::at`]: fathom_core::Request::at
    pub(super) fn next_piece(
        &mut self,
        cx: &mut Cx,
        end: impl Fn(u64) -> u64,
    ) -> Option<(RequestId, Range<u64>)> {
        while let Some(&(id, from)) = self.waiting.front() {
            let request = &cx.slab[id];
            let last = request.at + request.len;
            if self.progress[id.0 as usize].errno != 0 || from == last {
                self.waiting.pop_front();
                self.piece_done(cx, id, last - from, 0);
                continue;
            }
            let to = last.min(end(from));
            match to == last {
                true => drop(self.waiting.pop_front()),
                false => self.waiting[0].1 = to,
            }
            return Some((id, from..to));
        }
        None
    }

    /// Notes that `len` bytes of a request are done, and completes it if they were the last ones.
    pub(super) fn piece_done(&mut self, cx: &mut Cx, id: RequestId, len: u64, errno: i32) {
        let progress = &mut self.progress[id.0 as usize];
        progress.left -= len;
        if progress.errno == 0 {
            progress.errno = errno;
        }
        if progress.left == 0 {
            cx.complete(id, progress.errno);
        }
    }
}
