//! Positions in a packed ring (2.8.1), and how messages express them.

/// A position in the ring of a packed queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Below the queue's size.
    pub index: u16,
    /// The wrap counter, which changes after each lap.
    pub wrap: bool,
}

const WRAP: u16 = 1 << 15;

/// The base of a new packed queue: the first descriptor of the first lap, whose wrap counter is 1.
pub const INITIAL_BASE: u32 = 0x8000_8000;

impl Position {
    /// Reads a position in the form that both event suppression structures and bases have.
    #[inline(always)]
    pub fn of_word(word: u16) -> Position {
        Position {
            index: word & !WRAP,
            wrap: word & WRAP != 0,
        }
    }

    /// Returns the position in the form that both event suppression structures and bases have.
    #[inline(always)]
    pub fn word(self) -> u16 {
        self.index | if self.wrap { WRAP } else { 0 }
    }

    /// Reads avail and used position from a base as in SET_VRING_BASE: the avail position in bits 0
    /// to 15, and the used position in bits 16 to 31.
    pub fn of_base(base: u32) -> (Position, Position) {
        (
            Position::of_word(base as u16),
            Position::of_word((base >> 16) as u16),
        )
    }

    /// Returns the base as in GET_VRING_BASE.
    pub fn base(avail: Position, used: Position) -> u32 {
        u32::from(avail.word()) | u32::from(used.word()) << 16
    }

    /// Returns the position `count` descriptors later, which are at most `size`.
    #[inline(always)]
    pub fn after(self, count: u16, size: u16) -> Position {
        let index = self.index + count;
        if index < size {
            Position { index, ..self }
        } else {
            Position {
                index: index - size,
                wrap: !self.wrap,
            }
        }
    }

    /// Returns the index `count` descriptors earlier, which are at most `size`.
    pub fn before(self, count: u16, size: u16) -> u16 {
        (self.index + size - count) % size
    }

    /// Returns the number of descriptors from `other` up to this position: none if either lies
    /// outside a ring of `size` entries, or if there would be more than `size`.
    pub fn distance_from(self, other: Position, size: u16) -> Option<u16> {
        if self.index >= size || other.index >= size {
            return None;
        }
        let lap = if self.wrap == other.wrap { 0 } else { size };
        let distance = (self.index + lap).checked_sub(other.index)?;
        (distance <= size).then_some(distance)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(index: u16, wrap: bool) -> Position {
        Position { index, wrap }
    }

    #[test]
    fn positions_move_through_the_laps() {
        assert_eq!(at(5, true).after(1, 7), at(6, true));
        assert_eq!(at(6, true).after(1, 7), at(0, false));
        assert_eq!(at(3, false).after(7, 7), at(3, true));
        assert_eq!(at(0, true).after(1, 1), at(0, false));
        assert_eq!(at(1, true).before(3, 7), 5);
        assert_eq!(at(0, true).before(7, 7), 0);
    }

    #[test]
    fn the_distance_is_that_of_descriptors_in_flight() {
        assert_eq!(at(5, true).distance_from(at(2, true), 7), Some(3));
        assert_eq!(at(2, false).distance_from(at(5, true), 7), Some(4));
        assert_eq!(at(5, false).distance_from(at(5, true), 7), Some(7));
        assert_eq!(at(2, true).distance_from(at(5, true), 7), None);
        assert_eq!(at(6, false).distance_from(at(5, true), 7), None);
        assert_eq!(at(7, true).distance_from(at(5, true), 7), None);
    }

    #[test]
    fn bases_have_the_form_of_the_message() {
        let base = Position::base(at(3, true), at(0x7fff, false));
        assert_eq!(base, 0x7fff_8003);
        assert_eq!(Position::of_base(base), (at(3, true), at(0x7fff, false)));
        let new = (at(0, true), at(0, true));
        assert_eq!(Position::of_base(INITIAL_BASE), new);
    }
}
