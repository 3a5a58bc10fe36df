//! AES-XTS encryption of sectors, with dm-crypt's plain64 and plain IVs.

use crate::guarded::Guarded;
use crate::payload::Iv;
use crate::secret::VolumeKey;
use crate::tweak::{STRIP, Tweak};
use aes::cipher::array::{Array, ArraySize};
use aes::cipher::consts::U16;
use aes::cipher::{
    BlockCipherDecBackend, BlockCipherDecClosure, BlockCipherDecrypt, BlockCipherEncBackend,
    BlockCipherEncClosure, BlockCipherEncrypt, BlockSizeUser, KeyInit,
};
use aes::{Aes128, Aes256, Block};

/// Size in bytes of the unit that IVs count, regardless of the sector size.
const UNIT: u64 = 512;
/// Number of sectors whose first tweaks are encrypted at a time.
const BATCH: usize = 64;

/// Encrypts and decrypts the sectors of one payload.
///
/// The key schedules are excluded from core dumps and wiped when they are dropped. Threads can
/// share the value through an `Arc`.
pub struct Sectors {
    ciphers: Ciphers,
    sector_size: u32,
    iv: Iv,
}

enum Ciphers {
    Aes128(Guarded<Pair<Aes128>>),
    Aes256(Guarded<Pair<Aes256>>),
}

/// The key schedules for the data and for the tweaks.
struct Pair<C> {
    data: C,
    tweak: C,
}

impl Sectors {
    /// Creates a cipher for sectors of `sector_size` bytes with plain64 IVs from 0.
    ///
    /// # Panics
    ///
    /// Panics if the sector size is not 512, 1024, 2048 or 4096.
    pub fn new(key: &VolumeKey, sector_size: u32) -> Sectors {
        assert!(
            matches!(sector_size, 512 | 1024 | 2048 | 4096),
            "sectors of {sector_size} bytes"
        );
        let key = key.bytes();
        let ciphers = match key.len() {
            32 => Ciphers::Aes128(Guarded::new(Pair::new(key))),
            _ => Ciphers::Aes256(Guarded::new(Pair::new(key))),
        };
        Sectors {
            ciphers,
            sector_size,
            iv: Iv::default(),
        }
    }

    /// Replaces the IV scheme; see [`Payload::iv`](crate::Payload::iv).
    pub fn with_iv(self, iv: Iv) -> Sectors {
        Sectors { iv, ..self }
    }

    /// Returns the sector size in bytes. Areas and their offsets must be multiples of it.
    pub fn sector_size(&self) -> u32 {
        self.sector_size
    }

    /// Encrypts `area` in place. `at` is the area's offset in bytes from the payload's start.
    ///
    /// # Panics
    ///
    /// Panics if `area` is not a whole number of sectors or if `at` is not at the start of a
    /// sector.
    pub fn encrypt(&self, area: &mut [u8], at: u64) {
        self.run(Direction::Encrypt, None, area, at);
    }

    /// Encrypts `from` into `to`, which must have the same length; see [`Sectors::encrypt`].
    ///
    /// # Panics
    ///
    /// Panics under the conditions of [`Sectors::encrypt`], and if the lengths differ.
    pub fn encrypt_from(&self, from: &[u8], to: &mut [u8], at: u64) {
        self.run(Direction::Encrypt, Some(from), to, at);
    }

    /// Decrypts `area` in place. `at` is the area's offset in bytes from the payload's start.
    ///
    /// # Panics
    ///
    /// Panics under the conditions of [`Sectors::encrypt`].
    pub fn decrypt(&self, area: &mut [u8], at: u64) {
        self.run(Direction::Decrypt, None, area, at);
    }

    /// Decrypts `from` into `to`, which must have the same length; see [`Sectors::decrypt`].
    ///
    /// # Panics
    ///
    /// Panics under the conditions of [`Sectors::decrypt`], and if the lengths differ.
    pub fn decrypt_from(&self, from: &[u8], to: &mut [u8], at: u64) {
        self.run(Direction::Decrypt, Some(from), to, at);
    }

    fn run(&self, direction: Direction, from: Option<&[u8]>, to: &mut [u8], at: u64) {
        let size = self.sector_size as usize;
        assert!(
            to.len().is_multiple_of(size) && at.is_multiple_of(size as u64),
            "{} bytes at {at} are not whole sectors",
            to.len()
        );
        assert!(
            from.is_none_or(|from| from.len() == to.len()),
            "areas of different lengths"
        );
        let from = from.map(|from| Block::slice_as_chunks(from).0);
        let (to, _) = Block::slice_as_chunks_mut(to);
        let areas = Areas { from, to };
        match &self.ciphers {
            Ciphers::Aes128(pair) => pair.run(direction, areas, self.seeds(at)),
            Ciphers::Aes256(pair) => pair.run(direction, areas, self.seeds(at)),
        }
    }

    fn seeds(&self, at: u64) -> Seeds {
        Seeds {
            iv: self.iv,
            unit: at / UNIT,
            sector: self.sector_size as usize / size_of::<Block>(),
        }
    }
}

#[derive(Clone, Copy)]
enum Direction {
    Encrypt,
    Decrypt,
}

/// Source and destination blocks. Without `from`, the operation works in place on `to`.
struct Areas<'a> {
    from: Option<&'a [Block]>,
    to: &'a mut [Block],
}

impl<'a> Areas<'a> {
    /// Splits off and returns at most `blocks` blocks from the start.
    fn take(&mut self, blocks: usize) -> Areas<'a> {
        let blocks = blocks.min(self.to.len());
        Areas {
            from: self.from.as_mut().map(|from| {
                let (start, rest) = from.split_at(blocks);
                *from = rest;
                start
            }),
            to: self.to.split_off_mut(..blocks).unwrap_or_default(),
        }
    }
}

