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
    fn below(&self) -> &dyn Disk;

    fn info(&self) -> DiskInfo {
        self.below().info()
    }

    fn saved_state_len(&self) -> u64 {
        self.below().saved_state_len()
    }

    fn set_saved_state(&self, saved_state: Option<SavedState>) {
        self.below().set_saved_state(saved_state);
    }

    fn connect_delay(&self) -> Duration {
        self.below().connect_delay()
    }

    fn activate(&self) -> Result<(), DiskError> {
        self.below().activate()
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        self.below().deactivate()
    }

    fn resize(&self, to: &Resize) -> Result<u64, DiskError> {
        self.below().resize(to)
    }

    fn watch_size(&self, watch: SizeWatch) {
        self.below().watch_size(watch);
    }

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
    fn below(&mut self) -> &mut dyn Channel;

    #[inline]
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        self.below().submit(cx, id);
    }

    #[inline]
    fn complete(&mut self, cx: &mut Cx, id: RequestId, tag: u16, result: i32) {
        self.below().complete(cx, id, tag, result);
    }

    fn timer(&mut self, cx: &mut Cx) {
        self.below().timer(cx);
    }

    fn drain(&mut self, cx: &mut Cx, source: u16) {
        self.below().drain(cx, source);
    }

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
    fn below(&self) -> &dyn Source;

    fn below_mut(&mut self) -> &mut dyn Source;

    fn into_below(self: Box<Self>) -> Box<dyn Source>;

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
