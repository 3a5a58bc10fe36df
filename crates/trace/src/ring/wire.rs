//! Identifies a request that crosses a network.

/// The NBD cookie by which two hosts identify the same request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Wire {
    /// The request crosses no network, or its last crossing is not identified.
    #[default]
    None,
    /// The request came from a client, with this cookie of the client's.
    Came(u64),
    /// The request was sent to another server, with this cookie.
    Went(u64),
    /// The request was sent as several commands, none of which is the whole request.
    Several,
}

impl Wire {
    /// Records that a command with this cookie was sent for the request.
    #[inline]
    pub fn goes(&mut self, cookie: u64) {
        *self = match self {
            Wire::None | Wire::Came(_) => Wire::Went(cookie),
            Wire::Went(_) | Wire::Several => Wire::Several,
        };
    }

    /// Forgets all sent commands, because the request starts again.
    pub fn starts_again(&mut self) {
        if !matches!(self, Wire::Came(_)) {
            *self = Wire::None;
        }
    }

    /// Returns the kind of the cookie and the cookie, as trace files store them.
    pub(super) fn to_words(self) -> (u8, u64) {
        match self {
            Wire::None => (0, 0),
            Wire::Came(cookie) => (1, cookie),
            Wire::Went(cookie) => (2, cookie),
            Wire::Several => (3, 0),
        }
    }

    /// Converts the words of a trace file back. Returns `None` if no writer can have written them.
    pub(super) fn from_words(kind: u8, cookie: u64) -> Option<Wire> {
        Some(match kind {
            0 => Wire::None,
            1 => Wire::Came(cookie),
            2 => Wire::Went(cookie),
            3 => Wire::Several,
            _ => return None,
        })
    }
}
