//! The map of durable stripes, a file with one bit per stripe.
//!
//! Durable stripes survive a power failure. A bit is set after the stripe's data is durable, and is
//! durably cleared before the stripe's space is freed.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Size of a write in bytes.
const BLOCK: usize = 512;

pub struct Durable {
    file: File,
    bits: Vec<u8>,
    /// For each block, whether its bits differ from those in the file.
    changed: Vec<bool>,
}

impl Durable {
    /// Opens the map and extends the file if necessary. In a file of zeroes, no stripe is durable.
    pub fn open(file: File, stripes: u64) -> io::Result<Durable> {
        let len = (stripes.div_ceil(8) as usize).next_multiple_of(BLOCK);
        if file.metadata()?.len() < len as u64 {
            file.set_len(len as u64)?;
        }
        let mut bits = vec![0; len];
        file.read_exact_at(&mut bits, 0)?;
        let changed = vec![false; len / BLOCK];
        Ok(Durable {
            file,
            bits,
            changed,
        })
    }

    pub fn has(&self, stripe: u32) -> bool {
        let stripe = stripe as usize;
        self.bits[stripe / 8] & 1 << (stripe % 8) != 0
    }

    /// Changes a bit in memory. [`Durable::write`] writes it to the file.
    pub fn set(&mut self, stripe: u32, is_there: bool) {
        if self.has(stripe) != is_there {
            let stripe = stripe as usize;
            self.bits[stripe / 8] ^= 1 << (stripe % 8);
            self.changed[stripe / 8 / BLOCK] = true;
        }
    }

    /// Writes all changed bits and makes them durable. After an error, the next call writes them
    /// again.
    pub fn write(&mut self) -> io::Result<()> {
        let blocks: Vec<usize> = (0..self.changed.len())
            .filter(|&n| self.changed[n])
            .collect();
        for &block in &blocks {
            let at = block * BLOCK;
            self.file
                .write_all_at(&self.bits[at..at + BLOCK], at as u64)?;
        }
        if !blocks.is_empty() {
            self.file.sync_data()?;
        }
        blocks
            .into_iter()
            .for_each(|block| self.changed[block] = false);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_those_that_were_written() {
        let file = tempfile::tempfile().unwrap();
        let open = || Durable::open(file.try_clone().unwrap(), 10_000).unwrap();
        let mut durable = open();
        for stripe in [0, 4095, 4096, 9999] {
            durable.set(stripe, true);
        }
        assert!(!open().has(0));
        durable.write().unwrap();
        durable.set(4095, false);
        assert!(durable.has(4096) && !durable.has(4095) && open().has(4095));
        durable.write().unwrap();
        let there: Vec<u32> = (0..10_000).filter(|&stripe| open().has(stripe)).collect();
        assert_eq!(there, [0, 4096, 9999]);
    }
}
