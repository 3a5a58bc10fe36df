//! Errors of replies (proto.md, "Error values").

/// An error that a server may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ErrorCode {
    /// EPERM: the export is read-only, or the server does not permit the request.
    NotPermitted = 1,
    /// EIO: the storage failed, or any failure that has no error of its own.
    Io = 5,
    /// ENOMEM: the server has no memory for the request.
    NoMemory = 12,
    /// EINVAL: the request is malformed, or uses a command or flag that was not negotiated.
    Invalid = 22,
    /// ENOSPC: the storage has no space left for the data.
    NoSpace = 28,
    /// EOVERFLOW: the reply would be longer than the negotiated limits allow.
    Overflow = 75,
    /// ENOTSUP: the server does not support the request.
    NotSupported = 95,
    /// ESHUTDOWN: the server is shutting down.
    Shutdown = 108,
}

impl ErrorCode {
    /// Returns the error to send for a disk that failed with this errno.
    pub fn from_errno(errno: i32) -> ErrorCode {
        match errno {
            libc::EPERM | libc::EROFS | libc::EACCES => ErrorCode::NotPermitted,
            libc::ENOMEM => ErrorCode::NoMemory,
            libc::EINVAL => ErrorCode::Invalid,
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => ErrorCode::NoSpace,
            libc::EOVERFLOW => ErrorCode::Overflow,
            libc::EOPNOTSUPP => ErrorCode::NotSupported,
            libc::ESHUTDOWN => ErrorCode::Shutdown,
            _ => ErrorCode::Io,
        }
    }

    /// Returns a text for messages.
    pub fn text(self) -> &'static str {
        match self {
            ErrorCode::NotPermitted => "not permitted",
            ErrorCode::Io => "input/output error",
            ErrorCode::NoMemory => "out of memory",
            ErrorCode::Invalid => "invalid argument",
            ErrorCode::NoSpace => "no space left",
            ErrorCode::Overflow => "value too large",
            ErrorCode::NotSupported => "not supported",
            ErrorCode::Shutdown => "the server is shutting down",
        }
    }
}

/// Returns the errno for an error that a server has sent, which may be any number but 0.
pub fn errno(error: u32) -> i32 {
    match error {
        1 => libc::EPERM,
        12 => libc::ENOMEM,
        22 => libc::EINVAL,
        28 => libc::ENOSPC,
        75 => libc::EOVERFLOW,
        95 => libc::EOPNOTSUPP,
        // 5, and 108 (the server is shutting down): the request is lost.
        _ => libc::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_errno_that_has_a_number_comes_back() {
        for there in [
            libc::EPERM,
            libc::EIO,
            libc::ENOMEM,
            libc::EINVAL,
            libc::ENOSPC,
            libc::EOVERFLOW,
            libc::EOPNOTSUPP,
        ] {
            assert_eq!(errno(ErrorCode::from_errno(there) as u32), there);
        }
        assert_eq!(errno(ErrorCode::Shutdown as u32), libc::EIO);
        assert_eq!(errno(u32::MAX), libc::EIO);
    }
}
