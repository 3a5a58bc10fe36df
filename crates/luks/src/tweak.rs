//! Tweaks of XTS: elements of GF(2^128) as IEEE 1619 writes them.

/// Blocks whose tweaks are made at a time: those of 512 bytes.
pub const STRIP: usize = 32;

/// An element: the low and the high 64 bits, of little-endian numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tweak {
    pub low: u64,
    pub high: u64,
}

impl Tweak {
    /// Times x to the power of `by`, which is at most 56.
    ///
    /// Free of branches and of a chain from one power to the next, so that a
    /// compiler makes many at once.
    #[inline(always)]
    pub fn shifted(self, by: u32) -> Tweak {
        // In two steps, as a shift by 64 is none.
        let carry = |word: u64| (word >> 1) >> (63 - by);
        let over = carry(self.high);
        // x^128 is x^7 + x^2 + x + 1.
        let reduced = over ^ (over << 1) ^ (over << 2) ^ (over << 7);
        Tweak {
            low: (self.low << by) ^ reduced,
            high: (self.high << by) | carry(self.low),
        }
    }

    /// Of the 16 bytes that the cipher made of a sector's number.
    #[inline(always)]
    pub fn from_bytes(bytes: [u8; 16]) -> Tweak {
        let number = u128::from_le_bytes(bytes);
        Tweak {
            low: number as u64,
            high: (number >> 64) as u64,
        }
    }

    /// This tweak and the `STRIP - 1` that follow.
    #[inline(always)]
    pub fn fill(self, strip: &mut [[u64; 2]]) {
        for (power, to) in (0u32..).zip(strip) {
            let tweak = self.shifted(power);
            *to = [tweak.low, tweak.high];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_doublings_are_one_shift() {
        let first = Tweak {
            low: 0x8123_4567_89ab_cdef,
            high: 0xfedc_ba98_7654_3210,
        };
        let mut doubled = first;
        for by in 0..=56 {
            assert_eq!(first.shifted(by), doubled, "{by}");
            doubled = doubled.shifted(1);
        }
    }

    #[test]
    fn doubling_reduces_by_the_polynomial() {
        let top = Tweak {
            low: 0,
            high: 1 << 63,
        };
        assert_eq!(top.shifted(1), Tweak { low: 0x87, high: 0 });
    }
}
