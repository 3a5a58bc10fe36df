//! Detects sequential readers.

/// Number of readers per queue that are distinguished.
const STREAMS: usize = 4;

/// A sequential reader.
#[derive(Clone, Copy, Default)]
pub(super) struct Stream {
    /// Offset at which the next read is expected.
    pub(super) next: u64,
    /// Number of reads that met this expectation.
    pub(super) hits: u64,
    /// Offset up to which data was read ahead.
    pub(super) ahead: u64,
    /// Number of reads in the queue when the reader was last seen.
    seen: u64,
}

#[derive(Default)]
struct Queue {
    streams: [Stream; STREAMS],
    reads: u64,
}

/// The readers by source.
#[derive(Default)]
pub(super) struct Streams(Vec<Queue>);

impl Streams {
    /// Returns the reader to which this read belongs.
    pub(super) fn note(&mut self, source: u16, offset: u64, len: u64) -> &mut Stream {
        let index = usize::from(source);
        if index >= self.0.len() {
            self.0.resize_with(index + 1, Queue::default);
        }
        let queue = &mut self.0[index];
        queue.reads += 1;
        let goes_on = |stream: &Stream| stream.seen > 0 && stream.next == offset;
        let known = queue.streams.iter().position(goes_on);
        let oldest = || {
            let streams = queue.streams.iter().enumerate();
            streams.min_by_key(|(_, s)| s.seen).map_or(0, |(n, _)| n)
        };
        let stream = match known {
            Some(n) => {
                queue.streams[n].hits += 1;
                &mut queue.streams[n]
            }
            None => {
                let n = oldest();
                queue.streams[n] = Stream::default();
                &mut queue.streams[n]
            }
        };
        stream.seen = queue.reads;
        stream.next = offset + len;
        stream
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_readers_are_told_apart() {
        let mut streams = Streams::default();
        for n in 0..10 {
            for reader in 0..STREAMS as u64 {
                let stream = streams.note(3, (reader << 30) + n * 4096, 4096);
                assert_eq!(stream.hits, n);
            }
        }
        // A new reader replaces the one that was idle for longest.
        assert_eq!(streams.note(3, 77 << 30, 4096).hits, 0);
        assert_eq!(streams.note(3, (3 << 30) + 40960, 4096).hits, 10);
        assert_eq!(streams.note(3, 40960, 4096).hits, 0);
        assert_eq!(streams.note(0, (1 << 30) + 40960, 4096).hits, 0);
    }
}
