//! Guest memory that is registered with io_uring.

use crate::engine::ring::Ring;
use fathom_core::Buffer;
use fathom_units::cause;
use std::io;

/// Maximum length of a registered buffer in bytes.
const MAX_LEN: usize = 1 << 30;

/// Number of slots in the ring's buffer table (the kernel's IORING_MAX_REG_BUFFERS), one for each
/// piece of guest memory.
const SLOTS: u16 = 16384;

/// Guest memory that the kernel has pinned and mapped while the queues exist, so that it need not
/// look up the pages of each request.
///
/// The costs: all of that memory is resident and cannot move.
/// - The memory counts against RLIMIT_MEMLOCK (for users without CAP_IPC_LOCK) once for each
///   worker.
/// - A balloon or free page reporting returns no memory to the host.
/// - The memory cannot be swapped, merged (KSM) or compacted.
/// - The guest cannot be the target of post-copy migration, which needs its pages absent.
/// - A queue starts later, as touching fresh memory takes about a second for 4 GiB.
pub(crate) struct Pinned {
    /// Registered buffers, sorted by address; they do not overlap.
    buffers: Vec<Registered>,
    /// Numbers below `SLOTS` that were released.
    free: Vec<u16>,
    /// Whether the ring has a buffer table.
    usable: bool,
    /// Whether the kernel supports several segments in one registered buffer (since Linux 6.15).
    vectors: bool,
}

struct Registered {
    buffer: Buffer,
    /// The buffer's slot in the ring's table.
    number: u16,
    /// Number of times the buffer was added and not removed.
    users: u32,
}

impl Pinned {
    pub(crate) fn new(ring: &Ring) -> Pinned {
        let mut pinned = Pinned {
            buffers: Vec::new(),
            free: Vec::new(),
            usable: false,
            vectors: false,
        };
        pinned.prepare(ring);
        pinned
    }

    fn prepare(&mut self, ring: &Ring) {
        self.vectors = ring.knows_registered_vectors();
        self.usable = match ring.make_buffer_table(SLOTS.into()) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(
                    "cannot register guest memory with io_uring, so requests may be slower: \
                     {}",
                    cause(error)
                );
                false
            }
        };
    }

    /// Registers all buffers with another ring.
    pub(crate) fn move_to(&mut self, ring: &Ring) {
        self.prepare(ring);
        let (usable, free) = (self.usable, &mut self.free);
        self.buffers.retain(|known| {
            // SAFETY: the buffer has not been removed, so it is still mapped.
            let stays = usable && unsafe { register(ring, known.number, known.buffer) };
            if !stays {
                free.push(known.number);
            }
            stays
        });
    }

    /// # Safety
    /// As for [`Engine::add_memory`](fathom_core::Engine::add_memory).
    pub(crate) unsafe fn add(&mut self, ring: &Ring, buffer: Buffer) {
        if !self.usable {
            return;
        }
        for part in parts(buffer) {
            match self.position(part) {
                Ok(known) => self.buffers[known].users += 1,
                Err(place) => {
                    let Some(number) = self.free_number() else {
                        tracing::warn!(
                            "guest memory beyond {SLOTS} regions is not registered with \
                             io_uring, so requests to it may be slower"
                        );
                        return;
                    };
                    // SAFETY: as required of the caller.
                    if !unsafe { register(ring, number, part) } {
                        self.free.push(number);
                        return;
                    }
                    let registered = Registered {
                        buffer: part,
                        number,
                        users: 1,
                    };
                    self.buffers.insert(place, registered);
                }
            }
        }
    }

    pub(crate) fn remove(&mut self, ring: &Ring, buffer: Buffer) {
        for part in parts(buffer) {
            let Ok(at) = self.position(part) else {
                continue; // it could not be registered
            };
            self.buffers[at].users -= 1;
            if self.buffers[at].users == 0 {
                let gone = self.buffers.remove(at);
                self.free.push(gone.number);
                let nothing = Buffer { addr: 0, len: 0 };
                // SAFETY: an empty buffer refers to no memory.
                if let Err(error) = unsafe { ring.set_buffer(gone.number.into(), nothing) } {
                    tracing::warn!(
                        "cannot unregister guest memory from io_uring: {}",
                        cause(error)
                    );
                }
            }
        }
    }

    /// Returns the number of the buffer that contains all segments.
    #[inline]
    pub(crate) fn find(&self, iovecs: &[libc::iovec]) -> Option<u16> {
        if iovecs.len() > 1 && !self.vectors {
            return None;
        }
        let first = iovecs.first()?.iov_base as usize;
        let after = self.buffers.partition_point(|b| b.buffer.addr <= first);
        let Registered { buffer, number, .. } = self.buffers.get(after.checked_sub(1)?)?;
        let lies_within = |iovec: &libc::iovec| {
            let at = (iovec.iov_base as usize).wrapping_sub(buffer.addr);
            at < buffer.len && iovec.iov_len <= buffer.len - at
        };
        iovecs.iter().all(lies_within).then_some(*number)
    }

    fn position(&self, buffer: Buffer) -> Result<usize, usize> {
        let key = |known: &Registered| (known.buffer.addr, known.buffer.len);
        let wanted = (buffer.addr, buffer.len);
        self.buffers.binary_search_by_key(&wanted, key)
    }

    fn free_number(&mut self) -> Option<u16> {
        // Numbers below `next` are in use or in `free`.
        let next = (self.buffers.len() + self.free.len()) as u16;
        self.free.pop().or((next < SLOTS).then_some(next))
    }
}

