//! Waiting until what a worker's disk has taken on has ended.

use crate::cx::Cx;
use crate::request::RequestId;
use fathom_trace::Stage;
use std::sync::mpsc::SyncSender;

/// Requests that somebody waits for.
struct Unsettled {
    requests: Vec<RequestId>,
    reply: SyncSender<()>,
}

/// All who wait; mostly nobody.
#[derive(Default)]
pub(crate) struct Unsettleds(Vec<Unsettled>);

impl Unsettleds {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Tells `reply` once the requests and children have ended that the disk has at this instant.
    /// Those that a filter holds back are none of them: the disk has not seen them.
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

    /// These requests have ended.
    #[cold]
    pub(crate) fn ended(&mut self, ended: &[RequestId]) {
        self.0.retain_mut(|unsettled| {
            unsettled.requests.retain(|id| !ended.contains(id));
            let waits = !unsettled.requests.is_empty();
            if !waits {
                // Who has asked may have given up.
                let _ = unsettled.reply.send(());
            }
            waits
        });
    }
}
