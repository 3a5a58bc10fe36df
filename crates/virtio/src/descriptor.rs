//! A private copy of a descriptor (2.7.5).

const F_NEXT: u64 = 1 << FLAGS_SHIFT;
const F_WRITE: u64 = 2 << FLAGS_SHIFT;
const F_INDIRECT: u64 = 4 << FLAGS_SHIFT;
const FLAGS_SHIFT: u32 = 32;
const NEXT_SHIFT: u32 = 48;

/// A private copy of a descriptor. Stored as the two words that were read, so that it stays in
/// registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptor {
    addr: u64,
    /// Length, flags and next.
    rest: u64,
}

impl Descriptor {
    #[inline(always)]
    pub fn new([addr, rest]: [u64; 2]) -> Descriptor {
        Descriptor { addr, rest }
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
