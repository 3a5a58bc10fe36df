//! Restricts a ring to the operations that Fathom uses. seccomp filters do not see operations in a
//! ring.

use io_uring::register::{Probe, Restriction};
use io_uring::{IoUring, opcode, squeue};
use std::io;

/// Opcodes of all requests that the engine makes.
const REQUESTS: [u8; 15] = [
    opcode::Read::CODE,
    opcode::Readv::CODE,
    opcode::ReadFixed::CODE,
    opcode::Write::CODE,
    opcode::Writev::CODE,
    opcode::WriteFixed::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::Recv::CODE,
    opcode::RecvMsg::CODE,
    opcode::Send::CODE,
    opcode::SendMsg::CODE,
    opcode::PollAdd::CODE,
    opcode::PollRemove::CODE,
    opcode::AsyncCancel::CODE,
];

/// Opcodes that the engine also uses, since Linux 6.15.
const VECTORS: [u8; 2] = [opcode::ReadvFixed::CODE, opcode::WritevFixed::CODE];

/// Permitted io_uring_register(2) operations: files, file updates, probe, enable, buffers, buffer
/// updates, and registering and unregistering the ring's descriptor for this thread.
const REGISTRATIONS: [u8; 8] = [2, 6, 8, 12, 15, 16, 20, 21];

/// Permanently restricts a ring that was created disabled, and enables it.
pub(super) fn restrict(ring: &IoUring) -> io::Result<()> {
    let submitter = ring.submitter();
    let mut known = Probe::new();
    let probed = submitter.register_probe(&mut known);
    let vectors = probed.is_ok() && VECTORS.into_iter().all(|code| known.is_supported(code));
    let vectors = VECTORS.iter().filter(|_| vectors);
    let requests = REQUESTS.iter().chain(vectors);
    let mut all: Vec<_> = requests.map(|code| Restriction::sqe_op(*code)).collect();
    all.extend(REGISTRATIONS.map(Restriction::register_op));
    let flags = squeue::Flags::FIXED_FILE.bits();
    all.push(Restriction::sqe_flags_allowed(flags));
    submitter.register_restrictions(&mut all)?;
    submitter.register_enable_rings()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::ring::{Ring, Setup};
    use io_uring::types::Fd;

    fn result_of(ring: &mut Ring, entry: &squeue::Entry) -> i32 {
        // SAFETY: the entry points only to static data.
        assert!(unsafe { ring.push(entry) });
        ring.enter(1, None).unwrap();
        let mut result = None;
        ring.reap(|completion| result = Some(completion.result()));
        result.expect("one completion")
    }

    #[test]
    fn what_the_engine_never_asks_for_is_refused() {
        for setup in [Setup::Deferred, Setup::Cooperative, Setup::Plain] {
            let mut ring = Ring::with(setup, 0).unwrap();
            let path = c"/dev/null".as_ptr();
            let cwd = Fd(libc::AT_FDCWD);
            for entry in [
                opcode::Nop::new().build(),
                opcode::OpenAt::new(cwd, path).build(),
                opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0).build(),
                opcode::Connect::new(Fd(0), std::ptr::null(), 0).build(),
                opcode::UnlinkAt::new(cwd, path).build(),
                // Links between requests are not used either.
                opcode::PollRemove::new(0)
                    .build()
                    .flags(squeue::Flags::IO_LINK),
            ] {
                assert_eq!(
                    result_of(&mut ring, &entry),
                    -libc::EACCES,
                    "{setup:?} {entry:?}"
                );
            }
            let nothing = opcode::PollRemove::new(0).build();
            assert_eq!(result_of(&mut ring, &nothing), -libc::ENOENT, "{setup:?}");
        }
    }
}
