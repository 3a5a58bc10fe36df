//! System calls with which a disk's server waits for work and does I/O. The recorder traces these
//! calls for servers that do not report their requests, and the report interprets them.

/// Number of io_uring_enter on x86-64.
const IO_URING_ENTER: u64 = 426;

/// System calls to trace, by number, and what they do; see [`io_call`].
pub const IO_CALLS: &[(u64, IoCall)] = &[
    (7, WAIT),     // poll
    (23, WAIT),    // select
    (232, WAIT),   // epoll_wait
    (270, WAIT),   // pselect6
    (271, WAIT),   // ppoll
    (281, WAIT),   // epoll_pwait
    (441, WAIT),   // epoll_pwait2
    (209, SUBMIT), // io_submit
    (IO_URING_ENTER, SUBMIT),
    (17, SYNC),  // pread64
    (18, SYNC),  // pwrite64
    (295, SYNC), // preadv
    (296, SYNC), // pwritev
    (327, SYNC), // preadv2
    (328, SYNC), // pwritev2
    (74, SYNC),  // fsync
    (75, SYNC),  // fdatasync
    (285, SYNC), // fallocate
];

/// Effects of a call for a disk's server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoCall {
    /// The call sleeps until there is work: a kick or a completion.
    pub waits: bool,
    /// The call submits I/O to the kernel, which completes later.
    pub submits: bool,
    /// The call does I/O and returns when the I/O is complete.
    pub sync: bool,
}

const NONE: IoCall = IoCall {
    waits: false,
    submits: false,
    sync: false,
};
const WAIT: IoCall = IoCall {
    waits: true,
    ..NONE
};
const SUBMIT: IoCall = IoCall {
    submits: true,
    ..NONE
};
const SYNC: IoCall = IoCall { sync: true, ..NONE };

/// Returns what the call with these arguments of [`Kind::SysEnter`](crate::Kind::SysEnter) does;
/// None if it is not one of [`IO_CALLS`].
///
/// io_uring_enter(fd, to_submit, min_complete, ...) may submit, wait, do both, or neither.
pub fn io_call(args: &[u64]) -> Option<IoCall> {
    let &[number, _, to_submit, min_complete, ..] = args else {
        return None;
    };
    if number == IO_URING_ENTER {
        return Some(IoCall {
            waits: min_complete > 0,
            submits: to_submit > 0,
            sync: false,
        });
    }
    let known = IO_CALLS.iter().find(|(known, _)| *known == number);
    known.map(|&(_, call)| call)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_is_told_by_its_arguments() {
        let of = |to_submit, min_complete| io_call(&[426, 9, to_submit, min_complete, 1]).unwrap();
        assert_eq!(of(1, 0), SUBMIT);
        assert_eq!(of(0, 1), WAIT);
        assert!(of(1, 1).waits && of(1, 1).submits);
        assert_eq!(of(0, 0), NONE);
        assert_eq!(io_call(&[271, 0, 0, 0, 0]), Some(WAIT));
        assert_eq!(io_call(&[0, 0, 0, 0, 0]), None);
    }
}
