//! A filter's part in each worker.

use fathom_core::{Channel, Cx, Request, RequestId};

/// One worker's part of a filter, above that worker's channel to what is
/// `below`.
pub trait Layer {
    /// As [`Channel::submit`]: usually it goes on to `below`, now or later.
    fn submit(&mut self, cx: &mut Cx, id: RequestId, below: &mut dyn Channel);

    /// The request, or a child of a layer above, has just been completed:
    /// below, or by this layer.
    fn completed(&mut self, _cx: &mut Cx, _id: RequestId) {}

    /// Something may have been completed below: the time for a layer that has
    /// children to look for them.
    fn settled(&mut self, _cx: &mut Cx, _below: &mut dyn Channel) {}

    /// As [`Channel::timer`].
    fn timer(&mut self, _cx: &mut Cx, _below: &mut dyn Channel) {}

    /// As [`Channel::drain`]; `below` is drained afterwards.
    fn drain(&mut self, _cx: &mut Cx, _source: u16, _below: &mut dyn Channel) {}

    /// As [`Channel::answered`].
    fn answered(&mut self, _request: &Request) {}
}
