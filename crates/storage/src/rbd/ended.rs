//! Passes completed operations from the library's threads to a worker.

use super::library::Completion;
use fathom_core::{EventNotifier, Extents, Request, Status};
use parking_lot::Mutex;
use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicPtr, Ordering};

/// A lock-free list to which any thread adds operations, and from which one worker takes all of
/// them at once.
pub(super) struct Ended {
    newest: AtomicPtr<Operation>,
    /// Whether the worker was notified and has not looked since.
    is_told: AtomicBool,
    event: EventNotifier,
}

/// An operation of the library, reused for many requests. The operation must not move.
pub(super) struct Operation {
    to: Arc<Ended>,
    /// The worker's index of the operation.
    pub(super) index: u32,
    /// Result: a number of bytes or a negative errno.
    result: AtomicI64,
    /// The operation that ended before this one.
    before: AtomicPtr<Operation>,
    /// Data ranges of the request's range, as far as they are known.
    found: Mutex<Found>,
}

/// The data ranges of a range, as far as they are known.
#[derive(Default)]
pub(super) struct Found {
    /// Starts and lengths of the ranges with data, in ascending order; gaps read as zeroes.
    pub(super) data: Vec<(u64, u64)>,
    /// End of the known range.
    pub(super) end: u64,
}

impl Ended {
    pub(super) fn new() -> io::Result<Ended> {
        Ok(Ended {
            newest: AtomicPtr::new(null_mut()),
            is_told: AtomicBool::new(false),
            event: EventNotifier::new()?,
        })
    }

    /// Returns the eventfd that is signalled when the list has operations.
    pub(super) fn fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    /// Appends the indices and results of ended operations to `out`, in the order of their ends.
    pub(super) fn take(&self, out: &mut Vec<(u32, i64)>) {
        // A thread that adds an operation from now on notifies again.
        self.is_told.store(false, Ordering::SeqCst);
        let start = out.len();
        let mut next = self.newest.swap(null_mut(), Ordering::Acquire);
        while !next.is_null() {
            // SAFETY: the thread that added the operation does not use it any more. The operation
            // lives at least until it is taken here, and was written before it was added.
            let operation = unsafe { &*next };
            next = operation.before.load(Ordering::Relaxed);
            out.push((operation.index, operation.result.load(Ordering::Relaxed)));
        }
        out[start..].reverse();
    }

    /// # Safety
    /// The operation is in flight: it lives until it is taken, and is added once.
    unsafe fn add(&self, operation: *const Operation) {
        let mut newest = self.newest.load(Ordering::Relaxed);
        loop {
            // SAFETY: as required of the caller.
            unsafe { (*operation).before.store(newest, Ordering::Relaxed) };
            let added = operation.cast_mut();
            let order = (Ordering::Release, Ordering::Relaxed);
            match self
                .newest
                .compare_exchange_weak(newest, added, order.0, order.1)
            {
                Ok(_) => break,
                Err(other) => newest = other,
            }
        }
        if !self.is_told.swap(true, Ordering::SeqCst) {
            self.event.notify();
        }
    }
}

impl Operation {
    pub(super) fn new(to: &Arc<Ended>, index: u32) -> Box<Operation> {
        Box::new(Operation {
            to: to.clone(),
            index,
            result: AtomicI64::new(0),
            before: AtomicPtr::new(null_mut()),
            found: Mutex::default(),
        })
    }

    pub(super) fn put(&self, found: Found) {
        *self.found.lock() = found;
    }

    /// Answers a block status request with the data ranges found.
    ///
    /// # Safety
    /// The request is in flight.
    pub(super) unsafe fn answer(&self, request: &Request) {
        let found = std::mem::take(&mut *self.found.lock());
        // SAFETY: as required of the caller.
        let mut out = unsafe { Extents::of(&request.segments, request.len) };
        let mut at = request.at;
        for (start, len) in found.data {
            let start = start.max(at);
            let end = (start + len).min(found.end);
            if !(start == at || out.push(Status::HOLE, start - at))
                || !out.push(Status::DATA, end.saturating_sub(start))
            {
                return;
            }
            at = end;
        }
        out.push(Status::HOLE, found.end.saturating_sub(at));
    }

    /// Ends the operation with a number of bytes or a negative errno.
    ///
    /// # Safety
    /// It is in flight, and ended once; it lives until it is taken.
    pub(super) unsafe fn end(operation: *const Operation, result: i64) {
        // Once the operation is added, the worker owns it and may drop it.
        // SAFETY: as required of the caller.
        let to = unsafe {
            (*operation).result.store(result, Ordering::Relaxed);
            (*operation).to.clone()
        };
        // SAFETY: as required of the caller.
        unsafe { to.add(operation) };
    }
}

/// Callback of the library; the argument is an [`Operation`] in flight.
pub(super) unsafe extern "C" fn ended(completion: Completion, argument: *mut c_void) {
    let Ok(library) = super::library::library() else {
        return;
    };
    // SAFETY: the library calls this once for a completion, whose result is known by then, and
    // frees the completion when it is released.
    let result = unsafe {
        let result = (library.rbd_aio_get_return_value)(completion);
        (library.rbd_aio_release)(completion);
        result as i64
    };
    // SAFETY: the worker keeps the operation until it is taken.
    unsafe { Operation::end(argument.cast_const().cast(), result) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn what_ends_on_several_threads_is_taken_once_each() {
        const EACH: u32 = 20_000;
        let ended = Arc::new(Ended::new().unwrap());
        let all: Vec<_> = (0..4 * EACH)
            .map(|index| Operation::new(&ended, index))
            .collect();
        let (mut taken, mut out) = (BTreeSet::new(), Vec::new());
        std::thread::scope(|scope| {
            for part in all.chunks(EACH as usize) {
                scope.spawn(move || {
                    for operation in part {
                        // SAFETY: each is ended once, and lives longer than the threads.
                        unsafe { Operation::end(&**operation, -i64::from(operation.index)) };
                    }
                });
            }
            let mut last = [-1; 4];
            while taken.len() < all.len() {
                // A notification that is missed here would leave this loop waiting forever.
                while !ended.event.clear() {
                    std::hint::spin_loop();
                }
                ended.take(&mut out);
                for (index, result) in out.drain(..) {
                    assert_eq!(result, -i64::from(index));
                    assert!(taken.insert(index));
                    // Operations of one thread arrive in their order.
                    let last: &mut i64 = &mut last[(index / EACH) as usize];
                    assert!(std::mem::replace(last, index.into()) < index.into());
                }
            }
        });
        assert!(ended.newest.load(Ordering::Relaxed).is_null());
    }
}
