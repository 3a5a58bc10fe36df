//! What is read and written.

use crate::error::Result;
use crate::memory::{Buffer, Mapping, PAGE};
use crate::options::Load;
use crate::workload::Rng;

/// The data buffers of one worker, whole pages each.
pub struct Buffers {
    map: Mapping,
    stride: usize,
    len: usize,
}

impl Buffers {
    /// One per slot, filled with random data that no storage compresses.
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

    /// A slot's buffer.
    pub fn get(&self, slot: u16) -> Buffer {
        let at = self.map.at(usize::from(slot) * self.stride, self.len);
        // SAFETY: page-aligned and inside the mapping; users of the buffer
        // are the port that owns `self` and its worker.
        unsafe { Buffer::new(at, self.len) }
    }

    /// A slot's data, to be sent.
    pub fn bytes(&self, slot: u16) -> &[u8] {
        let at = self.map.at(usize::from(slot) * self.stride, self.len);
        // SAFETY: inside the mapping; the port that owns `self` changes a slot's
        // buffer by `&mut` of itself only, and its worker while the slot is free.
        unsafe { std::slice::from_raw_parts(at, self.len) }
    }

    /// Copies `data` to a slot's buffer, from byte `at` on.
    pub fn copy_in(&self, slot: u16, at: usize, data: &[u8]) {
        let to = self.part(slot, at, data.len());
        // SAFETY: `part` has checked the range; nobody has a reference to the
        // buffer of a slot that is in flight.
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