/// Splits a buffer into pieces that io_uring accepts.
fn parts(buffer: Buffer) -> impl Iterator<Item = Buffer> {
    (0..buffer.len).step_by(MAX_LEN).map(move |done| Buffer {
        addr: buffer.addr + done,
        len: (buffer.len - done).min(MAX_LEN),
    })
}

/// Registers a buffer. If the kernel refuses, warns and returns false; requests then use the memory
/// unregistered.
///
/// # Safety
/// The buffer stays mapped until its number is given to another buffer.
unsafe fn register(ring: &Ring, number: u16, buffer: Buffer) -> bool {
    // SAFETY: as required of the caller.
    match unsafe { ring.set_buffer(number.into(), buffer) } {
        Ok(()) => true,
        Err(error) => {
            let size = buffer.len >> 20;
            let hint = match error.raw_os_error() {
                Some(libc::ENOMEM) => "; raise the limit of locked memory (ulimit -l)",
                Some(libc::EOPNOTSUPP | libc::EFAULT) => {
                    "; memory in a file on disk cannot be pinned; use memfd for the guest's \
                     memory"
                }
                _ => "",
            };
            let reason = io::Error::from(error.kind());
            tracing::warn!(
                "{size} MiB of guest memory are not registered with io_uring, so requests may be \
                 slower: {reason}{hint}"
            );
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn iov(addr: usize, len: usize) -> libc::iovec {
        libc::iovec {
            iov_base: addr as *mut libc::c_void,
            iov_len: len,
        }
    }

    fn pinned(buffers: &[(usize, usize)], vectors: bool) -> Pinned {
        let registered = |(number, &(addr, len))| Registered {
            buffer: Buffer { addr, len },
            number: number as u16,
            users: 1,
        };
        Pinned {
            buffers: buffers.iter().enumerate().map(registered).collect(),
            free: Vec::new(),
            usable: true,
            vectors,
        }
    }

    #[test]
    fn only_what_lies_within_one_buffer_is_found() {
        let both = pinned(&[(1000, 100), (1100, 50)], true);
        assert_eq!(both.find(&[iov(1000, 100)]), Some(0));
        assert_eq!(both.find(&[iov(1149, 1)]), Some(1));
        assert_eq!(both.find(&[iov(1000, 10), iov(1090, 10)]), Some(0));
        for none in [
            (999, 1),
            (1090, 11),
            (1150, 1),
            (1149, 2),
            (1149, usize::MAX),
        ] {
            assert_eq!(both.find(&[iov(none.0, none.1)]), None, "{none:?}");
        }
        assert_eq!(both.find(&[iov(1000, 10), iov(1100, 10)]), None);
        let single = pinned(&[(1000, 100)], false);
        assert_eq!(single.find(&[iov(1000, 10), iov(1010, 10)]), None);
        assert_eq!(single.find(&[iov(1000, 10)]), Some(0));
    }

    #[test]
    fn numbers_are_each_given_once() {
        let mut some = pinned(&[(1000, 100), (1100, 50)], true);
        assert_eq!(some.free_number(), Some(2));
        some.free.push(2);
        let gone = some.buffers.remove(0);
        some.free.push(gone.number);
        assert_eq!([some.free_number(), some.free_number()], [Some(0), Some(2)]);
    }

    #[test]
    fn large_memory_is_cut_to_what_the_kernel_takes() {
        let memory = Buffer {
            addr: 4096,
            len: (2 << 30) + 4096,
        };
        let cut: Vec<_> = parts(memory).map(|part| (part.addr, part.len)).collect();
        let (first, second) = (4096 + (1 << 30), 4096 + (2 << 30));
        assert_eq!(cut, [(4096, 1 << 30), (first, 1 << 30), (second, 4096)]);
    }
}
