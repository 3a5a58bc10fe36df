//! A worker's access to a base image: reads the cache's file once it has the stripes of a request.

use super::shared::{AGAIN, Shared};
use super::stripe_notifier::{StripeNotifier, overlap};
use super::view::View;
use super::wire::Run;
use fathom_core::{
    Channel, Cx, Disk, DiskError, Extents, Mark, Op, Request, RequestId, Stage, Status, Token,
};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

/// A request whose stripes are not all in the cache.
struct Waiting {
    id: RequestId,
    /// Start of the wait, in ticks.
    since: u64,
    asked: Asked,
}

/// The last request to the keeper for the stripes of a waiting request.
#[derive(Clone, Copy, Default)]
struct Asked {
    /// Number of the connection that carried the request. None: it was not sent.
    connection: Option<u64>,
    /// Time of the request, in ticks.
    at: u64,
    /// Number of stripes that were missing.
    missing: u32,
}

/// Time for which draining waits for requests: while the data source is unavailable, and at most.
const DRAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));
/// Interval after which missing stripes are requested again in any case.
const ASK_AGAIN: Duration = Duration::from_secs(5);

pub(super) struct CachedChannel {
    shared: Arc<Shared>,
    stripe_notifier: Arc<StripeNotifier>,
    /// Tag of wake-ups by the stripe notifier.
    tag: u16,
    /// Channel of the data file of `view`. `view` is older than the shared one only while requests
    /// are in flight on it.
    file: Box<dyn Channel>,
    view: Arc<View>,
    epoch: u64,
    /// Replaced channels and views, kept because their files stay registered with the engine until
    /// the engine is dropped.
    former: Vec<(Box<dyn Channel>, Arc<View>)>,
    /// Value of the live map before each read, by request.
    seen: Vec<u64>,
    in_flight: usize,
    waiting: Vec<Waiting>,
    /// Reads to repeat, because stripes were removed while they were read.
    back: Vec<RequestId>,
}

impl CachedChannel {
    pub(super) fn new(shared: Arc<Shared>, cx: &mut Cx) -> Result<CachedChannel, DiskError> {
        let failed = |source| DiskError::Io {
            path: shared.name.clone(),
            what: "cannot start a worker's channel",
            source,
        };
        let stripe_notifier = shared.listen().map_err(failed)?;
        let tag = cx.new_tag();
        cx.engine
            .watch(stripe_notifier.fd().as_raw_fd(), Token::channel(tag))
            .map_err(failed)?;
        let (epoch, view) = (shared.epoch(), shared.view());
        Ok(CachedChannel {
            file: view.disk.channel(cx)?,
            stripe_notifier,
            tag,
            view,
            epoch,
            former: Vec::new(),
            seen: Vec::new(),
            in_flight: 0,
            waiting: Vec::new(),
            back: Vec::new(),
            shared,
        })
    }

    /// Returns the errno, or 0, with which to complete a request at once. None: the request must be
    /// read.
    fn answer(&self, request: &Request) -> Option<i32> {
        match request.op {
            Op::Flush => Some(0),
            Op::Write | Op::Discard | Op::WriteZeroes => Some(libc::EROFS),
            Op::BlockStatus => {
                // SAFETY: the request is in flight.
                unsafe { Extents::of(&request.segments, request.len) }
                    .push(Status::DATA, request.len);
                Some(0)
            }
            // The file's channel handles bytes beyond the image's end.
            Op::Read => None,
        }
    }

    /// Returns the stripes that a read needs, or None if it reads nothing of the image.
    #[inline]
    fn run(&self, request: &Request) -> Option<Run> {
        let geometry = &self.shared.geometry;
        let there = geometry.size.saturating_sub(request.at).min(request.len);
        (there > 0).then(|| geometry.run(request.at, there))
    }

    /// Reads the request if all of its stripes are in the cache. Returns false otherwise.
    #[inline]
    fn try_read(&mut self, cx: &mut Cx, id: RequestId) -> bool {
        if self.epoch != self.shared.epoch() && !self.renew(cx) {
            return false;
        }
        let run = self.run(&cx.slab[id]);
        let Some(seen) = run.map_or(Some(0), |run| self.view.live.look(run)) else {
            return false;
        };
        if let Some(run) = run {
            self.shared.touched.note(run);
        }
        let index = id.0 as usize;
        if index >= self.seen.len() {
            self.seen.resize(cx.slab.capacity().max(index + 1), 0);
        }
        self.seen[index] = seen;
        self.in_flight += 1;
        let mark = cx.mark();
        self.file.submit(cx, id);
        self.look_again(cx, mark);
        true
    }

