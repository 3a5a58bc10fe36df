//! The manifest of an image, which lists the hash of each of its stripes.
//!
//! All numbers are little-endian:
//!
//! | offset | bytes | |
//! |---|---|---|
//! | 0 | 8 | magic |
//! | 8 | 4 | version: 1 |
//! | 12 | 4 | size of a stripe in bytes |
//! | 16 | 8 | size of the disk in bytes |
//! | 24 | 8 | creation time in seconds of the Unix clock |
//! | 32 | 4 | number of stripes |
//! | 36 | 4 | number of entries of the profile |
//! | 40 | 24 | zeroes |
//! | 64 | 32 each | hashes of the stripes; zeroes for a stripe that is all zeroes |
//! | | 4 each | the profile: stripes in the order in which a boot first reads them |
//! | | 32 | BLAKE3 of all preceding bytes |

use crate::hash::Hash;
use std::ops::RangeInclusive;

const MAGIC: &[u8; 8] = b"FthmMfst";
const VERSION: u32 = 1;
/// Size of the header in bytes; the hashes follow it.
pub(crate) const HEADER: usize = 64;
const MOST_STRIPES: u64 = 1 << 26;

/// Range of valid stripe sizes in bytes. The size must also be a power of two.
pub const STRIPE_SIZES: RangeInclusive<u32> = 64 << 10..=16 << 20;

/// A manifest whose parts are consistent with each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    size: u64,
    stripe_size: u32,
    stripes: Vec<Option<Hash>>,
    profile: Vec<u32>,
    made: u64,
}

impl Manifest {
    /// Creates a manifest of a disk of `size` bytes in stripes of `stripe_size` bytes.
    ///
    /// The last stripe may be shorter. In `stripes`, `None` is a stripe of zeroes. `profile`
    /// contains stripe numbers, each at most once. `made` is the creation time in seconds of the
    /// Unix clock.
    pub fn new(
        size: u64,
        stripe_size: u32,
        stripes: Vec<Option<Hash>>,
        profile: Vec<u32>,
        made: u64,
    ) -> Result<Manifest, String> {
        let count = count_of(size, stripe_size)?;
        if stripes.len() as u64 != count {
            let given = stripes.len();
            return Err(format!(
                "a disk of {size} bytes has {count} stripes, not {given}"
            ));
        }
        check_profile(&profile, stripes.len())?;
        Ok(Manifest {
            size,
            stripe_size,
            stripes,
            profile,
            made,
        })
    }

    /// Returns the size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the size in bytes of each stripe but the last.
    pub fn stripe_size(&self) -> u32 {
        self.stripe_size
    }

    /// Returns the hashes of the stripes; `None` for a stripe of zeroes.
    pub fn stripes(&self) -> &[Option<Hash>] {
        &self.stripes
    }

    /// Returns the stripes in the order in which they are first read when the image is used.
    ///
    /// The profile may be empty.
    pub fn profile(&self) -> &[u32] {
        &self.profile
    }

    /// Returns the creation time in seconds of the Unix clock.
    pub fn made(&self) -> u64 {
        self.made
    }

    /// Returns the size of stripe `index` in bytes; 0 if there is no such stripe.
    pub fn len_of(&self, index: u32) -> usize {
        let start = u64::from(index) * u64::from(self.stripe_size);
        let left = self.size.saturating_sub(start);
        left.min(self.stripe_size.into()) as usize
    }

    /// Returns whether `bytes` are the contents of stripe `index`.
    pub fn verify(&self, index: u32, bytes: &[u8]) -> bool {
        let Some(hash) = self.stripes.get(index as usize) else {
            return false;
        };
        let is_right = match hash {
            None => bytes.iter().all(|byte| *byte == 0),
            Some(hash) => Hash::of(bytes) == *hash,
        };
        is_right && bytes.len() == self.len_of(index)
    }

    /// Returns the manifest in its binary form, as this module's documentation defines it.
    pub fn to_bytes(&self) -> Vec<u8> {
        let counts = [self.stripes.len() as u32, self.profile.len() as u32];
        let mut bytes = Vec::with_capacity(len(counts) as usize);
        bytes.extend_from_slice(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.stripe_size.to_le_bytes());
        bytes.extend(self.size.to_le_bytes());
        bytes.extend(self.made.to_le_bytes());
        bytes.extend(counts.iter().flat_map(|count| count.to_le_bytes()));
        bytes.resize(HEADER, 0);
        for hash in &self.stripes {
            bytes.extend(hash.unwrap_or(ZEROES).0);
        }
        bytes.extend(self.profile.iter().flat_map(|index| index.to_le_bytes()));
        let hash = Hash::of(&bytes);
        bytes.extend(hash.0);
        bytes
    }

