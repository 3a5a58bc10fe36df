//! A private copy of a descriptor of a split queue (2.7.5) or a packed one (2.8.13).

const F_NEXT: u64 = 1 << FLAGS_SHIFT;
const F_WRITE: u64 = 2 << FLAGS_SHIFT;
const F_INDIRECT: u64 = 4 << FLAGS_SHIFT;
const FLAGS_SHIFT: u32 = 32;
const NEXT_SHIFT: u32 = 48;

/// Place of the flags in the second word of a descriptor of a packed queue.
const PACKED_FLAGS_SHIFT: u32 = 48;

/// A private copy of a descriptor. Stored as the two words that were read, so that it stays in
/// registers.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor {
    addr: u64,
    /// Length, flags and next.
    rest: u64,
}

impl Descriptor {
    #[inline(always)]
    pub fn new([addr, rest]: [u64; 2]) -> Descriptor {
        Descriptor { addr, rest }
    }

    /// Converts a descriptor of a packed queue; `next` is the index of the one after it.
    #[inline(always)]
    pub fn from_packed([addr, rest]: [u64; 2], next: u16) -> Descriptor {
        let flags = rest >> PACKED_FLAGS_SHIFT << FLAGS_SHIFT & (F_NEXT | F_WRITE | F_INDIRECT);
        let rest = rest & u64::from(u32::MAX) | flags | u64::from(next) << NEXT_SHIFT;
        Descriptor { addr, rest }
    }

    /// Converts the descriptor at `index` of a packed queue's indirect table of `entries`. The
    /// descriptors follow one another, and only the write flag has a meaning (2.8.7).
    #[inline(always)]
    pub fn from_packed_table([addr, rest]: [u64; 2], index: u32, entries: u32) -> Descriptor {
        let next = index + 1;
        let link = if next < entries { F_NEXT } else { 0 };
        let flags = rest >> PACKED_FLAGS_SHIFT << FLAGS_SHIFT & F_WRITE | link;
        let rest = rest & u64::from(u32::MAX) | flags | u64::from(next) << NEXT_SHIFT;
        Descriptor { addr, rest }
    }

    /// Returns the two words in the format of split queues.
    #[inline(always)]
    pub fn words(self) -> [u64; 2] {
        [self.addr, self.rest]
    }

    #[inline(always)]
    pub fn addr(self) -> u64 {
        self.addr
    }

    #[inline(always)]
    pub fn len(self) -> u32 {
        self.rest as u32
    }

    /// Returns whether the device writes to the buffer.
    #[inline(always)]
    pub fn is_writable(self) -> bool {
        self.rest & F_WRITE != 0
    }

    #[inline(always)]
    pub fn is_indirect(self) -> bool {
        self.rest & F_INDIRECT != 0
    }

    /// Returns the index of the next descriptor, if this one is not the last.
    #[inline(always)]
    pub fn next(self) -> Option<u32> {
        (self.rest & F_NEXT != 0).then_some((self.rest >> NEXT_SHIFT) as u32)
    }
}