/// Generates the first tweak of each sector before its encryption.
#[derive(Clone, Copy)]
struct Seeds {
    iv: Iv,
    /// Number of the next sector's first 512-byte unit.
    unit: u64,
    /// Number of blocks per sector.
    sector: usize,
}

impl Seeds {
    /// Fills `seeds` with the tweaks of the next sectors.
    fn next(&mut self, seeds: &mut [Block]) {
        let step = (self.sector * size_of::<Block>()) as u64 / UNIT;
        for seed in seeds {
            seed.0 = [0; 16];
            seed.0[..8].copy_from_slice(&self.iv.of_unit(self.unit).to_le_bytes());
            self.unit = self.unit.wrapping_add(step);
        }
    }
}

impl<C: KeyInit> Pair<C> {
    fn new(key: &[u8]) -> Pair<C> {
        let (data, tweak) = key.split_at(key.len() / 2);
        let new = |key| C::new_from_slice(key).expect("volume keys have a length of AES");
        Pair {
            data: new(data),
            tweak: new(tweak),
        }
    }
}

impl<C> Pair<C>
where
    C: BlockCipherEncrypt<BlockSize = U16> + BlockCipherDecrypt<BlockSize = U16>,
{
    fn run(&self, direction: Direction, mut areas: Areas<'_>, mut numbers: Seeds) {
        let mut seeds = [Block::default(); BATCH];
        while !areas.to.is_empty() {
            let areas = areas.take(BATCH * numbers.sector);
            let seeds = &mut seeds[..areas.to.len() / numbers.sector];
            numbers.next(seeds);
            self.tweak.encrypt_blocks(seeds);
            let job = Job {
                areas,
                seeds,
                sector: numbers.sector,
            };
            match direction {
                Direction::Encrypt => self.data.encrypt_with_backend(job),
                Direction::Decrypt => self.data.decrypt_with_backend(job),
            }
        }
    }
}

/// The work for a backend of the cipher.
///
/// All methods are inlined into the backend's call, so the compiler generates the whole loop with
/// the backend's CPU instructions.
struct Job<'a> {
    areas: Areas<'a>,
    /// The encrypted first tweak of each sector.
    seeds: &'a [Block],
    /// Number of blocks per sector.
    sector: usize,
}

impl BlockSizeUser for Job<'_> {
    type BlockSize = U16;
}

impl BlockCipherEncClosure for Job<'_> {
    #[inline(always)]
    fn call<B: BlockCipherEncBackend<BlockSize = U16>>(self, backend: &B) {
        self.run::<B::ParBlocksSize>(|blocks| backend.encrypt_par_blocks_inplace(blocks));
    }
}

impl BlockCipherDecClosure for Job<'_> {
    #[inline(always)]
    fn call<B: BlockCipherDecBackend<BlockSize = U16>>(self, backend: &B) {
        self.run::<B::ParBlocksSize>(|blocks| backend.decrypt_par_blocks_inplace(blocks));
    }
}

/// Number of blocks processed at a time: two strips, the parallelism of the widest backend.
const RUN: usize = 2 * STRIP;

impl Job<'_> {
    #[inline(always)]
    fn run<P: ArraySize>(self, cipher: impl Fn(&mut Array<Block, P>)) {
        let Areas { from, to } = self.areas;
        let mut tweaks = Tweaks::new(self.seeds, self.sector);
        let mut masks = [[0; 2]; RUN];
        let mut work = [Block::default(); RUN];
        for (index, to) in to.chunks_mut(RUN).enumerate() {
            for strip in masks[..to.len()].chunks_mut(STRIP) {
                tweaks.next().fill(strip);
            }
            let from = match from {
                Some(from) => &from[index * RUN..][..to.len()],
                None => &*to,
            };
            mask(from, &masks, &mut work);
            let (runs, _) =
                Array::slice_as_chunks_mut(&mut work[..to.len().next_multiple_of(P::USIZE)]);
            for blocks in runs {
                cipher(blocks);
            }
            mask(&work[..to.len()], &masks, to);
        }
    }
}

#[inline(always)]
fn mask(from: &[Block], masks: &[[u64; 2]; RUN], to: &mut [Block]) {
    for ((from, mask), to) in from.iter().zip(masks).zip(to) {
        let mask = u128::from(mask[0]) | u128::from(mask[1]) << 64;
        to.0 = (u128::from_le_bytes(from.0) ^ mask).to_le_bytes();
    }
}

/// Iterates over the first tweak of every strip.
struct Tweaks<'a> {
    seeds: std::slice::Iter<'a, Block>,
    /// Number of strips per sector.
    strips: usize,
    /// Number of strips of the current sector that have not been returned yet.
    left: usize,
    tweak: Tweak,
}

impl<'a> Tweaks<'a> {
    #[inline(always)]
    fn new(seeds: &'a [Block], sector: usize) -> Tweaks<'a> {
        Tweaks {
            seeds: seeds.iter(),
            strips: sector / STRIP,
            left: 0,
            tweak: Tweak::default(),
        }
    }

    #[inline(always)]
    fn next(&mut self) -> Tweak {
        if self.left == 0 {
            self.left = self.strips;
            if let Some(seed) = self.seeds.next() {
                self.tweak = Tweak::from_bytes(seed.0);
            }
        } else {
            self.tweak = self.tweak.shifted(STRIP as u32);
        }
        self.left -= 1;
        self.tweak
    }
}
