//! Which stripes are there for certain, after a loss of power, too: a file of bits. A bit is set once the stripe's
//! data is durable, and is durably not set before its place is taken away.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// What is written at once.
const BLOCK: usize = 512;

pub struct Durable {
    file: File,
    bits: Vec<u8>,
    /// Blocks whose bits are others than the file's.
    changed: Vec<bool>,
}

impl Durable {
    /// A file of zeroes is one where nothing is there.
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

    /// In memory, until [`Durable::write`].
    pub fn set(&mut self, stripe: u32, is_there: bool) {
        if self.has(stripe) != is_there {
            let stripe = stripe as usize;
            self.bits[stripe / 8] ^= 1 << (stripe % 8);
            self.changed[stripe / 8 / BLOCK] = true;
        }
    }

    /// What has been set is durable afterwards. (If not, it is written again the next time.)
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
