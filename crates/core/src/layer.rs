//! Layers: a disk, channel or source that wraps another one and changes only a part of what it
//! does.
//!
//! A layer has only the methods that it changes. All others pass the call on to what is below, so
//! that no layer can forget a method.

use crate::cx::Cx;
use crate::disk::{Channel, Disk, DiskError, DiskInfo, Resize, SizeWatch};
use crate::engine::Buffer;
use crate::request::{Request, RequestId};
use crate::saved_state::SavedState;
use crate::source::{Broken, Eventfd, Source, SourceId};
use std::any::Any;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::time::Duration;

/// A [`Disk`] that wraps the disk `below`.
pub trait DiskLayer: Send + Sync {
    /// Returns the disk that this layer wraps.
    fn below(&self) -> &dyn Disk;

    /// Implements [`Disk::info`]; the default passes the call on.
    fn info(&self) -> DiskInfo {
        self.below().info()
    }

    /// Implements [`Disk::saved_state_len`]; the default passes the call on.
    fn saved_state_len(&self) -> u64 {
        self.below().saved_state_len()
    }

    /// Implements [`Disk::set_saved_state`]; the default passes the call on.
    fn set_saved_state(&self, saved_state: Option<SavedState>) {
        self.below().set_saved_state(saved_state);
    }

    /// Implements [`Disk::connect_delay`]; the default passes the call on.
    fn connect_delay(&self) -> Duration {
        self.below().connect_delay()
    }

    /// Implements [`Disk::activate`]; the default passes the call on.
    fn activate(&self) -> Result<(), DiskError> {
        self.below().activate()
    }

    /// Implements [`Disk::deactivate`]; the default passes the call on.
    fn deactivate(&self) -> Result<(), DiskError> {
        self.below().deactivate()
    }

    /// Implements [`Disk::resize`]; the default passes the call on.
    fn resize(&self, to: &Resize) -> Result<u64, DiskError> {
        self.below().resize(to)
    }

    /// Implements [`Disk::watch_size`]; the default passes the call on.
    fn watch_size(&self, watch: SizeWatch) {
        self.below().watch_size(watch);
    }

    /// Implements [`Disk::channel`]; the default returns the channel of the disk below.
    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        self.below().channel(cx)
    }
}

impl<L: DiskLayer> Disk for L {
    fn info(&self) -> DiskInfo {
        DiskLayer::info(self)
    }

    fn saved_state_len(&self) -> u64 {
        DiskLayer::saved_state_len(self)
    }

    fn set_saved_state(&self, saved_state: Option<SavedState>) {
        DiskLayer::set_saved_state(self, saved_state);
    }

    fn connect_delay(&self) -> Duration {
        DiskLayer::connect_delay(self)
    }

    fn activate(&self) -> Result<(), DiskError> {
        DiskLayer::activate(self)
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        DiskLayer::deactivate(self)
    }

    fn resize(&self, to: &Resize) -> Result<u64, DiskError> {
        DiskLayer::resize(self, to)
    }

    fn watch_size(&self, watch: SizeWatch) {
        DiskLayer::watch_size(self, watch);
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        DiskLayer::channel(self, cx)
    }
}

/// A [`Channel`] that wraps the channel `below`.
pub trait ChannelLayer {
    /// Returns the channel that this layer wraps.
    fn below(&mut self) -> &mut dyn Channel;

    /// Implements [`Channel::submit`]; the default passes the request on.
    #[inline]
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        self.below().submit(cx, id);
    }

    /// Implements [`Channel::complete`]; the default passes the completion on.
    #[inline]
    fn complete(&mut self, cx: &mut Cx, id: RequestId, tag: u16, result: i32) {
        self.below().complete(cx, id, tag, result);
    }

    /// Implements [`Channel::timer`]; the default passes the call on.
    fn timer(&mut self, cx: &mut Cx) {
        self.below().timer(cx);
    }

    /// Implements [`Channel::drain`]; the default passes the call on.
    fn drain(&mut self, cx: &mut Cx, source: u16) {
        self.below().drain(cx, source);
    }

    /// Implements [`Channel::answered`]; the default passes the request on.
    fn answered(&mut self, request: &Request) {
        self.below().answered(request);
    }
}

impl<L: ChannelLayer> Channel for L {
    #[inline]
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        ChannelLayer::submit(self, cx, id);
    }

    #[inline]
    fn complete(&mut self, cx: &mut Cx, id: RequestId, tag: u16, result: i32) {
        ChannelLayer::complete(self, cx, id, tag, result);
    }

    fn timer(&mut self, cx: &mut Cx) {
        ChannelLayer::timer(self, cx);
    }

    fn drain(&mut self, cx: &mut Cx, source: u16) {
        ChannelLayer::drain(self, cx, source);
    }

    fn answered(&mut self, request: &Request) {
        ChannelLayer::answered(self, request);
    }
}

/// A [`Source`] that wraps the source `below`.
///
/// Only its notifications can be changed: nothing else of a source has been wrapped so far.
pub trait SourceLayer: Send {
    /// Returns the source that this layer wraps.
    fn below(&self) -> &dyn Source;

    /// Returns the source that this layer wraps, for changes.
    fn below_mut(&mut self) -> &mut dyn Source;

    /// Removes the layer and returns the source that it has wrapped.
    fn into_below(self: Box<Self>) -> Box<dyn Source>;

    /// Implements [`Source::notify`]; the default passes the call on.
    fn notify(&mut self) {
        self.below_mut().notify();
    }
}

impl<L: SourceLayer> Source for L {
    fn capacity(&self) -> usize {
        self.below().capacity()
    }

    fn queue(&self) -> Option<u16> {
        self.below().queue()
    }

    fn kick_fd(&self) -> Option<RawFd> {
        self.below().kick_fd()
    }

    fn set_eventfd(&mut self, which: Eventfd, fd: Option<OwnedFd>) -> Option<OwnedFd> {
        self.below_mut().set_eventfd(which, fd)
    }

    fn start(&mut self, cx: &mut Cx, id: SourceId) -> io::Result<()> {
        self.below_mut().start(cx, id)
    }

    fn completed(&mut self, cx: &mut Cx, tag: u8, result: i32) {
        self.below_mut().completed(cx, tag, result);
    }

    fn stop(&mut self, cx: &mut Cx) {
        self.below_mut().stop(cx);
    }

    fn has_stopped(&self) -> bool {
        self.below().has_stopped()
    }

    fn memory(&self) -> Vec<Buffer> {
        self.below().memory()
    }

    fn inherited(&self) -> usize {
        self.below().inherited()
    }

    fn pending(&mut self) -> bool {
        self.below_mut().pending()
    }

    fn pop(&mut self, cx: &mut Cx, room: usize, batch: &mut Vec<RequestId>) -> Result<u32, Broken> {
        self.below_mut().pop(cx, room, batch)
    }

    fn finish(&mut self, request: &Request) {
        self.below_mut().finish(request);
    }

    fn publish(&mut self, cx: &mut Cx) -> bool {
        self.below_mut().publish(cx)
    }

    fn notify(&mut self) {
        SourceLayer::notify(self);
    }

    fn arm(&mut self) -> bool {
        self.below_mut().arm()
    }

    fn disarm(&mut self) {
        self.below_mut().disarm();
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self.into_below().into_any()
    }
}
