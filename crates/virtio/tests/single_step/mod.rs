//! Runs code in a child process, one instruction at a time, and sees each change of shared memory.

use fathom_virtio::testing::TestMemory;
use std::ops::Range;

/// Maximum number of instructions of a child; it needs some tens of thousands.
const MAX_STEPS: u32 = 2_000_000;

/// Runs `body` in a child, one instruction at a time. Returns the different contents of this range
/// of `memory`, in order.
pub fn single_step(memory: &TestMemory, shared: &Range<u64>, body: impl FnOnce()) -> Vec<Vec<u8>> {
    let len = (shared.end - shared.start) as usize;
    let copy = || memory.read(shared.start, len);
    let mut copies = vec![copy()];
    // SAFETY: the child touches only its own copy of this process and the
    // shared memory, and leaves by _exit.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork");
    if child == 0 {
        // A panic must not print a backtrace, which would take an hour when single-stepped.
        // SAFETY: _exit runs nothing of the parent's; the child asks to be traced by its parent,
        // and stops for it.
        unsafe {
            std::panic::set_hook(Box::new(|_| libc::_exit(1)));
            libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
            libc::raise(libc::SIGSTOP);
            body();
            libc::_exit(0);
        }
    }
    let host = memory.at(shared.start, len);
    for _ in 0..MAX_STEPS {
        let mut status = 0;
        // SAFETY: waits for our own child.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        if libc::WIFEXITED(status) {
            assert_eq!(libc::WEXITSTATUS(status), 0, "the child failed");
            return copies;
        }
        assert!(libc::WIFSTOPPED(status), "the child died: {status:#x}");
        let last = copies.last().expect("never empty");
        // SAFETY: `len` mapped bytes each; the child is stopped.
        if unsafe { libc::memcmp(host.cast(), last.as_ptr().cast(), len) } != 0 {
            copies.push(copy());
        }
        // SAFETY: our own child, which is stopped.
        let stepped = unsafe { libc::ptrace(libc::PTRACE_SINGLESTEP, child, 0, 0) };
        assert_eq!(
            stepped,
            0,
            "cannot single-step: {}",
            std::io::Error::last_os_error()
        );
    }
    // SAFETY: our own child.
    unsafe { libc::kill(child, libc::SIGKILL) };
    panic!("the child does not come to its end");
}
