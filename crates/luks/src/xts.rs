//! AES-XTS of sectors, with the IVs that dm-crypt calls plain64 and plain.

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

/// Bytes of the unit in which IVs count, whatever the size of sectors.
const UNIT: u64 = 512;
/// Sectors whose first tweaks are made at a time.
const BATCH: usize = 64;

/// Encrypts and decrypts the sectors of one payload. Its key schedules are left
/// out of core files and wiped when it is dropped. To be shared by an `Arc`.
pub struct Sectors {
    ciphers: Ciphers,
    sector_size: u32,
    iv: Iv,
}

enum Ciphers {
    Aes128(Guarded<Pair<Aes128>>),
    Aes256(Guarded<Pair<Aes256>>),
}

/// For the data and for the tweaks.
struct Pair<C> {
    data: C,
    tweak: C,
}

impl Sectors {
    /// Sectors of `sector_size` bytes under `key`, with IVs of plain64 from 0.
    ///
    /// # Panics
    ///
    /// Where the sector size is not 512, 1024, 2048 or 4096.
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

    /// With other IVs: see [`Payload::iv`](crate::Payload::iv).
    pub fn with_iv(self, iv: Iv) -> Sectors {
        Sectors { iv, ..self }
    }

    /// Bytes of a sector: what areas and their offsets are multiples of.
    pub fn sector_size(&self) -> u32 {
        self.sector_size
    }

    /// Encrypts `area`, which is `at` bytes after the payload's start.
    ///
    /// # Panics
    ///
    /// Where `area` is not whole sectors or `at` is in the midst of one.
    pub fn encrypt(&self, area: &mut [u8], at: u64) {
        self.run(Direction::Encrypt, None, area, at);
    }

    /// Encrypts `from` into `to`, of the same length; see [`Sectors::encrypt`].
    ///
    /// # Panics
    ///
    /// As that one, and where the lengths differ.
    pub fn encrypt_from(&self, from: &[u8], to: &mut [u8], at: u64) {
        self.run(Direction::Encrypt, Some(from), to, at);
    }

    /// Decrypts `area`, which is `at` bytes after the payload's start.
    ///
    /// # Panics
    ///
    /// As [`Sectors::encrypt`].
    pub fn decrypt(&self, area: &mut [u8], at: u64) {
        self.run(Direction::Decrypt, None, area, at);
    }

    /// Decrypts `from` into `to`, of the same length; see [`Sectors::decrypt`].
    ///
    /// # Panics
    ///
    /// As that one, and where the lengths differ.
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

/// Where blocks come from and where they go; no `from` is in place.
struct Areas<'a> {
    from: Option<&'a [Block]>,
    to: &'a mut [Block],
}

impl<'a> Areas<'a> {
    /// Those of at most `blocks` from the start, which this then lacks.
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

/// The sectors' first tweaks, before they are encrypted.
#[derive(Clone, Copy)]
struct Seeds {
    iv: Iv,
    /// The number of the first unit of 512 bytes.
    unit: u64,
    /// Blocks of a sector.
    sector: usize,
}

impl Seeds {
    /// Fills in those of the next sectors.
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

/// What a backend of the cipher is to do. The compiler makes all of it for
/// the instructions that the backend was made for.
struct Job<'a> {
    areas: Areas<'a>,
    /// The first tweak of each sector.
    seeds: &'a [Block],
    /// Blocks of a sector.
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

/// Blocks of a run: two strips, which is what the widest backend takes.
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

/// The first tweak of every strip.
struct Tweaks<'a> {
    seeds: std::slice::Iter<'a, Block>,
    /// Strips of a sector.
    strips: usize,
    /// Of them, those to come of the present sector.
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
