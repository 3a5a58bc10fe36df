//! What a completion belongs to.

use crate::request::RequestId;

/// Travels with everything that a worker hands to its engine and comes back
/// with the completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token(u64);

/// A token, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// I/O of the channel, for this request or for none
    /// ([`RequestId::NOBODY`]); `tag` is the channel's own.
    Request { id: RequestId, tag: u16 },
    /// A source's kick. The generation tells a kick of an earlier source in
    /// the same slot.
    Kick { slot: u16, generation: u32 },
    /// I/O of a source itself, on a socket; `tag` is the source's own.
    Source { slot: u16, generation: u32, tag: u8 },
    /// Another thread has left a command.
    Mailbox,
    /// The engine's own bookkeeping; nobody waits for it.
    Engine,
}

/// Tags of [`Token::channel`] by which layers of one channel are woken: each its own, since a layer that is above
/// several passes on to all of them what is not for itself.
pub mod woken {
    /// An image's tasks.
    pub const IMAGE: u16 = u16::MAX;
    /// Who has waited for a part of a block.
    pub const BYTES: u16 = u16::MAX - 1;
    /// Who has waited for stripes of a base image.
    pub const BASE: u16 = u16::MAX - 2;
    /// A library has ended requests.
    pub const LIBRARY: u16 = u16::MAX - 3;
    /// Who has waited for parts of a disk that comes while it is used.
    pub const ARRIVING: u16 = u16::MAX - 4;
    /// Who has waited for what is there to be kept before it is changed.
    pub const KEPT: u16 = u16::MAX - 5;
    /// What others have encrypted or decrypted.
    pub const SEALED: u16 = u16::MAX - 6;
    /// What others have read of another program's image.
    pub const FOREIGN: u16 = u16::MAX - 7;
}

// From the top: 4 bits of kind, 12 bits of the member of a pool, 16 bits of tag or slot, and below them
// a request's id or, of a source, 8 bits of tag and 24 of its generation.
const KIND_SHIFT: u32 = 60;
const MEMBER_SHIFT: u32 = 48;
const TAG_SHIFT: u32 = 32;
const SOURCE_TAG_SHIFT: u32 = 24;

/// Generations of sources are below this.
pub(crate) const GENERATIONS: u32 = 1 << SOURCE_TAG_SHIFT;

/// Of so many members of a pool's thread the tokens can be told apart.
pub(crate) const MEMBERS: usize = 1 << (KIND_SHIFT - MEMBER_SHIFT);

impl Token {
    pub const MAILBOX: Token = Token(2 << KIND_SHIFT);
    pub const ENGINE: Token = Token(3 << KIND_SHIFT);

    #[inline]
    pub fn request(id: RequestId, tag: u16) -> Token {
        Token(u64::from(tag) << TAG_SHIFT | u64::from(id.0))
    }

    /// For an operation of the channel itself, which serves no request or
    /// several. It completes as one of [`RequestId::NOBODY`].
    #[inline]
    pub fn channel(tag: u16) -> Token {
        Token::request(RequestId::NOBODY, tag)
    }

    #[inline]
    pub fn kick(slot: u16, generation: u32) -> Token {
        Token(1 << KIND_SHIFT | u64::from(slot) << TAG_SHIFT | u64::from(generation))
    }

    #[inline]
    pub(crate) fn source(slot: u16, generation: u32, tag: u8) -> Token {
        let token = Token(4 << KIND_SHIFT | u64::from(slot) << TAG_SHIFT | u64::from(generation));
        Token(token.0 | u64::from(tag) << SOURCE_TAG_SHIFT)
    }

    /// The same, of a member of a pool's thread: its engine is shared by several workers. (Those of a
    /// worker alone are of member 0.)
    #[inline]
    pub(crate) fn of(self, member: u16) -> Token {
        debug_assert!(usize::from(member) < MEMBERS);
        Token(self.0 | u64::from(member) << MEMBER_SHIFT)
    }

    /// Whose it is.
    #[inline]
    pub(crate) fn member(self) -> u16 {
        (self.0 >> MEMBER_SHIFT) as u16 % MEMBERS as u16
    }

    /// As an opaque number for the kernel.
    #[inline]
    pub fn to_u64(self) -> u64 {
        self.0
    }

    /// The inverse of [`Token::to_u64`].
    #[inline]
    pub fn from_u64(value: u64) -> Token {
        Token(value)
    }

    #[inline]
    pub fn target(self) -> Target {
        let (low, high) = (self.0 as u32, (self.0 >> TAG_SHIFT) as u16);
        match self.0 >> KIND_SHIFT {
            0 => Target::Request {
                id: RequestId(low),
                tag: high,
            },
            1 => Target::Kick {
                slot: high,
                generation: low % GENERATIONS,
            },
            2 => Target::Mailbox,
            4 => Target::Source {
                slot: high,
                generation: low % GENERATIONS,
                tag: (low >> SOURCE_TAG_SHIFT) as u8,
            },
            _ => Target::Engine,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back_as_they_went() {
        let id = RequestId(u32::MAX);
        let generation = GENERATIONS - 1;
        let (slot, tag) = (u16::MAX, u8::MAX);
        for member in [0, 1, MEMBERS as u16 - 1] {
            let there_and_back = |token: Token| {
                let token = Token::from_u64(token.of(member).to_u64());
                assert_eq!(token.member(), member);
                token.target()
            };
            assert_eq!(
                there_and_back(Token::request(id, u16::MAX)),
                Target::Request { id, tag: u16::MAX }
            );
            assert_eq!(
                there_and_back(Token::kick(slot, generation)),
                Target::Kick { slot, generation }
            );
            assert_eq!(
                there_and_back(Token::source(slot, generation, tag)),
                Target::Source {
                    slot,
                    generation,
                    tag
                }
            );
            assert_eq!(there_and_back(Token::MAILBOX), Target::Mailbox);
            assert_eq!(there_and_back(Token::ENGINE), Target::Engine);
        }
    }
}
