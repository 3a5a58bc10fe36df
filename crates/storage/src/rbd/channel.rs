//! A worker's access to an image.

use super::ended::{Ended, Operation, ended};
use super::handle::Handle;
use super::inquirer::What;
use super::library::{Completion, ZEROES_STAY_ALLOCATED};
use super::shared::Shared;
use crate::file::report::report;
use fathom_core::segments::clear;
use fathom_core::{Channel, Cx, Op, Request, RequestId, Stage, Token};
use fathom_files::ImageFile;
use std::ffi::c_int;
use std::io;
use std::ptr::null_mut;
use std::sync::Arc;

/// State of a request's slot.
struct Slot {
    operation: Box<Operation>,
    step: Step,
}

/// The step that the library is executing for a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Lengthens the image as far as the write needs.
    Lengthen,
    /// Executes the request itself.
    Itself,
    /// Flushes: for a flush request, or to make the data of a FUA request durable.
    Flush,
}

pub(super) struct RbdChannel {
    shared: Arc<Shared>,
    /// Handle through which the image is used. `turn` is its number.
    handle: Arc<Handle>,
    turn: u64,
    ended: Arc<Ended>,
    /// Tag of wake-ups for ended operations.
    tag: u16,
    /// Slots by request.
    slots: Vec<Slot>,
    in_flight: usize,
    /// Completions that are being processed.
    taken: Vec<(u32, i64)>,
}

impl RbdChannel {
    pub(super) fn new(shared: Arc<Shared>, cx: &mut Cx) -> io::Result<RbdChannel> {
        let ended = Arc::new(Ended::new()?);
        let tag = cx.new_tag();
        cx.engine.watch(ended.fd(), Token::channel(tag))?;
        Ok(RbdChannel {
            turn: shared.image.turn(),
            handle: shared.image.handle(),
            shared,
            ended,
            tag,
            slots: Vec::new(),
            in_flight: 0,
            taken: Vec::new(),
        })
    }

    /// Adopts the present handle after the disk was activated again.
    #[cold]
    fn take_turn(&mut self) {
        self.turn = self.shared.image.turn();
        self.handle = self.shared.image.handle();
    }

    /// Prepares the request's slot, and adds slots if the source has more requests than before.
    fn begin(&mut self, cx: &Cx, id: RequestId) {
        let index = id.0 as usize;
        if index >= self.slots.len() {
            let wanted = self.slots.len()..cx.slab.capacity().max(index + 1);
            let made = wanted.map(|index| Slot {
                operation: Operation::new(&self.ended, index as u32),
                step: Step::Itself,
            });
            self.slots.extend(made);
            self.taken.reserve(self.slots.len());
        }
        let request = &cx.slab[id];
        self.slots[index].step = match request.op {
            Op::Flush => Step::Flush,
            Op::Write if request.at + request.len > self.shared.size() => Step::Lengthen,
            _ => Step::Itself,
        };
    }

    /// Returns the errno, or 0, with which to complete the request without the library. None: the
    /// library must execute it.
    fn answer_at_once(&self, request: &Request) -> Option<i32> {
        let (size, grows) = (self.shared.size(), self.shared.image.grows());
        let is_outside = request.at > size || request.len > size - request.at;
        match request.op {
            Op::Flush => None,
            // No data exists there, and none is added.
            Op::Read if grows && request.at >= size => {
                // SAFETY: the request is in flight.
                unsafe { clear(&request.segments, 0..u64::MAX) };
                Some(0)
            }
            Op::Discard | Op::WriteZeroes if grows && request.at >= size => Some(0),
            _ if is_outside && !grows => Some(libc::EIO),
            Op::Read | Op::BlockStatus => None,
            _ if self.shared.read_only => Some(libc::EROFS),
            _ => (request.len == 0).then_some(0),
        }
    }

    /// Starts the request's step in the library, whose thread completes it. An error means that the
    /// step was not started.
    fn start(&mut self, cx: &Cx, id: RequestId) -> Result<(), i32> {
        let slot = &self.slots[id.0 as usize];
        let operation = &raw const *slot.operation;
        let request = &cx.slab[id];
        let what = match (slot.step, request.op) {
            (Step::Lengthen, _) => Some(What::Len(request.at + request.len)),
            (_, Op::BlockStatus) => Some(What::Status(request.at, request.len)),
            _ => None,
        };
        if let Some(what) = what {
            // SAFETY: operations live until none is in flight.
            unsafe { self.shared.inquirer.ask(operation, what)? };
            self.in_flight += 1;
            return Ok(());
        }
        let library = self.shared.image.library();
        let mut completion = null_mut();
        let argument = operation.cast_mut().cast();
        // SAFETY: the argument is an operation that lives until it has ended, and it ends once for
        // each completion.
        let made = unsafe { (library.rbd_aio_create_completion)(argument, ended, &mut completion) };
        if made < 0 {
            return Err(-made);
        }
        // SAFETY: the request stays unchanged, and its memory valid, until it completes.
        let started = unsafe { self.start_with(request, slot.step, completion) };
        if started < 0 {
            // SAFETY: the library has not accepted the completion.
            unsafe { (library.rbd_aio_release)(completion) };
            return Err(-started);
        }
        self.in_flight += 1;
        Ok(())
    }

