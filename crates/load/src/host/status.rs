//! What became of a request, as a port says it.

use crate::port::Op;
use std::io;

/// Added to the bytes done of a request that was cut short, and negated.
const SHORT: i32 = 1;

/// A request's status from a system call's result: 0, an errno, or the
/// negative of bytes done plus one for a request that was cut short.
pub fn status(op: Op, len: u32, result: i32) -> i32 {
    match op {
        _ if result < 0 => -result,
        Op::Read | Op::Write if result as u32 != len => -(result + SHORT),
        _ => 0,
    }
}

/// What the system call returned, again: bytes, or a negative errno.
pub fn result(len: u32, status: i32) -> i64 {
    match status {
        0 => len.into(),
        short if short < 0 => i64::from(-short - SHORT),
        errno => -i64::from(errno),
    }
}

/// The status in words.
pub fn describe_status(status: i32) -> String {
    if status < 0 {
        return format!("only {} bytes were done", -status - SHORT);
    }
    fathom_units::cause(io::Error::from_raw_os_error(status))
}

/// fallocate's mode of a discard or a write of zeroes.
pub fn fallocate_mode(op: Op) -> i32 {
    match op {
        Op::Discard => libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
        _ => libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
    }
}
