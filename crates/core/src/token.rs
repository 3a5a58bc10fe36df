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

const KIND_SHIFT: u32 = 60;
const TAG_SHIFT: u32 = 32;
const SOURCE_TAG_SHIFT: u32 = 48;

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
                generation: low,
            },
            2 => Target::Mailbox,
            4 => Target::Source {
                slot: high,
                generation: low,
                tag: (self.0 >> SOURCE_TAG_SHIFT) as u8,
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
        let there_and_back = |t: Token| Token::from_u64(t.to_u64()).target();
        assert_eq!(
            there_and_back(Token::request(id, u16::MAX)),
            Target::Request { id, tag: u16::MAX }
        );
        assert_eq!(
            there_and_back(Token::kick(u16::MAX, u32::MAX)),
            Target::Kick {
                slot: u16::MAX,
                generation: u32::MAX
            }
        );
        assert_eq!(
            there_and_back(Token::source(u16::MAX, u32::MAX, u8::MAX)),
            Target::Source {
                slot: u16::MAX,
                generation: u32::MAX,
                tag: u8::MAX
            }
        );
        assert_eq!(there_and_back(Token::MAILBOX), Target::Mailbox);
        assert_eq!(there_and_back(Token::ENGINE), Target::Engine);
    }
}
