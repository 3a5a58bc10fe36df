//! Pages of the kernel's ring buffer, as `per_cpu/cpuN/trace_pipe_raw` provides them
//! (include/linux/ring_buffer.h; Documentation/trace/ring-buffer-design.rst).
//!
//! A page starts with the time of its first record and the number of bytes in use. Each record has
//! a header of 32 bits: 5 bits hold its type or its length in words, and 27 bits the time since the
//! previous record.

use super::format::{Layout, number};

/// Flag in the commit field: events were dropped before this page.
const MISSED: u64 = 1 << 31;
/// Flag in the commit field: the number of dropped events follows the last record.
const MISSED_STORED: u64 = 1 << 30;
/// Mask of the commit field's length in bytes.
const LENGTH: u64 = (1 << 27) - 1;

const PADDING: u32 = 29;
const TIME_EXTEND: u32 = 30;
const TIME_STAMP: u32 = 31;
const DELTA_BITS: u32 = 27;
/// Bits of an absolute time. The higher bits are those of the previous time.
const STAMP_BITS: u32 = 59;

/// A record: its time, and the data that the event's format describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// Time in ticks of the instance's trace clock.
    pub time: u64,
    /// Bytes of the record without its header.
    pub data: &'a [u8],
}

/// The records of a page in order. Iterating never fails: a damaged page ends early.
#[derive(Clone, Debug)]
pub struct Page<'a> {
    rest: &'a [u8],
    time: u64,
    missed: Option<u64>,
    is_damaged: bool,
}

