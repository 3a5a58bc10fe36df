//! Stamps in memory that is there before the measuring starts.

/// One operation, in ticks and bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    pub start: u64,
    pub end: u64,
    pub offset: u64,
    /// As the system call returned it; negative: errno.
    pub result: i64,
}

/// One injected delay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Injection {
    /// When it ended.
    pub end: u64,
    pub ticks: u64,
    /// Of the operation.
    pub number: u64,
}

/// A buffer of fixed size that never allocates or faults once made.
#[derive(Debug)]
pub(super) struct Buffer<T> {
    items: Vec<T>,
    used: usize,
}

impl<T: Copy> Buffer<T> {
    /// Room for `room` items. Locked into memory where the system allows it; touched in any case.
    pub fn new(room: usize, blank: T) -> Buffer<T> {
        let items = vec![blank; room];
        let bytes = std::mem::size_of_val(items.as_slice());
        if bytes > 0 {
            // SAFETY: the range is the vector's own, which is not moved: `items` never grows.
            // Unlocking is left to the unmapping.
            let locked = unsafe { rustix::mm::mlock(items.as_ptr().cast_mut().cast(), bytes) };
            // Refused above RLIMIT_MEMLOCK: the pages were written to above, which is nearly as
            // good on a machine that does not swap.
            let _ = locked;
        }
        Buffer { items, used: 0 }
    }

    /// Takes the next item's place; its index.
    ///
    /// # Panics
    /// When the buffer is full.
    #[inline]
    pub fn push(&mut self, item: T) -> usize {
        let index = self.used;
        self.items[index] = item;
        self.used += 1;
        index
    }

    #[inline]
    pub fn get_mut(&mut self, index: usize) -> &mut T {
        &mut self.items[..self.used][index]
    }

    /// What was put in.
    pub fn into_vec(mut self) -> Vec<T> {
        self.items.truncate(self.used);
        self.items
    }
}

impl Record {
    /// Never all zeroes: such memory would be mapped only when first written to.
    pub const BLANK: Record = Record {
        start: 0,
        end: 0,
        offset: u64::MAX,
        result: 0,
    };
}

impl Injection {
    pub const BLANK: Injection = Injection {
        end: 0,
        ticks: 0,
        number: u64::MAX,
    };
}
