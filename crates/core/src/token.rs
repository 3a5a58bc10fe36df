//! Tokens, which tell what a completion belongs to.

use crate::request::RequestId;

/// Identifies an operation. A worker passes the token to its engine with each operation, and the
/// engine returns it with the completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token(u64);

/// The decoded form of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The channel's I/O for a request, or for none.
    Request {
        /// Request that the I/O serves. [`RequestId::NOBODY`]: none, or several.
        id: RequestId,
        /// Tag that the channel chose for the I/O.
        tag: u16,
    },
    /// A kick of a source.
    Kick {
        /// Slot of the source in its worker.
        slot: u16,
        /// Generation of the slot, which distinguishes the source from earlier sources in the slot.
        generation: u32,
    },
    /// A source's own I/O on a socket.
    Source {
        /// Slot of the source in its worker.
        slot: u16,
        /// Generation of the slot, which distinguishes the source from earlier sources in the slot.
        generation: u32,
        /// Tag that the source chose for the I/O.
        tag: u8,
    },
    /// Another thread has sent a command.
    Mailbox,
    /// Internal to the engine; no caller waits for it.
    Engine,
}

/// The first tag that [`Cx::new_tag`](crate::Cx::new_tag) hands out. Storage, which has no layer
/// below, chooses smaller tags itself.
pub(crate) const FIRST_NEW_TAG: u16 = 1 << 15;

// From the top: 4 bits of kind, 12 bits of pool member, 16 bits of tag or slot. The low 32 bits are
// a request's id, or for a source 8 bits of tag and 24 bits of generation.
const KIND_SHIFT: u32 = 60;
const MEMBER_SHIFT: u32 = 48;
const TAG_SHIFT: u32 = 32;
const SOURCE_TAG_SHIFT: u32 = 24;

/// Number of generations of sources that tokens can distinguish.
pub(crate) const GENERATIONS: u32 = 1 << SOURCE_TAG_SHIFT;

/// Maximum number of members of a pool's thread that tokens can distinguish.
pub(crate) const MEMBERS: usize = 1 << (KIND_SHIFT - MEMBER_SHIFT);

impl Token {
    /// Token of the eventfd that announces commands from other threads.
    pub const MAILBOX: Token = Token(2 << KIND_SHIFT);
    /// Token of an engine's own events, which belong to no operation of the worker.
    pub const ENGINE: Token = Token(3 << KIND_SHIFT);

    /// Returns the token for an operation of the channel that serves this request.
    #[inline]
    pub fn request(id: RequestId, tag: u16) -> Token {
        Token(u64::from(tag) << TAG_SHIFT | u64::from(id.0))
    }

    /// Returns the token for an operation of the channel itself, which serves no request or
    /// several. The completion has the id [`RequestId::NOBODY`].
    #[inline]
    pub fn channel(tag: u16) -> Token {
        Token::request(RequestId::NOBODY, tag)
    }

    /// Returns the token of a kick of the source in this slot, with the slot's generation.
    #[inline]
    pub fn kick(slot: u16, generation: u32) -> Token {
        Token(1 << KIND_SHIFT | u64::from(slot) << TAG_SHIFT | u64::from(generation))
    }

    #[inline]
    pub(crate) fn source(slot: u16, generation: u32, tag: u8) -> Token {
        let token = Token(4 << KIND_SHIFT | u64::from(slot) << TAG_SHIFT | u64::from(generation));
        Token(token.0 | u64::from(tag) << SOURCE_TAG_SHIFT)
    }

    /// Returns the same token for a member of a pool's thread, whose engine several workers share.
    /// A worker with its own thread is member 0.
    #[inline]
    pub(crate) fn of(self, member: u16) -> Token {
        debug_assert!(usize::from(member) < MEMBERS);
        Token(self.0 | u64::from(member) << MEMBER_SHIFT)
    }

    /// Returns the member to which the token belongs.
    #[inline]
    pub(crate) fn member(self) -> u16 {
        (self.0 >> MEMBER_SHIFT) as u16 % MEMBERS as u16
    }

    /// Returns the token as an opaque number for the kernel.
    #[inline]
    pub fn to_u64(self) -> u64 {
        self.0
    }

    /// Restores a token from [`Token::to_u64`].
    #[inline]
    pub fn from_u64(value: u64) -> Token {
        Token(value)
    }

    /// Decodes the token.
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