    /// # Safety
    /// The request's segments and their memory stay valid until the completion's end.
    unsafe fn start_with(&self, request: &Request, step: Step, completion: Completion) -> c_int {
        let (image, library) = (self.handle.raw(), self.shared.image.library());
        let at = request.at;
        // Bytes beyond the end of the image need no discarding or zeroing.
        let len = request.len.min(self.shared.size().saturating_sub(at));
        let (iov, count) = (request.segments.as_ptr(), request.segments.len() as c_int);
        // SAFETY: the image is open; the rest is required of the caller.
        unsafe {
            match request.op {
                _ if step == Step::Flush => (library.rbd_aio_flush)(image, completion),
                Op::Read => (library.rbd_aio_readv)(image, iov, count, at, completion),
                Op::Discard => (library.rbd_aio_discard)(image, at, len, completion),
                Op::WriteZeroes => {
                    let flags = if request.unmap {
                        0
                    } else {
                        ZEROES_STAY_ALLOCATED
                    };
                    (library.rbd_aio_write_zeroes)(image, at, len as usize, completion, flags, 0)
                }
                _ => (library.rbd_aio_writev)(image, iov, count, at, completion),
            }
        }
    }

    /// Processes the operations that the library has completed.
    fn take_in(&mut self, cx: &mut Cx) {
        let mut taken = std::mem::take(&mut self.taken);
        self.ended.take(&mut taken);
        if !taken.is_empty() {
            cx.tick();
        }
        for (index, result) in taken.drain(..) {
            self.in_flight -= 1;
            self.has_ended(cx, RequestId(index), result);
        }
        self.taken = taken;
    }

    fn has_ended(&mut self, cx: &mut Cx, id: RequestId, result: i64) {
        let slot = &mut self.slots[id.0 as usize];
        let request = &cx.slab[id];
        if result < 0 {
            let errno = i32::try_from(-result).unwrap_or(libc::EIO);
            return self.fail(cx, id, errno);
        }
        let next = match (slot.step, request.op) {
            (Step::Lengthen, _) => Some(Step::Itself),
            (Step::Itself, Op::Write | Op::Discard | Op::WriteZeroes)
                if request.fua && self.shared.caches =>
            {
                Some(Step::Flush)
            }
            (Step::Itself, Op::Read) if (result as u64) < request.len => {
                if !self.shared.image.grows() {
                    // The image has been shrunk.
                    return self.fail(cx, id, libc::EIO);
                }
                // SAFETY: the request is in flight.
                unsafe { clear(&request.segments, result as u64..u64::MAX) };
                None
            }
            (Step::Itself, Op::BlockStatus) => {
                // SAFETY: the request is in flight until it is completed below.
                unsafe { slot.operation.answer(request) };
                None
            }
            _ => None,
        };
        let Some(step) = next else {
            return cx.complete(id, 0);
        };
        slot.step = step;
        if let Err(errno) = self.start(cx, id) {
            self.fail(cx, id, errno);
        }
    }

    #[cold]
    fn fail(&self, cx: &mut Cx, id: RequestId, errno: i32) {
        let request = &cx.slab[id];
        self.shared.has_failed(errno);
        report(
            self.shared.image.path(),
            request.op,
            request.at,
            request.len,
            errno,
        );
        cx.complete(id, errno);
    }
}

impl Channel for RbdChannel {
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        cx.enter(id, Stage::Map);
        if self.in_flight == 0 && self.turn != self.shared.image.turn() {
            self.take_turn();
        }
        if let Some(errno) = self.answer_at_once(&cx.slab[id]) {
            return cx.complete(id, errno);
        }
        self.begin(cx, id);
        cx.enter(id, Stage::Device);
        if let Err(errno) = self.start(cx, id) {
            self.fail(cx, id, errno);
        }
    }

    fn complete(&mut self, cx: &mut Cx, _: RequestId, tag: u16, _: i32) {
        if tag == self.tag {
            self.take_in(cx);
        }
    }
}

impl Drop for RbdChannel {
    fn drop(&mut self) {
        if self.in_flight > 0 {
            // The library's threads still use the operations and the image, so they must never be
            // freed.
            std::mem::forget(std::mem::take(&mut self.slots));
            std::mem::forget(self.handle.clone());
            std::mem::forget(self.shared.clone());
        }
    }
}