    /// Parses a manifest. The error says what is wrong with it.
    pub fn parse(bytes: &[u8]) -> Result<Manifest, String> {
        let header = Header::parse(bytes)?;
        if bytes.len() as u64 != header.len() {
            let (has, wanted) = (bytes.len(), header.len());
            return Err(format!(
                "the manifest has {has} bytes, but its header says {wanted}"
            ));
        }
        let (said, hash) = bytes.split_at(bytes.len() - Hash::LEN);
        if Hash::of(said).0 != hash {
            return Err("the checksum is wrong".into());
        }
        let [stripes, _] = header.counts;
        let (hashes, profile) = said[HEADER..].split_at(stripes as usize * Hash::LEN);
        let hashes = hashes.as_chunks().0.iter().map(|hash| Hash(*hash));
        let stripes = hashes
            .map(|hash| (hash != ZEROES).then_some(hash))
            .collect();
        let profile = profile.as_chunks().0.iter();
        let profile = profile.map(|index| u32::from_le_bytes(*index)).collect();
        Manifest::new(
            header.size,
            header.stripe_size,
            stripes,
            profile,
            header.made,
        )
    }
}

/// The value in place of a hash for a stripe of zeroes.
const ZEROES: Hash = Hash([0; Hash::LEN]);

/// Returns the size in bytes of a manifest with these numbers of stripes and profile entries.
fn len([stripes, profile]: [u32; 2]) -> u64 {
    let parts = u64::from(stripes) * Hash::LEN as u64 + u64::from(profile) * 4;
    HEADER as u64 + parts + Hash::LEN as u64
}

/// The checked header of a manifest, from which the size of the whole manifest is known.
#[derive(Debug)]
pub(crate) struct Header {
    stripe_size: u32,
    size: u64,
    made: u64,
    /// Numbers of stripes and of profile entries.
    counts: [u32; 2],
}

impl Header {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Header, String> {
        let Some(header) = bytes.first_chunk::<HEADER>() else {
            return Err(format!(
                "{} bytes long: truncated, or not a manifest",
                bytes.len()
            ));
        };
        if !header.starts_with(MAGIC) {
            return Err("not a manifest".into());
        }
        let word = |at: usize| u32::from_le_bytes(*header[at..].first_chunk().expect("a word"));
        let long = |at: usize| u64::from_le_bytes(*header[at..].first_chunk().expect("a word"));
        if word(8) != VERSION {
            let version = word(8);
            return Err(format!(
                "the manifest's version is {version}, and this program knows {VERSION}; use a \
                 newer fathom"
            ));
        }
        let header = Header {
            stripe_size: word(12),
            size: long(16),
            made: long(24),
            counts: [word(32), word(36)],
        };
        let [stripes, profile] = header.counts;
        let count = count_of(header.size, header.stripe_size)?;
        if u64::from(stripes) != count || profile > stripes {
            return Err("the manifest's numbers contradict each other".into());
        }
        match bytes[40..HEADER].iter().all(|byte| *byte == 0) {
            true => Ok(header),
            false => Err("reserved bytes are not 0".into()),
        }
    }

    /// Returns the size of the whole manifest in bytes.
    pub(crate) fn len(&self) -> u64 {
        len(self.counts)
    }
}

/// Returns the number of stripes of a disk.
fn count_of(size: u64, stripe_size: u32) -> Result<u64, String> {
    if !stripe_size.is_power_of_two() || !STRIPE_SIZES.contains(&stripe_size) {
        return Err(format!(
            "stripes of {stripe_size} bytes: not a power of two from 64 KiB to 16 MiB"
        ));
    }
    let count = size.div_ceil(stripe_size.into());
    match count <= MOST_STRIPES {
        true => Ok(count),
        false => Err(format!(
            "a disk of {size} bytes has {count} stripes of {stripe_size} bytes, and the limit is \
             {MOST_STRIPES}; use larger stripes"
        )),
    }
}