impl<'a> Page<'a> {
    /// Parses a page's header. Returns `None` if the page is shorter than a header.
    pub fn parse(page: &'a [u8], layout: &Layout) -> Option<Page<'a>> {
        let time = number(page.get(..8)?, false)?;
        let end = layout.commit + layout.commit_size;
        let commit = number(page.get(layout.commit..end)?, false)?;
        let data = page.get(layout.data..)?;
        let length = (commit & LENGTH) as usize;
        let missed = (commit & MISSED != 0).then(|| {
            let count = data.get(length..length.saturating_add(8));
            let stored = count.filter(|_| commit & MISSED_STORED != 0);
            stored.and_then(|count| number(count, false)).unwrap_or(0)
        });
        Some(Page {
            rest: data.get(..length).unwrap_or(data),
            time,
            missed,
            is_damaged: length > data.len(),
        })
    }

    /// Returns the number of meaningful bytes of `page`; the rest need not be stored.
    pub fn used(page: &[u8], layout: &Layout) -> usize {
        let commit = page.get(layout.commit..layout.commit + layout.commit_size);
        let commit = commit.and_then(|bytes| number(bytes, false)).unwrap_or(0);
        let count = if commit & MISSED_STORED == 0 { 0 } else { 8 };
        page.len()
            .min(layout.data + (commit & LENGTH) as usize + count)
    }

    /// Returns the time of the first record.
    pub fn time(&self) -> u64 {
        self.time
    }

    /// Returns the number of events dropped before this page: `None` if none, 0 if it is unknown.
    pub fn missed(&self) -> Option<u64> {
        self.missed
    }

    /// Returns whether the page ended within a record.
    pub fn is_damaged(&self) -> bool {
        self.is_damaged
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(length)?;
        self.rest = rest;
        Some(taken)
    }

    fn word(&mut self) -> Option<u32> {
        let bytes = self.take(4)?;
        Some(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    /// Returns the next record. Outer `None`: the page ends within a record. Inner `None`: the page
    /// ends here.
    fn step(&mut self) -> Option<Option<Record<'a>>> {
        while !self.rest.is_empty() {
            let header = self.word()?;
            let (kind, delta) = (header & 31, u64::from(header >> 5));
            match kind {
                PADDING if delta == 0 => break,
                PADDING => {
                    // The event was discarded, but its delta still counts for the events that
                    // follow.
                    let length = self.word()?;
                    self.take((length as usize).checked_sub(4)?)?;
                    self.advance(delta);
                }
                TIME_EXTEND => {
                    let high = u64::from(self.word()?);
                    self.advance(high << DELTA_BITS | delta);
                }
                TIME_STAMP => {
                    let high = u64::from(self.word()?);
                    self.time = absolute(high << DELTA_BITS | delta, self.time);
                }
                _ => {
                    let length = match kind {
                        0 => (self.word()? as usize).checked_sub(4)?,
                        words => words as usize * 4,
                    };
                    let data = self.take(length)?;
                    self.advance(delta);
                    let time = self.time;
                    return Some(Some(Record { time, data }));
                }
            }
        }
        self.rest = &[];
        Some(None)
    }

    fn advance(&mut self, delta: u64) {
        self.time = self.time.wrapping_add(delta);
    }
}

/// Adds the 5 high bits that a 59-bit time lacks, taken from the previous time.
fn absolute(stamp: u64, before: u64) -> u64 {
    let stamp = stamp & ((1 << STAMP_BITS) - 1);
    let high = before >> STAMP_BITS << STAMP_BITS;
    if high != 0 && (stamp | high) < before {
        return (stamp | high).wrapping_add(1 << STAMP_BITS);
    }
    stamp | high
}

impl<'a> Iterator for Page<'a> {
    type Item = Record<'a>;

    #[inline]
    fn next(&mut self) -> Option<Record<'a>> {
        match self.step() {
            Some(record) => record,
            None => {
                self.rest = &[];
                self.is_damaged = true;
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LAYOUT: Layout = Layout {
        page: 4096,
        commit: 8,
        commit_size: 8,
        data: 16,
    };

    /// Builds a page as the kernel would write it.
    fn page(time: u64, commit_flags: u64, words: &[u32]) -> Vec<u8> {
        let mut page = time.to_le_bytes().to_vec();
        page.extend(((words.len() as u64 * 4) | commit_flags).to_le_bytes());
        page.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        page
    }

    fn header(kind: u32, delta: u32) -> u32 {
        kind | delta << 5
    }

    #[test]
    fn every_kind_of_record_counts_its_time() {
        let words = [
            [header(2, 0), 1, 2].as_slice(), // the first, at the page's time
            &[header(TIME_EXTEND, 5), 1, header(1, 2), 3], // 2^27 + 7 later
            &[header(PADDING, 10), 8, 77],   // a discarded one
            &[header(0, 1), 12, 4, 5],       // 8 bytes by its own length
            &[header(TIME_STAMP, 9), 2, header(1, 0), 6], // absolute
            &[header(PADDING, 0), 1, 2, 3],  // the end
        ]
        .concat();
        let bytes = page(1000, 0, &words);
        let mut page = Page::parse(&bytes, &LAYOUT).unwrap();
        let records: Vec<(u64, usize)> = page.by_ref().map(|r| (r.time, r.data.len())).collect();
        let far = 1000 + (1 << 27) + 7;
        assert_eq!(
            records,
            [(1000, 8), (far, 4), (far + 11, 8), ((2 << 27) + 9, 4)]
        );
        assert!(!page.is_damaged());
        assert_eq!(page.missed(), None);
    }

    #[test]
    fn absolute_times_take_their_high_bits_from_before() {
        let high = 3 << STAMP_BITS;
        assert_eq!(absolute(100, 50), 100);
        assert_eq!(absolute(100, high | 50), high | 100);
        assert_eq!(absolute(40, high | 50), (4 << STAMP_BITS) | 40);
    }

    #[test]
    fn missed_events_are_told_with_their_number_where_it_is() {
        let mut bytes = page(1, MISSED | MISSED_STORED, &[header(1, 0), 9]);
        bytes.extend(42u64.to_le_bytes());
        let with = Page::parse(&bytes, &LAYOUT).unwrap();
        assert_eq!(with.missed(), Some(42));
        assert_eq!(with.count(), 1);
        assert_eq!(Page::used(&bytes, &LAYOUT), bytes.len());
        let bytes = page(1, MISSED, &[header(1, 0), 9]);
        assert_eq!(Page::parse(&bytes, &LAYOUT).unwrap().missed(), Some(0));
    }

    #[test]
    fn a_page_cut_within_a_record_says_so() {
        let bytes = page(1, 0, &[header(1, 0), 9, header(4, 0), 1]);
        let mut page = Page::parse(&bytes, &LAYOUT).unwrap();
        assert_eq!(page.by_ref().count(), 1);
        assert!(page.is_damaged());
        assert!(Page::parse(&bytes[..12], &LAYOUT).is_none());
    }

    proptest! {
        /// Reading ends for any page content, with at most one record per word.
        #[test]
        fn no_page_is_too_strange(bytes in proptest::collection::vec(any::<u8>(), 0..5000)) {
            let used = Page::used(&bytes, &LAYOUT);
            prop_assert!(used <= bytes.len());
            if let Some(mut page) = Page::parse(&bytes, &LAYOUT) {
                prop_assert!(page.by_ref().count() <= bytes.len() / 4);
                prop_assert_eq!(page.next(), None);
            }
        }

        /// The same for headers that look real: small lengths and every type.
        #[test]
        fn no_sequence_of_headers_is_too_strange(
            words in proptest::collection::vec((0u32..32, 0u32..40), 0..1000),
            flags in prop_oneof![Just(0), Just(MISSED), Just(MISSED | MISSED_STORED)],
        ) {
            let words: Vec<u32> = words.iter().map(|&(kind, rest)| header(kind, rest)).collect();
            let bytes = page(u64::MAX - 5, flags, &words);
            let count = Page::parse(&bytes, &LAYOUT).unwrap().count();
            prop_assert!(count <= words.len());
        }
    }
}
