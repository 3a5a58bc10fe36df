//! Against front-ends that let their interrupts pile up.
//!
//! Who signals an eventfd whose counter is full sleeps until somebody reads
//! it, unless it was created with EFD_NONBLOCK, as most front-ends do. One
//! that does not must not be able to hold a worker, and with it a drain, up
//! forever. The flag itself cannot be set here: it is the front-end's, too,
//! which may rely on its reads to wait.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::{ReadWriteFlags, preadv2};
use std::io::IoSliceMut;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

/// How often counters are looked at.
const INTERVAL: Duration = Duration::from_millis(5);

/// Do `work`, which may have to wait for someone who signals one of
/// `eventfds`, while emptying those that are full.
pub fn unclogging<'a, T>(
    eventfds: impl Iterator<Item = &'a OwnedFd>,
    work: impl FnOnce() -> T,
) -> T {
    let blocking: Vec<&OwnedFd> = eventfds.filter(|fd| can_block(fd)).collect();
    if blocking.is_empty() {
        return work();
    }
    thread::scope(|scope| {
        let (done, ended) = channel::<()>();
        scope.spawn(move || {
            while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                blocking.iter().for_each(|fd| empty_if_full(fd));
            }
        });
        let outcome = work();
        drop(done);
        outcome
    })
}

fn can_block(fd: &OwnedFd) -> bool {
    fcntl_getfl(fd).is_ok_and(|flags| !flags.contains(OFlags::NONBLOCK))
}

fn empty_if_full(fd: &OwnedFd) {
    let mut fds = [PollFd::new(fd, PollFlags::OUT)];
    if poll(&mut fds, Some(&Timespec::default())) == Ok(0) {
        let mut counter = [0; 8];
        let mut buffers = [IoSliceMut::new(&mut counter)];
        // The front-end may have read it meanwhile: this must not wait.
        let current_position = u64::MAX;
        let _ = preadv2(fd, &mut buffers, current_position, ReadWriteFlags::NOWAIT);
    }
}
