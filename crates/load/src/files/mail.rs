//! Operations of the mail server: their frequency, and the sizes of files.
//!
//! The talk's profile specifies 100,000 files in 100 directories, sizes of 1 KB to 1 MB, and blocks
//! of 8 KB. The profile's operations are creates, opens, deletes, and random reads and writes. The
//! weights here are a reconstruction: half of the operations are reads, a fifth are appends, and
//! creates, deletes and opens are a tenth each. Therefore the number of files stays the same on
//! average. Sizes are weighted, as in FFSB: eleven sizes, each twice the previous one. Most files
//! are small, like mails (median 8 KB, mean 46 KB).

use std::str::FromStr;

use crate::workload::Rng;

/// Sizes of new files in bytes, with weights whose sum is 100.
pub const SIZES: [(u32, u32); 11] = [
    (1 << 10, 10),
    (2 << 10, 15),
    (4 << 10, 16),
    (8 << 10, 16),
    (16 << 10, 15),
    (32 << 10, 10),
    (64 << 10, 8),
    (128 << 10, 4),
    (256 << 10, 3),
    (512 << 10, 2),
    (1 << 20, 1),
];

/// Smallest size in [`SIZES`], in bytes.
pub const MIN_SIZE: u32 = SIZES[0].0;
/// Largest size in [`SIZES`], in bytes.
pub const MAX_SIZE: u32 = SIZES[SIZES.len() - 1].0;

/// Kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Creates a new file, and writes all of it.
    Create,
    /// Removes a file.
    Delete,
    /// Opens and closes a file.
    Open,
    /// Reads random blocks of a file, as many as the file has.
    Read,
    /// Writes one block at the end of a file.
    Append,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Kind; 5] = [
        Kind::Create,
        Kind::Delete,
        Kind::Open,
        Kind::Read,
        Kind::Append,
    ];

    /// Returns the name of the kind in options and results.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Create => "create",
            Kind::Delete => "delete",
            Kind::Open => "open",
            Kind::Read => "read",
            Kind::Append => "append",
        }
    }
}

/// Relative frequency of each [`Kind`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weights(pub [u16; 5]);

impl Default for Weights {
    fn default() -> Weights {
        Weights([10, 10, 10, 50, 20])
    }
}

impl Weights {
    /// Returns the sum of all weights.
    pub fn sum(&self) -> u32 {
        self.0.iter().map(|w| u32::from(*w)).sum()
    }

    /// Draws the kind of the next operation. At least one weight must not be 0.
    pub fn draw(&self, rng: &mut Rng) -> Kind {
        let weights = Kind::ALL.into_iter().zip(self.0.map(u32::from));
        pick(weights, rng.below(self.sum().into()) as u32)
    }
}

/// Parses weights such as `create=10,read=50`. Kinds that are not listed have weight 0.
impl FromStr for Weights {
    type Err = String;

    fn from_str(text: &str) -> Result<Weights, String> {
        let mut weights = Weights([0; 5]);
        for part in text.split(',') {
            let (name, weight) = part
                .split_once('=')
                .ok_or_else(|| format!("'{part}': write for example create=10,read=50"))?;
            let Some(kind) = Kind::ALL.into_iter().find(|k| k.name() == name) else {
                let names = Kind::ALL.map(Kind::name).join(", ");
                return Err(format!("'{name}' is none of {names}"));
            };
            weights.0[kind as usize] = weight
                .parse()
                .map_err(|_| format!("'{weight}' is not a weight from 0 to {}", u16::MAX))?;
        }
        match weights.sum() {
            0 => Err("all weights are 0".into()),
            _ => Ok(weights),
        }
    }
}

/// Draws the size of a new file from [`SIZES`], limited to `max`.
pub fn draw_size(rng: &mut Rng, max: u32) -> u32 {
    let sum: u32 = SIZES.iter().map(|(_, weight)| weight).sum();
    pick(SIZES.into_iter(), rng.below(sum.into()) as u32).min(max)
}

/// Returns the item whose share of the sum of weights contains `point`.
fn pick<T>(weighted: impl Iterator<Item = (T, u32)>, mut point: u32) -> T {
    for (item, weight) in weighted {
        match point.checked_sub(weight) {
            Some(rest) => point = rest,
            None => return item,
        }
    }
    unreachable!("the point is below the sum of the weights")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRAWS: u32 = 200_000;

    /// Returns whether `count` is within five standard deviations of a binomial distribution.
    fn is_near(count: u32, share: f64) -> bool {
        let n = f64::from(DRAWS);
        (f64::from(count) - n * share).abs() <= 5.0 * (n * share * (1.0 - share)).sqrt()
    }

    #[test]
    fn kinds_come_as_often_as_their_weights_say() {
        for weights in [Weights::default(), Weights([0, 1, 0, 3, 7])] {
            let (mut rng, mut counts) = (Rng::new(1), [0; 5]);
            (0..DRAWS).for_each(|_| counts[weights.draw(&mut rng) as usize] += 1);
            for kind in Kind::ALL {
                let weight = f64::from(weights.0[kind as usize]);
                let (count, share) = (counts[kind as usize], weight / f64::from(weights.sum()));
                assert!(is_near(count, share), "{kind:?} {counts:?}");
            }
        }
    }

    #[test]
    fn sizes_follow_their_weights_up_to_the_largest() {
        let mut rng = Rng::new(2);
        let sizes: Vec<u32> = (0..DRAWS).map(|_| draw_size(&mut rng, MAX_SIZE)).collect();
        for (size, weight) in SIZES {
            let count = sizes.iter().filter(|s| **s == size).count() as u32;
            assert!(is_near(count, f64::from(weight) / 100.0), "{size}: {count}");
        }
        assert!((0..DRAWS).all(|_| draw_size(&mut rng, 5 << 10) <= 5 << 10));
    }

    #[test]
    fn the_documented_figures_are_those_of_the_sizes() {
        assert_eq!(SIZES.iter().map(|(_, w)| w).sum::<u32>(), 100);
        let mean: u32 = SIZES.iter().map(|(s, w)| (s >> 10) * w).sum::<u32>() / 100;
        let half: u32 = SIZES.iter().take(4).map(|(_, w)| w).sum();
        assert_eq!((mean, half), (46, 57));
        assert_eq!((MIN_SIZE, MAX_SIZE), (1 << 10, 1 << 20));
    }

    #[test]
    fn weights_are_written_by_name() {
        assert_eq!("read=2,create=1".parse(), Ok(Weights([1, 0, 0, 2, 0])));
        for bad in [
            "",
            "read",
            "read=",
            "read=-1",
            "write=1",
            "read=0",
            "read=99999",
        ] {
            assert!(bad.parse::<Weights>().is_err(), "{bad}");
        }
    }
}
