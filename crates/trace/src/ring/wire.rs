//! Under which number a request crosses a network.

/// What two hosts know the same request by: NBD's cookie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Wire {
    /// It crosses none, or its last crossing does not say which.
    #[default]
    None,
    /// It came with this cookie of its client's.
    Came(u64),
    /// It went on to another server, with this one.
    Went(u64),
    /// It went on as several commands, or with one more: none of them is all of it.
    Several,
}

impl Wire {
    /// It goes on with this cookie, as the first command for it or as one more.
    #[inline]
    pub fn goes(&mut self, cookie: u64) {
        *self = match self {
            Wire::None | Wire::Came(_) => Wire::Went(cookie),
            Wire::Went(_) | Wire::Several => Wire::Several,
        };
    }

    /// What has gone on is of no account: it starts again.
    pub fn starts_again(&mut self) {
        if !matches!(self, Wire::Came(_)) {
            *self = Wire::None;
        }
    }

    /// As files have it: what the cookie is, and the cookie.
    pub(super) fn to_words(self) -> (u8, u64) {
        match self {
            Wire::None => (0, 0),
            Wire::Came(cookie) => (1, cookie),
            Wire::Went(cookie) => (2, cookie),
            Wire::Several => (3, 0),
        }
    }

    /// The inverse; None when no writer can have written it.
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
