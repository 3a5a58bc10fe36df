//! Who reads sequentially.

/// Readers of one queue that are told apart.
const STREAMS: usize = 4;

/// One reader.
#[derive(Clone, Copy, Default)]
pub(super) struct Stream {
    /// Where it is expected to go on.
    pub(super) next: u64,
    /// How often it has done so.
    pub(super) hits: u64,
    /// Up to where has been read ahead.
    pub(super) ahead: u64,
    /// When it was last seen, in reads of its queue.
    seen: u64,
}

#[derive(Default)]
struct Queue {
    streams: [Stream; STREAMS],
    reads: u64,
}

/// By source.
#[derive(Default)]
pub(super) struct Streams(Vec<Queue>);

impl Streams {
    /// The reader that this read belongs to.
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
        // Another one takes the place of the one that was quiet for longest.
        assert_eq!(streams.note(3, 77 << 30, 4096).hits, 0);
        assert_eq!(streams.note(3, (3 << 30) + 40960, 4096).hits, 10);
        assert_eq!(streams.note(3, 40960, 4096).hits, 0);
        assert_eq!(streams.note(0, (1 << 30) + 40960, 4096).hits, 0);
    }
}
