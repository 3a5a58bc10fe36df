//! Sources of requests: virtqueues and network connections.

use crate::cx::Cx;
use crate::engine::Buffer;
use crate::request::{Request, RequestId};
use crate::token::Token;
use std::any::Any;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;

/// Wraps a source before a worker gets it. The wrapper returns the inner source from
/// [`Source::into_any`].
pub type WrapSource = Arc<dyn Fn(Box<dyn Source>) -> Box<dyn Source> + Send + Sync>;

/// Identifies a source within its worker; valid until the source is detached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceId {
    pub(crate) slot: u16,
    pub(crate) generation: u32,
}

impl SourceId {
    /// Creates an id, for code that plays the role of a source's worker.
    pub fn new(slot: u16, generation: u32) -> SourceId {
        SourceId { slot, generation }
    }

    /// Returns the token for an operation of the source itself: see [`Source::completed`].
    #[inline]
    pub fn token(self, tag: u8) -> Token {
        Token::source(self.slot, self.generation, tag)
    }
}

/// The eventfds of a virtqueue, as vhost-user names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eventfd {
    /// The driver signals it when the avail ring has new requests.
    Kick,
    /// The device signals it when the used ring has new elements.
    Call,
    /// The device signals it when the queue is broken.
    Err,
}

/// A protocol violation of the peer after which the source cannot be served. The worker pops
/// nothing more from this source.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Broken(pub String);

/// A virtqueue or a connection. A source moves to its worker's thread when it is attached, and back
/// to the control thread when it is detached.
///
/// A virtqueue shares memory with its peer, which sends kicks. A connection has no kick eventfd,
/// and receives and sends through the worker's engine
/// ([`Engine::push_socket`](crate::Engine::push_socket)). The worker pops it after each completion
/// of its own operations and after each `publish`.
pub trait Source: Send {
    /// Returns the maximum number of requests in flight. `pop` never exceeds it.
    fn capacity(&self) -> usize;

    /// Returns the queue number, if the source is a virtqueue.
    fn queue(&self) -> Option<u16> {
        None
    }

    /// Returns the eventfd by which the peer announces work. None: the source does its own I/O.
    fn kick_fd(&self) -> Option<RawFd>;

    /// Replaces one of the source's eventfds and returns the previous one. After a
    /// replacement of [`Eventfd::Call`], the source signals the new eventfd, since
    /// the peer may miss a signal that went to the previous one. A source without
    /// such an eventfd returns `fd`.
    fn set_eventfd(&mut self, _which: Eventfd, fd: Option<OwnedFd>) -> Option<OwnedFd> {
        fd
    }

    /// Starts the source when it is attached; `id` creates the tokens for its own operations.
    fn start(&mut self, _cx: &mut Cx, _id: SourceId) -> io::Result<()> {
        Ok(())
    }

    /// Handles the completion of an operation pushed with [`SourceId::token`]. `result` is a number
    /// of bytes or a negative errno.
    fn completed(&mut self, _cx: &mut Cx, _tag: u8, _result: i32) {}

    /// Prepares to be detached: nothing more is popped. Requests in flight end normally. The source
    /// cancels its own operations once they are no longer needed.
    fn stop(&mut self, _cx: &mut Cx) {}

    /// Returns whether none of the source's own operations is in flight, so that the worker can
    /// give the source back. Called after `stop`.
    fn has_stopped(&self) -> bool {
        true
    }

    /// Returns the memory that the segments of the source's requests refer to. The memory stays
    /// mapped at the same addresses while the source is attached.
    fn memory(&self) -> Vec<Buffer> {
        Vec::new()
    }

    /// Returns how many requests still to be popped were in flight in a server that was killed.
    /// These requests are the first that `pop` returns. The worker pops them before the source is
    /// detached, even if the channel holds other requests back.
    fn inherited(&self) -> usize {
        0
    }

    /// Returns whether the peer has made requests available that were not popped; no system call.
    fn pending(&mut self) -> bool;

    /// Takes up to `room` requests that the peer has made available, and appends them to `batch`.
    /// Each occupies a slot of `cx.slab`, with all fields set except the stamps, `source` and
    /// `polled`. The source answers malformed requests itself and returns their number.
    fn pop(&mut self, cx: &mut Cx, room: usize, batch: &mut Vec<RequestId>) -> Result<u32, Broken>;

    /// Completes one request; the peer need not see the completion before `publish`.
    fn finish(&mut self, request: &Request);

    /// Makes all completions visible to the peer. Returns true if the peer wants a notification.
    fn publish(&mut self, cx: &mut Cx) -> bool;

    /// Notifies the peer.
    fn notify(&mut self) {}

    /// Asks the peer to kick when it has new work. Returns true if there is work already.
    fn arm(&mut self) -> bool {
        self.pending()
    }

    /// Asks the peer not to kick.
    fn disarm(&mut self) {}

    /// Converts the source to `Any`, for the control thread that detached it.
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}
