//! Converts results of system calls to request statuses.

use crate::port::Op;
use std::io;

/// Added to the number of bytes of a short request before it is negated, so that the status is
/// never 0.
const SHORT: i32 = 1;

/// Returns the status of a request from the result of its system call. 0 means success, and a
/// positive number is an errno. For a short request, the status is the negative of the transferred
/// bytes plus one.
pub fn status(op: Op, len: u32, result: i32) -> i32 {
    match op {
        _ if result < 0 => -result,
        Op::Read | Op::Write if result as u32 != len => -(result + SHORT),
        _ => 0,
    }
}

/// Converts a status back to the result of the system call: bytes, or a negative errno.
pub fn result(len: u32, status: i32) -> i64 {
    match status {
        0 => len.into(),
        short if short < 0 => i64::from(-short - SHORT),
        errno => -i64::from(errno),
    }
}

/// Describes a status that is not 0.
pub fn describe_status(status: i32) -> String {
    if status < 0 {
        return format!("only {} bytes were done", -status - SHORT);
    }
    fathom_units::cause(io::Error::from_raw_os_error(status))
}

/// Returns the fallocate mode of a discard or a write of zeroes.
pub fn fallocate_mode(op: Op) -> i32 {
    match op {
        Op::Discard => libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
        _ => libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
    }
}
