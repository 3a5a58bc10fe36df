//! XTS tweaks: elements of GF(2^128) in the representation of IEEE 1619.

/// Number of blocks whose tweaks are computed at a time: 512 bytes of data.
pub const STRIP: usize = 32;

/// An element of the field, stored as the low and high 64 bits of a little-endian number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tweak {
    pub low: u64,
    pub high: u64,
}

impl Tweak {
    /// Multiplies the tweak by x to the power of `by`, which must be at most 56.
    ///
    /// The computation has no branches and does not depend on a previous power, so the compiler can
    /// vectorize a loop over powers.
    #[inline(always)]
    pub fn shifted(self, by: u32) -> Tweak {
        // The shift has two steps because Rust does not allow a shift by 64 bits.
        let carry = |word: u64| (word >> 1) >> (63 - by);
        let over = carry(self.high);
        // In this field, x^128 equals x^7 + x^2 + x + 1.
        let reduced = over ^ (over << 1) ^ (over << 2) ^ (over << 7);
        Tweak {
            low: (self.low << by) ^ reduced,
            high: (self.high << by) | carry(self.low),
        }
    }

    /// Converts the 16 bytes that the cipher computed from a sector's IV.
    #[inline(always)]
    pub fn from_bytes(bytes: [u8; 16]) -> Tweak {
        let number = u128::from_le_bytes(bytes);
        Tweak {
            low: number as u64,
            high: (number >> 64) as u64,
        }
    }

    /// Fills `strip` with this tweak and the `STRIP - 1` tweaks that follow it.
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
