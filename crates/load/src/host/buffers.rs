//! Data buffers of the requests.

use crate::error::Result;
use crate::memory::{Buffer, Mapping, PAGE};
use crate::options::Load;
use crate::workload::Rng;

/// The data buffers of a worker, in whole pages.
pub struct Buffers {
    map: Mapping,
    stride: usize,
    len: usize,
}

impl Buffers {
    /// Creates a buffer per slot, filled with random data that storage cannot compress.
    pub fn new(load: &Load) -> Result<Buffers> {
        let len = load.bs as usize;
        let stride = len.next_multiple_of(PAGE);
        let map = Mapping::anonymous(stride * usize::from(load.iodepth))?;
        let buffers = Buffers { map, stride, len };
        let mut rng = Rng::new(load.seed);
        for slot in 0..load.iodepth {
            scribble(buffers.get(slot), &mut rng);
        }
        Ok(buffers)
    }

    /// Returns a slot's buffer.
    pub fn get(&self, slot: u16) -> Buffer {
        let at = self.map.at(usize::from(slot) * self.stride, self.len);
        // SAFETY: the buffer is page-aligned and inside the mapping. Only the port that owns `self`
        // and the port's worker use the buffer.
        unsafe { Buffer::new(at, self.len) }
    }

    /// Returns a slot's data for sending.
    pub fn bytes(&self, slot: u16) -> &[u8] {
        let at = self.map.at(usize::from(slot) * self.stride, self.len);
        // SAFETY: the range is inside the mapping. The port that owns `self` changes a slot's
        // buffer only through `&mut self`, and the port's worker changes it only while the slot is
        // free.
        unsafe { std::slice::from_raw_parts(at, self.len) }
    }

    /// Copies `data` to a slot's buffer, at byte `at`.
    pub fn copy_in(&self, slot: u16, at: usize, data: &[u8]) {
        let to = self.part(slot, at, data.len());
        // SAFETY: `part` has checked the range, and no reference to the buffer of a slot in flight
        // exists.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) }
    }

    /// Fills a part of a slot's buffer with zeroes.
    pub fn zero(&self, slot: u16, at: usize, len: usize) {
        let to = self.part(slot, at, len);
        // SAFETY: as in `copy_in`.
        unsafe { to.write_bytes(0, len) }
    }

    fn part(&self, slot: u16, at: usize, len: usize) -> *mut u8 {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len));
        self.map.at(usize::from(slot) * self.stride + at, len)
    }
}

/// Fills a buffer with random words.
pub fn scribble(buffer: Buffer, rng: &mut Rng) {
    for i in 0..buffer.words() {
        buffer.store(i, rng.next());
    }
}
