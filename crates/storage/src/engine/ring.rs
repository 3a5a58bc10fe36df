//! Thin wrapper of an io_uring: setup, enter, reap.

use crate::engine::restrict::restrict;
use fathom_core::Buffer;
use io_uring::types::Timespec;
use io_uring::{EnterFlags, cqueue, opcode, squeue};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

/// Number of submission queue entries. Longer queues are submitted in several batches.
const SQ_ENTRIES: u32 = 1024;

/// Number of completion queue entries at the start.
const CQ_ENTRIES: u32 = 4096;

/// Maximum number of completion queue entries that the kernel allows (IORING_MAX_CQ_ENTRIES).
pub(crate) const MAX_CQ_ENTRIES: u32 = 65536;

/// See io_uring_register(2); the numbers are part of the kernel's ABI.
const IORING_REGISTER_RING_FDS: libc::c_uint = 20;
const IORING_UNREGISTER_RING_FDS: libc::c_uint = 21;

/// `struct io_uring_rsrc_update`.
#[repr(C)]
struct RsrcUpdate {
    offset: u32,
    resv: u32,
    data: u64,
}

/// `struct io_uring_getevents_arg`.
#[repr(C)]
struct GeteventsArg {
    sigmask: u64,
    sigmask_sz: u32,
    min_wait_usec: u32,
    ts: u64,
}

/// How the kernel delivers completions, the best mode first.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Setup {
    /// When this thread enters the ring with GETEVENTS (since Linux 6.1).
    Deferred,
    /// When this thread enters the kernel for any reason (since Linux 5.19).
    Cooperative,
    /// By interrupting this thread (since Linux 5.11).
    Plain,
}

/// A ring, used only by the thread that made it.
pub(crate) struct Ring {
    ring: io_uring::IoUring,
    /// The descriptor passed to io_uring_enter(2): the index registered for the thread, if
    /// possible, which saves each call a look-up.
    fd: RawFd,
    fd_flags: EnterFlags,
}

impl Ring {
    /// Makes a ring whose completion queue holds at least `cq_entries` entries, up to the kernel's
    /// limit.
    pub(crate) fn new(cq_entries: u32) -> io::Result<Ring> {
        for setup in [Setup::Deferred, Setup::Cooperative] {
            match Ring::with(setup, cq_entries) {
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
                other => return other,
            }
        }
        Ring::with(Setup::Plain, cq_entries)
    }

    pub(crate) fn with(setup: Setup, cq_entries: u32) -> io::Result<Ring> {
        let ring = build(setup, cq_entries.clamp(CQ_ENTRIES, MAX_CQ_ENTRIES))?;
        if !ring.params().is_feature_nodrop() || !ring.params().is_feature_ext_arg() {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        }
        let (fd, fd_flags) = match register_ring_fd(ring.as_raw_fd()) {
            Some(index) => (index, EnterFlags::REGISTERED_RING),
            None => (ring.as_raw_fd(), EnterFlags::empty()),
        };
        Ok(Ring { ring, fd, fd_flags })
    }

    pub(crate) fn cq_entries(&self) -> u32 {
        self.ring.params().cq_entries()
    }

    /// Registers a table of files. Returns false if the kernel cannot.
    pub(crate) fn register_files(&self, fds: &[RawFd]) -> bool {
        self.ring.submitter().register_files(fds).is_ok()
    }

    pub(crate) fn update_file(&self, index: u32, fd: RawFd) -> io::Result<()> {
        let submitter = self.ring.submitter();
        submitter.register_files_update(index, &[fd]).map(drop)
    }

    /// Registers an empty table of buffers.
    pub(crate) fn make_buffer_table(&self, slots: u32) -> io::Result<()> {
        self.ring.submitter().register_buffers_sparse(slots)
    }

    /// Replaces the buffer in a slot of the table. Operations that use the old buffer finish
    /// undisturbed.
    ///
    /// # Safety
    /// The buffer stays mapped until its slot is given to another buffer.
    pub(crate) unsafe fn set_buffer(&self, slot: u32, buffer: Buffer) -> io::Result<()> {
        let iov = libc::iovec {
            iov_base: buffer.addr as *mut libc::c_void,
            iov_len: buffer.len,
        };
        let submitter = self.ring.submitter();
        // SAFETY: as required of the caller.
        unsafe { submitter.register_buffers_update(slot, &[iov], None) }.map(drop)
    }

    /// Returns whether the kernel supports several segments in a registered buffer.
    pub(crate) fn knows_registered_vectors(&self) -> bool {
        let mut probe = io_uring::Probe::new();
        let probed = self.ring.submitter().register_probe(&mut probe);
        probed.is_ok() && probe.is_supported(opcode::ReadvFixed::CODE)
    }