/// Checks that each stripe of the profile exists and occurs only once.
fn check_profile(profile: &[u32], stripes: usize) -> Result<(), String> {
    let mut seen = vec![false; if profile.is_empty() { 0 } else { stripes }];
    for index in profile {
        match seen.get_mut(*index as usize) {
            None => return Err(format!("stripe {index} of its profile does not exist")),
            Some(true) => return Err(format!("stripe {index} is twice in its profile")),
            Some(seen) => *seen = true,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn small() -> Manifest {
        let stripes = vec![None, Some(Hash::of(b"one")), Some(Hash::of(b"two"))];
        Manifest::new(
            (128 << 10) + 7,
            64 << 10,
            stripes,
            vec![2, 0],
            1_700_000_000,
        )
        .unwrap()
    }

    /// The expected bytes follow the layout in docs/archive.md and were written by hand.
    #[test]
    fn the_layout_is_as_it_is_documented() {
        let bytes = small().to_bytes();
        assert_eq!(bytes.len(), 64 + 3 * 32 + 2 * 4 + 32);
        assert_eq!(&bytes[..8], b"FthmMfst");
        assert_eq!(bytes[8..16], [1, 0, 0, 0, 0, 0, 1, 0]);
        assert_eq!(bytes[16..24], [7, 0, 2, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[24..32], 1_700_000_000_u64.to_le_bytes());
        assert_eq!(bytes[32..40], [3, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(bytes[40..96], [0; 56]);
        assert_eq!(bytes[96..128], *blake3::hash(b"one").as_bytes());
        assert_eq!(bytes[160..168], [2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[168..], *blake3::hash(&bytes[..168]).as_bytes());
    }

    #[test]
    fn a_byte_that_is_another_is_refused_wherever_it_is() {
        let bytes = small().to_bytes();
        assert_eq!(Manifest::parse(&bytes).unwrap(), small());
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut changed = bytes.clone();
                changed[at] ^= 1 << bit;
                Manifest::parse(&changed).expect_err(&format!("bit {bit} of byte {at}"));
            }
            Manifest::parse(&bytes[..at]).expect_err("cut short");
        }
        Manifest::parse(&[&bytes[..], &[0]].concat()).expect_err("longer");
    }

    /// Invalid contents are refused even if the checksum is valid.
    #[test]
    fn what_cannot_be_is_refused() {
        let sealed = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = small().to_bytes();
            bytes.truncate(168);
            change(&mut bytes);
            bytes.extend(Hash::of(&bytes).0);
            Manifest::parse(&bytes)
        };
        assert!(sealed(&|_| {}).is_ok());
        let refused = |change: &dyn Fn(&mut Vec<u8>), word: &str| {
            let problem = sealed(change).expect_err(word);
            assert!(problem.contains(word), "{problem}");
        };
        refused(&|b| b[8] = 2, "version is 2");
        refused(&|b| b[14] = 0, "power of two");
        refused(&|b| b[12] = 1, "power of two");
        refused(&|b| b[15] = 4, "power of two");
        refused(&|b| b[22] = 1, "larger stripes");
        refused(&|b| b[18] = 3, "contradict");
        refused(&|b| b[36] = 4, "contradict");
        refused(&|b| b[63] = 1, "reserved");
        refused(&|b| b[160] = 3, "does not exist");
        refused(&|b| b[160] = 0, "twice");
        refused(&|b| b.truncate(164), "bytes");
    }

    #[test]
    fn the_last_stripe_is_what_is_left() {
        let manifest = small();
        let lens = [0, 1, 2, 3, u32::MAX].map(|index| manifest.len_of(index));
        assert_eq!(lens, [64 << 10, 64 << 10, 7, 0, 0]);
        let none = Manifest::new(0, 64 << 10, vec![], vec![], 0).unwrap();
        assert_eq!(Manifest::parse(&none.to_bytes()).unwrap(), none);
        let stripes = vec![None, Some(Hash::of(b"1234567"))];
        let short = Manifest::new((64 << 10) + 7, 64 << 10, stripes, vec![], 0).unwrap();
        assert!(short.verify(1, b"1234567"));
        assert!(!short.verify(1, b"1234568") && !short.verify(2, b""));
        assert!(short.verify(0, &[0; 64 << 10]) && !short.verify(0, &[0; 7]));
    }

    proptest! {
        #[test]
        fn what_was_written_is_read(
            bits in 16u32..=24,
            hashes in proptest::collection::vec(proptest::option::of(any::<[u8; 32]>()), 0..40),
            last in 0u64..64 << 10,
            made: u64,
        ) {
            let stripe_size = 1_u32 << bits;
            let stripes: Vec<_> = hashes.iter().map(|hash| hash.map(Hash)).collect();
            let size = (stripes.len() as u64 * u64::from(stripe_size)).saturating_sub(last);
            let profile: Vec<u32> = (0..stripes.len() as u32).rev().step_by(3).collect();
            let manifest = Manifest::new(size, stripe_size, stripes, profile, made).unwrap();
            let bytes = manifest.to_bytes();
            prop_assert_eq!(Header::parse(&bytes).unwrap().len(), bytes.len() as u64);
            prop_assert_eq!(Manifest::parse(&bytes).unwrap(), manifest);
        }
    }
}
