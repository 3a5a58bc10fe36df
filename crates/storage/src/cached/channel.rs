//! One worker's way to a base image: to the cache's file, once what it reads is there.

use super::bell::{Bell, overlap};
use super::shared::{AGAIN, Shared};
use super::view::View;
use super::wire::Run;
use fathom_core::token::woken;
use fathom_core::{
    Channel, Cx, Disk, DiskError, Extents, Mark, Op, Request, RequestId, Stage, Status, Token,
};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

/// A request that is not there yet.
struct Waiting {
    id: RequestId,
    /// In ticks.
    since: u64,
    asked: Asked,
}

/// What the keeper was last asked for, for a request.
#[derive(Clone, Copy, Default)]
struct Asked {
    /// None: it has not got through.
    connection: Option<u64>,
    /// In ticks.
    at: u64,
    /// Of how many stripes.
    missing: u32,
}

/// How long requests are waited for of a source that leaves: while it is hopeless, and at most.
const DRAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));
/// Then it is asked again, whatever has become of it.
const ASK_AGAIN: Duration = Duration::from_secs(5);

pub(super) struct CachedChannel {
    shared: Arc<Shared>,
    bell: Arc<Bell>,
    /// To the data of `view`, which is older only while requests are in flight there.
    file: Box<dyn Channel>,
    view: Arc<View>,
    epoch: u64,
    /// The engine has these files for as long as it lives.
    former: Vec<(Box<dyn Channel>, Arc<View>)>,
    /// By request: what was seen before it was read.
    seen: Vec<u64>,
    in_flight: usize,
    waiting: Vec<Waiting>,
    /// What has come too late.
    back: Vec<RequestId>,
}

impl CachedChannel {
    pub(super) fn new(shared: Arc<Shared>, cx: &mut Cx) -> Result<CachedChannel, DiskError> {
        let failed = |source| DiskError::Io {
            path: shared.name.clone(),
            what: "cannot start a worker's channel",
            source,
        };
        let bell = shared.listen().map_err(failed)?;
        cx.engine
            .watch(bell.fd().as_raw_fd(), Token::channel(woken::BASE))
            .map_err(failed)?;
        let (epoch, view) = (shared.epoch(), shared.view());
        Ok(CachedChannel {
            file: view.disk.channel(cx)?,
            bell,
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

    /// Why it is not read, or what it is answered at once.
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
            // What is behind the image's end is for the file to say.
            Op::Read => None,
        }
    }

    /// The stripes that a read needs; none: it reads nothing of the image.
    #[inline]
    fn run(&self, request: &Request) -> Option<Run> {
        let geometry = &self.shared.geometry;
        let there = geometry.size.saturating_sub(request.at).min(request.len);
        (there > 0).then(|| geometry.run(request.at, there))
    }

    /// Reads it if all of it is there.
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

    /// Whether what has been read since was there all the time. What was not is read once more.
    #[inline]
    fn look_again(&mut self, cx: &mut Cx, since: Mark) {
        let mut back = std::mem::take(&mut self.back);
        let mut ended = 0;
        let stands = |id: RequestId, request: &Request| {
            ended += 1;
            let run = self.run(request);
            let seen = self.seen[id.0 as usize];
            // (A read that has failed was not served either.)
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
        // It may have come meanwhile, and the bell, too.
        self.bell.ring(None);
        self.look_later(cx);
    }

    /// Asks for what the request waits for, if that was not done, or is to be done once more: the keeper is another
    /// one, something that had come has gone again, or it is long ago.
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

    /// Goes on with what is there by now.
    fn go_on(&mut self, cx: &mut Cx) {
        let failed = self.bell.hear();
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

    /// Whether it has waited for long enough.
    fn is_enough(&self, cx: &Cx, id: RequestId, waited: Duration) -> bool {
        let is_hopeless = self.shared.is_hopeless(waited) || self.epoch != self.shared.epoch();
        match cx.may_wait(id) {
            true => is_hopeless && waited > self.shared.patience,
            false => waited > DRAIN.1 || (is_hopeless && waited > DRAIN.0),
        }
    }

    /// Goes over to another cache's files, once nothing is in flight to those of the last.
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
        if id == RequestId::NOBODY && tag == woken::BASE {
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
