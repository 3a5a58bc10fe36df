//! Stamps in memory that is there before the measuring starts.

/// One operation, in ticks and bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub start: u64,
    pub end: u64,
    pub offset: u64,
    /// As the system call returned it; negative: errno.
    pub result: i64,
}

/// One injected delay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Injection {
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

    #[inline]
    pub fn is_full(&self) -> bool {
        self.used == self.items.len()
    }

    pub fn as_slice(&self) -> &[T] {
        &self.items[..self.used]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_full_when_it_is_full() {
        let mut buffer = Buffer::new(2, Record::BLANK);
        let record = Record {
            start: 1,
            end: 2,
            offset: 3,
            result: 4,
        };
        assert_eq!((buffer.push(Record::BLANK), buffer.push(record)), (0, 1));
        assert!(buffer.is_full());
        buffer.get_mut(0).result = 9;
        assert_eq!(buffer.as_slice()[0].result, 9);
        assert_eq!(buffer.as_slice()[1], record);
        assert!(Buffer::new(0, Record::BLANK).is_full());
    }
}
