//! Records in memory that is allocated and touched before the measurement starts.

/// Record of one operation, with times in ticks and the offset in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Time before the system call, and before an injected delay.
    pub start: u64,
    /// Time after the completion.
    pub end: u64,
    /// Offset of the block in the file.
    pub offset: u64,
    /// Result of the system call: number of bytes, or a negative errno.
    pub result: i64,
}

/// Record of one injected delay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Injection {
    /// Time of its end, in ticks.
    pub end: u64,
    /// Duration of the delay in ticks.
    pub ticks: u64,
    /// Index of the record of the delayed operation.
    pub number: u64,
}

/// A buffer of fixed size that neither allocates nor page-faults after its creation.
#[derive(Debug)]
pub(super) struct Buffer<T> {
    items: Vec<T>,
    used: usize,
}

impl<T: Copy> Buffer<T> {
    /// Creates a buffer for `room` items. The buffer's memory is touched and, where the system
    /// permits it, locked.
    pub fn new(room: usize, blank: T) -> Buffer<T> {
        let items = vec![blank; room];
        let bytes = std::mem::size_of_val(items.as_slice());
        if bytes > 0 {
            // SAFETY: the range is the vector's own memory, which is not moved, because `items`
            // never grows. Unmapping the memory also unlocks it.
            let locked = unsafe { rustix::mm::mlock(items.as_ptr().cast_mut().cast(), bytes) };
            // mlock fails above RLIMIT_MEMLOCK. The pages were written to above, which is almost as
            // good on a machine that does not swap.
            let _ = locked;
        }
        Buffer { items, used: 0 }
    }

    /// Appends an item, and returns its index.
    ///
    /// # Panics
    /// If the buffer is full.
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

    /// Returns the appended items.
    pub fn into_vec(mut self) -> Vec<T> {
        self.items.truncate(self.used);
        self.items
    }
}

impl Record {
    /// An item that is not all zeroes: the kernel would map zeroed memory only at the first write.
    pub const BLANK: Record = Record {
        start: 0,
        end: 0,
        offset: u64::MAX,
        result: 0,
    };
}

impl Injection {
    /// Item that is not all zeroes, for the same reason as [`Record::BLANK`].
    pub const BLANK: Injection = Injection {
        end: 0,
        ticks: 0,
        number: u64::MAX,
    };
}
