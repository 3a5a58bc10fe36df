//! Transfers one contiguous range completely, across short and interrupted results.

/// Maximum number of retries in a row after EINTR or EAGAIN, which are rare. A file that keeps
/// returning them fails instead of making the worker spin.
const MAX_RETRIES: u8 = 64;

/// A range that is read or written by as many operations as necessary.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Transfer {
    /// Offset of the range in bytes from the start of the file.
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Number of bytes that must be moved; less than `len` if the file may end within the last
    /// block.
    pub(super) needed: u64,
    /// Number of bytes moved so far.
    pub(super) done: u64,
    /// Number of operations in a row that moved nothing.
    retries: u8,
}

/// Meaning of an operation's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Complete,
    /// The rest, from `done` on, must be pushed.
    More,
    /// The file ends, or accepts no more, after `done` bytes.
    Ended,
    /// The transfer failed with this positive errno.
    Failed(i32),
}

impl Transfer {
    pub(super) fn new(offset: u64, len: u64) -> Transfer {
        Transfer {
            offset,
            len,
            needed: len,
            done: 0,
            retries: 0,
        }
    }

    /// Evaluates the `result` of an operation on the rest. Bytes that direct I/O moved beyond a
    /// multiple of `block` (1 without direct I/O) are moved again, so that the rest stays aligned.
    pub(super) fn advance(&mut self, result: i32, block: u64) -> Progress {
        let before = self.done;
        match result {
            // The kernel never moves more bytes than requested.
            n if n >= 0 => self.done += (n as u64).min(self.len - self.done),
            n if n == -libc::EINTR || n == -libc::EAGAIN => {
                self.retries += 1;
                return if self.retries < MAX_RETRIES {
                    Progress::More
                } else {
                    Progress::Failed(libc::EIO)
                };
            }
            n => return Progress::Failed(-n),
        }
        if self.done >= self.needed {
            return Progress::Complete;
        }
        let whole = self.done - self.done % block;
        if whole == before {
            return Progress::Ended;
        }
        self.done = whole;
        self.retries = 0;
        Progress::More
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_results_continue_on_a_block() {
        let mut transfer = Transfer::new(4096, 8192);
        assert_eq!(transfer.advance(1000, 512), Progress::More);
        assert_eq!(transfer.done, 512);
        assert_eq!(transfer.advance(100, 512), Progress::Ended);
        assert_eq!(transfer.done, 612);
        transfer.done = 512;
        assert_eq!(transfer.advance(7680, 512), Progress::Complete);
    }

    #[test]
    fn the_end_of_the_file_is_told_unless_it_was_expected() {
        let mut transfer = Transfer::new(0, 4096);
        assert_eq!(transfer.advance(0, 1), Progress::Ended);
        transfer.needed = 512;
        assert_eq!(transfer.advance(512, 4096), Progress::Complete);
    }

    #[test]
    fn interruptions_are_retried_but_not_for_ever() {
        let mut transfer = Transfer::new(0, 4096);
        let results: Vec<_> = (0..100)
            .map(|_| transfer.advance(-libc::EINTR, 1))
            .take_while(|p| *p == Progress::More)
            .collect();
        assert!(results.len() > 10 && results.len() < 100);
        assert_eq!(
            transfer.advance(-libc::ENOSPC, 1),
            Progress::Failed(libc::ENOSPC)
        );
    }
}
