//! Tells a session that its front-end has truncated a file that is mapped here.

use fathom_core::EventNotifier;
use fathom_sigbus::Spare;
use fathom_virtio::GuestMemory;
use parking_lot::Mutex;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// Ends one session whose shared memory has become inaccessible.
pub struct Alarm {
    raised: AtomicBool,
    event: EventNotifier,
    /// Memory that the signal handler poisons.
    memory: AtomicPtr<GuestMemory>,
    /// Keeps `memory` alive.
    kept: Mutex<Option<Arc<GuestMemory>>>,
    spare: Spare,
}

impl Alarm {
    pub fn new() -> io::Result<Alarm> {
        Ok(Alarm {
            raised: AtomicBool::new(false),
            event: EventNotifier::new()?,
            memory: AtomicPtr::new(ptr::null_mut()),
            kept: Mutex::new(None),
            spare: Spare::new()?,
        })
    }

    /// Sets the memory that is poisoned when the alarm is raised.
    ///
    /// During the call, no other thread may access guarded memory of this session: the signal
    /// handler might still use the previous memory.
    pub fn set_memory(&self, memory: Option<Arc<GuestMemory>>) {
        let pointer = memory.as_ref().map_or(ptr::null(), Arc::as_ptr);
        self.memory.store(pointer.cast_mut(), Ordering::SeqCst);
        *self.kept.lock() = memory;
    }

    /// Returns true if a mapping has been replaced by spare memory.
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Acquire)
    }

    /// Returns an eventfd that becomes readable when the alarm is raised.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl fathom_sigbus::Alarm for Alarm {
    fn raise(&self) {
        self.raised.store(true, Ordering::Release);
        let memory = self.memory.load(Ordering::SeqCst);
        // SAFETY: the pointer is null or its target is kept alive: it is not replaced while a
        // thread that can be here accesses guarded memory.
        if let Some(memory) = unsafe { memory.as_ref() } {
            memory.poison();
        }
        self.event.notify();
    }
    fn spare(&self) -> &Spare {
        &self.spare
    }
}