    /// Queues an entry. Returns false if the queue is full.
    ///
    /// # Safety
    /// What the entry points to stays valid until its completion.
    #[inline]
    pub(crate) unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: as required of the caller.
        unsafe { self.ring.submission().push(entry) }.is_ok()
    }

    /// Returns the number of entries that the kernel has not accepted.
    #[inline]
    pub(crate) fn queued(&mut self) -> usize {
        self.ring.submission().len()
    }

    /// Returns whether completions can be reaped without entering the kernel.
    #[inline]
    pub(crate) fn has_completions(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }

    /// Returns whether the kernel must be entered for completions to appear.
    #[inline]
    pub(crate) fn needs_enter(&mut self) -> bool {
        let sq = self.ring.submission();
        sq.taskrun() || sq.cq_overflow()
    }

    /// Submits queued entries. If `min_complete` is not 0, waits for that many completions, for at
    /// most `timeout`.
    #[inline]
    pub(crate) fn enter(&mut self, min_complete: u32, timeout: Option<Duration>) -> io::Result<()> {
        let queued = self.queued() as u32;
        let Some(timeout) = timeout else {
            return self.enter_with(queued, min_complete, None);
        };
        let ts = Timespec::from(timeout);
        let arg = GeteventsArg {
            sigmask: 0,
            sigmask_sz: 0,
            min_wait_usec: 0,
            ts: &ts as *const Timespec as u64,
        };
        self.enter_with(queued, min_complete, Some(&arg))
    }

    /// Calls io_uring_enter(2), always with GETEVENTS: without it the kernel does not run work that
    /// is deferred to this thread.
    #[inline]
    fn enter_with(
        &self,
        to_submit: u32,
        min_complete: u32,
        arg: Option<&GeteventsArg>,
    ) -> io::Result<()> {
        let mut flags = self.fd_flags | EnterFlags::GETEVENTS;
        let (arg, size) = match arg {
            Some(arg) => {
                flags |= EnterFlags::EXT_ARG;
                (arg as *const GeteventsArg, size_of::<GeteventsArg>())
            }
            None => (std::ptr::null(), 0),
        };
        // SAFETY: the arguments are as io_uring_enter(2) expects; `arg` is null or points to a
        // valid structure of this size during the call.
        let result = unsafe {
            libc::syscall(
                libc::SYS_io_uring_enter,
                self.fd,
                to_submit,
                min_complete,
                flags.bits(),
                arg,
                size,
            )
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Takes all completions that are available.
    #[inline]
    pub(crate) fn reap(&mut self, mut each: impl FnMut(cqueue::Entry)) {
        self.ring.completion().for_each(&mut each);
    }
}

fn build(setup: Setup, cq_entries: u32) -> io::Result<io_uring::IoUring> {
    let mut builder = io_uring::IoUring::builder();
    builder.dontfork().setup_clamp().setup_cqsize(cq_entries);
    match setup {
        Setup::Deferred => builder
            .setup_submit_all()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag(),
        Setup::Cooperative => builder
            .setup_submit_all()
            .setup_coop_taskrun()
            .setup_taskrun_flag(),
        Setup::Plain => &mut builder,
    };
    let ring = builder.setup_r_disabled().build(SQ_ENTRIES)?;
    restrict(&ring)?;
    Ok(ring)
}

/// Unregisters the descriptor; the registration would keep the ring alive until its thread exits.
impl Drop for Ring {
    fn drop(&mut self) {
        if self.fd_flags.contains(EnterFlags::REGISTERED_RING) {
            let mut update = RsrcUpdate {
                offset: self.fd as u32,
                resv: 0,
                data: 0,
            };
            let fd = self.ring.as_raw_fd();
            register(fd, IORING_UNREGISTER_RING_FDS, &mut update);
        }
    }
}

/// Registers the ring's descriptor for this thread and returns its index (since Linux 5.18).
fn register_ring_fd(fd: RawFd) -> Option<RawFd> {
    let mut update = RsrcUpdate {
        offset: u32::MAX,
        resv: 0,
        data: fd as u64,
    };
    let registered = register(fd, IORING_REGISTER_RING_FDS, &mut update);
    registered.then_some(update.offset as RawFd)
}

/// Calls io_uring_register(2) with one structure. Returns true on success.
fn register(fd: RawFd, opcode: libc::c_uint, update: &mut RsrcUpdate) -> bool {
    let update: *mut RsrcUpdate = update;
    // SAFETY: both opcodes expect an array of these structures, here of one element; the kernel
    // writes at most into it.
    unsafe { libc::syscall(libc::SYS_io_uring_register, fd, opcode, update, 1) == 1 }
}
