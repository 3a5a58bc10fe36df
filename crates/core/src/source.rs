//! Where requests come from: a virtqueue, a network connection.

use crate::cx::Cx;
use crate::engine::Buffer;
use crate::request::{Request, RequestId};
use crate::token::Token;
use std::any::Any;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;

/// Puts something around a source before a worker gets it. What it returns
/// gives the source itself back by [`Source::into_any`].
pub type WrapSource = Arc<dyn Fn(Box<dyn Source>) -> Box<dyn Source> + Send + Sync>;

/// A source as its worker knows it; valid until it is detached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceId {
    pub(crate) slot: u16,
    pub(crate) generation: u32,
}

impl SourceId {
    /// For who is a source's worker without being one.
    pub fn new(slot: u16, generation: u32) -> SourceId {
        SourceId { slot, generation }
    }

    /// For an operation of the source itself: see [`Source::completed`].
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

/// The peer broke the protocol in a way that leaves nothing to serve. The
/// worker pops nothing more from this source.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Broken(pub String);

/// One virtqueue or one connection. It moves to its worker's thread when it
/// attaches and back to the control thread when it detaches.
///
/// A virtqueue shares memory with its peer, who kicks. A connection has no
/// kick: it receives and sends through the worker's engine
/// ([`Engine::push_socket`](crate::Engine::push_socket)), and is popped after
/// each completion of its own operations and after each `publish`.
pub trait Source: Send {
    /// Requests in flight at most. `pop` never exceeds it.
    fn capacity(&self) -> usize;

    /// Its number, if it is a virtqueue.
    fn queue(&self) -> Option<u16> {
        None
    }

    /// The eventfd by which the peer announces work; None: it does its own
    /// I/O.
    fn kick_fd(&self) -> Option<RawFd>;

    /// Replaces one of the source's eventfds and returns the previous one. After a
    /// replacement of [`Eventfd::Call`], the source signals the new eventfd, since
    /// the peer may miss a signal that went to the previous one. A source without
    /// such an eventfd returns `fd`.
    fn set_eventfd(&mut self, _which: Eventfd, fd: Option<OwnedFd>) -> Option<OwnedFd> {
        fd
    }

    /// It is attached; `id` makes the tokens of its own operations.
    fn start(&mut self, _cx: &mut Cx, _id: SourceId) -> io::Result<()> {
        Ok(())
    }

    /// An operation pushed with [`SourceId::token`] has completed with
    /// `result` (bytes or negative errno).
    fn completed(&mut self, _cx: &mut Cx, _tag: u8, _result: i32) {}

    /// It is leaving: nothing is popped any more. What is in flight ends by
    /// itself but for its own operations, which it cancels when they are of
    /// no more use.
    fn stop(&mut self, _cx: &mut Cx) {}

    /// After `stop`: whether none of its own operations is in flight, so that
    /// it can be given back.
    fn has_stopped(&self) -> bool {
        true
    }

    /// What the segments of its requests point into. It stays mapped, and
    /// the same, while the source is attached.
    fn memory(&self) -> Vec<Buffer> {
        Vec::new()
    }

    /// How many of the requests that it will give first the peer believes to be in flight: those of
    /// a server that was killed. They are popped before it is detached, whatever holds others back.
    fn inherited(&self) -> usize {
        0
    }

    /// Whether the peer has work that was not popped; no system call.
    fn pending(&mut self) -> bool;

    /// Take what the peer has made available, at most `room` requests: each
    /// in a slot of `cx.slab` that is filled in but for its stamps, its
    /// `source` and its `polled`, appended to `batch`. Malformed requests are
    /// answered here and do not appear; the return value says how many.
    fn pop(&mut self, cx: &mut Cx, room: usize, batch: &mut Vec<RequestId>) -> Result<u32, Broken>;

    /// Answer one request; the peer need not see it before `publish`.
    fn finish(&mut self, request: &Request);

    /// Make all answers visible. True when the peer wants to be told.
    fn publish(&mut self, cx: &mut Cx) -> bool;

    /// Tell the peer.
    fn notify(&mut self) {}

    /// Ask the peer to kick for new work. True when there is some already.
    fn arm(&mut self) -> bool {
        self.pending()
    }

    /// Ask the peer not to kick.
    fn disarm(&mut self) {}

    /// For the control thread that gets it back by a detach.
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}
