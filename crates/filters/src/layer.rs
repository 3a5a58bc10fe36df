//! A filter's part in each worker.

use fathom_core::{Channel, Cx, Request, RequestId};

/// A worker's part of a filter, above that worker's channel `below`.
pub trait Layer {
    /// Like [`Channel::submit`]. Usually passes the request on to `below`, now or later.
    fn submit(&mut self, cx: &mut Cx, id: RequestId, below: &mut dyn Channel);

    /// Handles a request of a source, or a child of a layer above, that `below` or this layer has
    /// just completed.
    fn completed(&mut self, _cx: &mut Cx, _id: RequestId) {}

    /// Called when requests below may have completed. A layer with children checks for completed
    /// children here.
    fn settled(&mut self, _cx: &mut Cx, _below: &mut dyn Channel) {}

    /// Like [`Channel::timer`].
    fn timer(&mut self, _cx: &mut Cx, _below: &mut dyn Channel) {}

    /// Like [`Channel::drain`]; `below` is drained afterwards.
    fn drain(&mut self, _cx: &mut Cx, _source: u16, _below: &mut dyn Channel) {}

    /// Like [`Channel::answered`].
    fn answered(&mut self, _request: &Request) {}
}