    /// Checks whether the stripes of reads completed since the mark were in the cache throughout.
    /// Repeats the others.
    #[inline]
    fn look_again(&mut self, cx: &mut Cx, since: Mark) {
        let mut back = std::mem::take(&mut self.back);
        let mut ended = 0;
        let stands = |id: RequestId, request: &Request| {
            ended += 1;
            let run = self.run(request);
            let seen = self.seen[id.0 as usize];
            // Failed reads whose stripes stayed in the cache are accepted, too.
            run.is_none_or(|run| self.view.live.look(run) == Some(seen))
        };
        cx.take_back(since, stands, &mut back);
        self.in_flight -= ended;
        for id in back.drain(..) {
            self.wait(cx, id);
        }
        self.back = back;
    }

    #[cold]
    fn wait(&mut self, cx: &mut Cx, id: RequestId) {
        let since = cx.tick();
        let asked = self.ask(cx, id, Asked::default());
        self.waiting.push(Waiting { id, since, asked });
        // The data may have arrived, and been notified, before the request was added.
        self.stripe_notifier.notify(None);
        self.look_later(cx);
    }

    /// Requests missing stripes from the keeper, if that was not done or must be repeated: the
    /// keeper is another one, a stripe has been removed again, or the last request is old.
    fn ask(&self, cx: &Cx, id: RequestId, asked: Asked) -> Asked {
        let Some(run) = self.run(&cx.slab[id]) else {
            return asked;
        };
        let missing = self.shared.missing(&self.view, run);
        let connection = self.shared.connection();
        let is_old = cx.now().saturating_sub(asked.at) > cx.clock().ticks(ASK_AGAIN);
        if asked.connection == Some(connection) && missing <= asked.missing && !is_old {
            return Asked { missing, ..asked };
        }
        let is_said = self.shared.want(&self.view, run);
        Asked {
            connection: is_said.then_some(connection),
            at: cx.now(),
            missing,
        }
    }

    fn look_later(&self, cx: &mut Cx) {
        let later = cx.now() + cx.clock().ticks(AGAIN);
        cx.wake_at(later);
    }

    /// Retries all waiting requests, and fails those that cannot be served.
    fn go_on(&mut self, cx: &mut Cx) {
        let failed = self.stripe_notifier.take_failed();
        if self.waiting.is_empty() {
            return;
        }
        let now = cx.tick();
        for mut waiting in std::mem::take(&mut self.waiting) {
            let id = waiting.id;
            if self.try_read(cx, id) {
                continue;
            }
            let run = self.run(&cx.slab[id]).unwrap_or_default();
            let waited = cx.clock().duration(now.saturating_sub(waiting.since));
            if failed.iter().any(|failed| overlap(*failed, run)) || self.is_enough(cx, id, waited) {
                cx.complete(id, libc::EIO);
                continue;
            }
            waiting.asked = self.ask(cx, id, waiting.asked);
            self.waiting.push(waiting);
        }
        if !self.waiting.is_empty() {
            self.look_later(cx);
        }
    }

    /// Returns whether a request has waited long enough to fail.
    fn is_enough(&self, cx: &Cx, id: RequestId, waited: Duration) -> bool {
        let is_hopeless = self.shared.is_hopeless(waited) || self.epoch != self.shared.epoch();
        match cx.may_wait(id) {
            true => is_hopeless && waited > self.shared.patience,
            false => waited > DRAIN.1 || (is_hopeless && waited > DRAIN.0),
        }
    }

    /// Switches to another cache's files, once nothing is in flight on the previous ones.
    #[cold]
    fn renew(&mut self, cx: &mut Cx) -> bool {
        if self.in_flight > 0 {
            return false;
        }
        let (epoch, view) = (self.shared.epoch(), self.shared.view());
        match view.disk.channel(cx) {
            Ok(file) => {
                let former = (
                    std::mem::replace(&mut self.file, file),
                    std::mem::replace(&mut self.view, view),
                );
                self.former.push(former);
                self.epoch = epoch;
                true
            }
            Err(error) => {
                tracing::error!("{error}");
                false
            }
        }
    }
}

impl Channel for CachedChannel {
    #[inline]
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        if let Some(errno) = self.answer(&cx.slab[id]) {
            cx.enter(id, Stage::Map);
            cx.enter(id, Stage::Device);
            return cx.complete(id, errno);
        }
        if !self.try_read(cx, id) {
            cx.enter(id, Stage::Map);
            cx.enter(id, Stage::Device);
            self.wait(cx, id);
        }
    }

    fn complete(&mut self, cx: &mut Cx, id: RequestId, tag: u16, result: i32) {
        if id == RequestId::NOBODY && tag == self.tag {
            return self.go_on(cx);
        }
        let mark = cx.mark();
        self.file.complete(cx, id, tag, result);
        self.look_again(cx, mark);
        if self.epoch != self.shared.epoch() {
            self.go_on(cx);
        }
    }

    fn timer(&mut self, cx: &mut Cx) {
        let mark = cx.mark();
        self.file.timer(cx);
        self.look_again(cx, mark);
        self.go_on(cx);
    }

    fn drain(&mut self, cx: &mut Cx, source: u16) {
        self.file.drain(cx, source);
        self.go_on(cx);
    }
}
