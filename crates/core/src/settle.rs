//! Waits until the requests that a worker's disk has accepted have ended.

use crate::cx::Cx;
use crate::request::RequestId;
use fathom_trace::Stage;
use std::sync::mpsc::SyncSender;

/// Requests that a caller waits for.
struct Unsettled {
    requests: Vec<RequestId>,
    reply: SyncSender<()>,
}

/// All waiting callers; usually no caller waits.
#[derive(Default)]
pub(crate) struct Unsettleds(Vec<Unsettled>);

impl Unsettleds {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Sends a reply once all requests and children that the disk has at this moment have ended.
    /// Excludes those that a filter holds back, since the disk has not seen them.
    pub(crate) fn add(&mut self, cx: &Cx, reply: SyncSender<()>) {
        let has_come = |id: &RequestId| {
            let stage = cx.slab[*id].stamps.stage();
            cfg!(fathom_unstamped) || !matches!(stage, Stage::Wake | Stage::Queue)
        };
        let mut requests = cx.slab.in_use();
        requests.retain(has_come);
        self.0.push(Unsettled { requests, reply });
        self.ended(&[]);
    }

    /// Removes requests that have ended, and replies to callers that have none left.
    #[cold]
    pub(crate) fn ended(&mut self, ended: &[RequestId]) {
        self.0.retain_mut(|unsettled| {
            unsettled.requests.retain(|id| !ended.contains(id));
            let waits = !unsettled.requests.is_empty();
            if !waits {
                // The caller may have given up.
                let _ = unsettled.reply.send(());
            }
            waits
        });
    }
}
