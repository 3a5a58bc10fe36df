//! The worker: what moves a disk's requests on one thread.
//!
//! A turn pops what the sources have, submits it, reaps what has completed, and
//! answers it. Clock readings are shared by all requests that make a transition
//! together. Whose turn it is, and when nobody's, is the thread's to say: that of
//! one worker (`dedicated.rs`) or of many (`pooled.rs`).

use crate::changes::Changes;
use crate::counters::Counters;
use crate::cx::Cx;
use crate::disk::Channel;
use crate::engine::{Completion, Engine, Wait};
use crate::mailbox::{Bell, Command};
use crate::oldest::Oldest;
use crate::polling::Awaited;
use crate::request::{Owner, Request, RequestId};
use crate::settle::Unsettleds;
use crate::slot::Slot;
use crate::source::{Source, SourceId};
use crate::token::{GENERATIONS, Target, Token};
use fathom_trace::{Op, Recorder, RingWriter, Stage, Stamps, TraceRecord};
use fathom_units::cause;
use probe::probe;
use std::io;
use std::sync::Arc;

/// A large batch reaches the kernel in pieces, this many requests first and
/// then up to eight times as many as before, so that the device works on the
/// first while the rest is still being submitted. A device takes several
/// times as long for a request as the kernel takes to submit it, so it does
/// not run dry.
const HEAD_START: usize = 1;

/// For fewer requests the pieces are not worth their system calls.
const LARGE_BATCH: usize = 24;

/// A worker's whole state; lives on its thread.
pub(crate) struct Worker {
    pub(crate) cx: Cx,
    channel: Box<dyn Channel>,
    slots: Vec<Option<Slot>>,
    generation: u32,
    bell: Arc<Bell>,
    /// How many requests were answered at once last.
    pub(crate) answered: usize,
    /// What one of them took.
    pub(crate) latency: u64,
    /// What to await of the sources that there are.
    pub(crate) peers: Awaited,
    recorder: Recorder,
    trace: Option<RingWriter>,
    changes: Option<Arc<Changes>>,
    pub(crate) counters: Arc<Counters>,
    batch: Vec<RequestId>,
    /// What is to be dispatched.
    pub(crate) completions: Vec<Completion>,
    /// Whose turn it is first, when not all can be popped.
    first: usize,
    unsettled: Unsettleds,
    pub(crate) is_stopping: bool,
}

impl Worker {
    pub(crate) fn new(
        cx: Cx,
        channel: Box<dyn Channel>,
        bell: Arc<Bell>,
        recorder: Recorder,
        counters: Arc<Counters>,
    ) -> Worker {
        Worker {
            cx,
            channel,
            slots: Vec::new(),
            generation: 0,
            bell,
            answered: 0,
            latency: 0,
            peers: Awaited::Peer,
            recorder,
            trace: None,
            changes: None,
            counters,
            batch: Vec::new(),
            completions: Vec::new(),
            first: 0,
            unsettled: Unsettleds::default(),
            is_stopping: false,
        }
    }

    /// Pop what the sources have.
    pub(crate) fn pop(&mut self) {
        if !self.cx.admits {
            return;
        }
        for index in 0..self.slots.len() {
            if let Some(slot) = &self.slots[index]
                && slot.looks_open()
                && (!slot.armed || slot.kicked)
            {
                self.pop_from(index, usize::MAX);
            }
        }
    }

    /// Pop at most `most` of what the sources have, who take turns at being first.
    pub(crate) fn pop_some(&mut self, most: usize) {
        if !self.cx.admits {
            return;
        }
        let all = self.slots.len();
        let first = std::mem::take(&mut self.first);
        for n in 0..all {
            let index = (first + n) % all;
            if let Some(slot) = &self.slots[index]
                && slot.looks_open()
                && (!slot.armed || slot.kicked)
            {
                self.pop_from(index, most - self.batch.len());
            }
            if self.batch.len() >= most {
                self.first = index + 1;
                return;
            }
        }
    }

    /// Pop at most `most` of what a source has.
    #[inline]
    fn pop_from(&mut self, index: usize, most: usize) {
        let slot = occupied(&mut self.slots, index as u16);
        let seen = self.cx.now;
        let polled = !std::mem::take(&mut slot.kicked);
        slot.disarm();
        let first = self.batch.len();
        let room = most.min(slot.capacity - slot.in_flight);
        match slot.source.pop(&mut self.cx, room, &mut self.batch) {
            Ok(malformed) => slot.dirty |= malformed > 0,
            Err(broken) => {
                tracing::error!("a queue is stopped, because its driver broke a rule: {broken}");
                slot.closed = true;
                slot.dirty = true; // by what it answered before
            }
        }
        if self.cx.refused > 0 {
            let refused = std::mem::take(&mut self.cx.refused);
            self.counters.refused.add(refused);
        }
        let taken = self.batch.len() - first;
        slot.in_flight += taken;
        slot.counters.taken.add(taken as u64);
        slot.counters.in_flight.set(slot.in_flight as u64);
        for &id in &self.batch[first..] {
            let request = &mut self.cx.slab[id];
            request.source = index as u16;
            request.owner = Owner::SOURCE;
            request.at = request.offset;
            request.polled = polled;
            request.error = 0;
            request.stamps = Stamps::start(seen);
        }
    }

    /// Submit what was popped. False when there was nothing.
    pub(crate) fn submit(&mut self) -> bool {
        if self.batch.is_empty() {
            return false;
        }
        self.counters.took(self.batch.len());
        let popped = self.cx.tick();
        let cx_of = self.cx.number();
        for &id in &self.batch {
            let request = &mut self.cx.slab[id];
            let (op, offset, len) = (request.op as u8, request.offset, request.len);
            probe!(fathom, pop, cx_of, id.0, op, offset, len, request.queue);
            request.stamps.enter(Stage::Queue, popped);
        }
        let large = self.batch.len() >= LARGE_BATCH;
        let mut head_start = HEAD_START;
        for (n, &id) in self.batch.iter().enumerate() {
            if large && n == head_start {
                head_start *= 8;
                submit_queued(&mut *self.cx.engine, Wait::No, &mut self.completions);
            }
            self.channel.submit(&mut self.cx, id);
        }
        self.batch.clear();
        true
    }

    /// Let the channel go on by itself if it is time. False when it is not.
    pub(crate) fn alarm(&mut self) -> bool {
        let due = self.cx.now >= self.cx.alarm;
        if due {
            self.look();
        }
        due
    }

    fn look(&mut self) {
        self.cx.alarm = u64::MAX;
        self.cx.admits = true;
        self.channel.timer(&mut self.cx);
    }

    /// Hand queued I/O to the kernel and take what has completed.
    #[inline]
    pub(crate) fn enter(&mut self, wait: Wait) {
        submit_queued(&mut *self.cx.engine, wait, &mut self.completions);
    }

    /// Dispatch what has completed. True when a source's own I/O has.
    pub(crate) fn dispatch(&mut self) -> bool {
        if self.completions.is_empty() {
            return false;
        }
        let mut moved = false;
        self.cx.tick();
        for Completion { token, result } in self.completions.drain(..) {
            match token.target() {
                Target::Request { id, tag } => {
                    probe!(fathom, complete, self.cx.number(), id.0, result);
                    self.channel.complete(&mut self.cx, id, tag, result);
                }
                Target::Kick { slot, generation } => {
                    if let Some(Some(slot)) = self.slots.get_mut(usize::from(slot))
                        && slot.generation == generation
                    {
                        slot.kicked = true;
                        slot.counters.kicks.increment();
                        self.counters.kicks.increment();
                    }
                }
                Target::Source {
                    slot,
                    generation,
                    tag,
                } => {
                    if let Some(Some(slot)) = self.slots.get_mut(usize::from(slot))
                        && slot.generation == generation
                    {
                        slot.source.completed(&mut self.cx, tag, result);
                        slot.kicked = true;
                        moved = true;
                    }
                }
                Target::Mailbox | Target::Engine => {}
            }
        }
        moved
    }

    /// Answer what is done: status and used ring, then at most one
    /// notification a source, then the books. False when there was nothing.
    pub(crate) fn finish(&mut self) -> bool {
        if !self.unsettled.is_empty() {
            self.unsettled.ended(&self.cx.children_completed);
            self.unsettled.ended(&self.cx.done);
        }
        self.cx.children_completed.clear();
        for &id in &self.cx.done {
            let request = &self.cx.slab[id];
            let slot = occupied(&mut self.slots, request.source);
            slot.source.finish(request);
            slot.in_flight -= 1;
            slot.dirty = true;
        }
        if !self.publish() {
            return false;
        }
        let published = self.cx.tick();
        probe!(fathom, publish, self.cx.number(), self.cx.done.len());
        let notified = if self.notify() {
            self.cx.tick()
        } else {
            published
        };
        self.record(published, notified);
        true
    }

    /// Publish the answers of each source that has any. False when none has.
    fn publish(&mut self) -> bool {
        let mut any = false;
        for slot in self.slots.iter_mut().flatten() {
            if std::mem::take(&mut slot.dirty) {
                slot.notify = slot.source.publish(&mut self.cx);
                slot.counters.in_flight.set(slot.in_flight as u64);
                slot.kicked |= slot.own_io;
                any = true;
            }
        }
        any
    }

    /// Tell each peer that wants to know. False when none does.
    fn notify(&mut self) -> bool {
        let mut any = false;
        for slot in self.slots.iter_mut().flatten() {
            if std::mem::take(&mut slot.notify) {
                slot.source.notify();
                slot.counters.notifications.increment();
                self.counters.notifications.increment();
                any = true;
            }
        }
        any
    }

    /// Count and trace the answered requests, and free their slots.
    fn record(&mut self, published: u64, notified: u64) {
        self.answered = self.cx.done.len();
        self.counters.answered.add(self.answered as u64);
        // One is enough to tell a slow disk.
        let mut latency = None;
        let cx_of = self.cx.number();
        for id in self.cx.done.drain(..) {
            let request = &mut self.cx.slab[id];
            request.stamps.enter(Stage::Notify, published);
            request.stamps.end(notified);
            latency.get_or_insert_with(|| request.stamps.total());
            let (op, spent) = (request.op as u8, request.stamps.spent().as_ptr());
            probe!(
                fathom,
                finish,
                cx_of,
                id.0,
                op,
                request.error,
                spent,
                notified
            );
            if self.cx.watched {
                self.channel.answered(request);
            }
            let mut bytes = request.len;
            if request.error != 0 {
                self.recorder.failed(request.op, request.error);
                bytes = 0;
            }
            self.recorder
                .record(request.op, bytes, &request.stamps, || trace_record(request));
            if let Some(trace) = &mut self.trace {
                trace.write(&trace_record(request));
            }
            if let Some(changes) = &self.changes
                && changes_data(request.op)
            {
                // One that has failed may have been done in part.
                changes.mark(request.offset, request.len);
            }
            self.cx.slab.put(id);
        }
        self.recorder.flush();
        if let Some(latency) = latency {
            self.latency = latency;
        }
    }

    /// Give back the sources that are leaving, if they can go.
    #[inline]
    pub(crate) fn let_go(&mut self) {
        if !self.cx.leaving.is_empty() {
            self.release();
        }
    }

    /// Ask for no kicks: somebody looks whether there is work.
    pub(crate) fn disarm(&mut self) {
        self.slots.iter_mut().flatten().for_each(Slot::disarm);
    }

    /// Whether a source has something to pop; no system call.
    pub(crate) fn has_pending(&mut self) -> bool {
        let mut slots = self.slots.iter_mut().flatten();
        self.cx.admits && slots.any(|slot| slot.looks_open() && slot.source.pending())
    }

    /// Ask for kicks. True when work came in before they were sure to come.
    pub(crate) fn arm(&mut self) -> bool {
        if !self.cx.admits {
            return false;
        }
        let mut work = false;
        for slot in self.slots.iter_mut().flatten() {
            if !slot.looks_open() {
                continue;
            }
            if !slot.armed {
                slot.armed = true;
                slot.kicked = slot.source.arm();
            }
            // Its pop disarms it again. (A kick may also have been reaped
            // since the last pop.)
            work |= slot.kicked;
        }
        work
    }

    pub(crate) fn obey(&mut self, command: Command) {
        match command {
            Command::Attach {
                source,
                wanted,
                reply,
            } => {
                if self.bell.hear(&wanted) {
                    // The control thread waits for the reply; should it have
                    // died, there is nobody to tell.
                    let _ = reply.send(self.attach(source));
                }
            }
            Command::Detach { id, reply } => {
                let slot = occupied(&mut self.slots, id.slot);
                assert_eq!(slot.generation, id.generation, "detached twice");
                // What is left unpopped stays with the peer. This would be lost.
                let inherited = slot.source.inherited();
                if inherited > 0 && !slot.closed {
                    self.pop_from(id.slot.into(), inherited);
                }
                let slot = occupied(&mut self.slots, id.slot);
                slot.closed = true;
                slot.leaving = Some(reply);
                self.cx.leaving.push(id.slot);
                self.channel.drain(&mut self.cx, id.slot);
                slot.source.stop(&mut self.cx);
                self.release();
            }
            Command::SetEventfd {
                id,
                which,
                fd,
                wanted,
                reply,
            } => {
                // Even if nobody waits any more: the peer uses the new eventfd.
                self.bell.hear(&wanted);
                let slot = occupied(&mut self.slots, id.slot);
                let engine = &mut *self.cx.engine;
                let _ = reply.send(slot.set_eventfd(engine, id, which, fd));
            }
            Command::Trace(writer) => self.trace = writer,
            Command::Note(changes) => self.changes = changes,
            Command::Look { wanted, reply } => {
                // Even if nobody waits: it may be the last to be told.
                self.bell.hear(&wanted);
                self.look();
                let _ = reply.send(());
            }
            Command::Oldest { reply } => {
                // Who has asked may have given up.
                let _ = reply.send(self.oldest());
            }
            Command::Settle { reply } => self.unsettled.add(&self.cx, reply),
            Command::Stop => self.is_stopping = true,
        }
    }

    /// The request that is in flight for longest.
    fn oldest(&self) -> Option<Oldest> {
        let requests = self
            .cx
            .slab
            .in_use()
            .into_iter()
            .map(|id| &self.cx.slab[id]);
        let of_sources = requests.filter(|request| request.owner == Owner::SOURCE);
        let since = |request: &&Request| request.stamps.last() - request.stamps.total();
        let oldest = of_sources.min_by_key(since)?;
        let mut stamps = oldest.stamps;
        stamps.end(self.cx.clock.now());
        let record = TraceRecord {
            stamps: stamps.raw(),
            ..trace_record(oldest)
        };
        let stage = stamps.stage();
        Some(Oldest { record, stage })
    }

    /// A source has come or gone.
    fn look_at_peers(&mut self) {
        let sockets = self.slots.iter().flatten().all(|slot| slot.own_io);
        self.peers = if sockets {
            Awaited::Socket
        } else {
            Awaited::Peer
        };
    }

    fn attach(&mut self, mut source: Box<dyn Source>) -> io::Result<SourceId> {
        let capacity = source.capacity();
        let index = match self.slots.iter().position(Option::is_none) {
            Some(free) => free,
            None => {
                self.slots.push(None);
                self.slots.len() - 1
            }
        };
        let in_use: usize = self.slots.iter().flatten().map(|s| s.capacity).sum();
        let wanted = in_use + capacity + self.cx.children;
        let slab = &mut self.cx.slab;
        slab.grow(wanted.saturating_sub(slab.capacity()));
        self.batch.reserve(wanted);
        // At most one kick comes for each request, and one wake-up.
        self.completions.reserve(2 * wanted + 1);
        self.cx.done.reserve(wanted);
        self.cx.engine.reserve(wanted)?;
        self.generation = (self.generation + 1) % GENERATIONS;
        let id = SourceId {
            slot: index as u16,
            generation: self.generation,
        };
        if let Some(kick) = source.kick_fd() {
            let token = Token::kick(id.slot, id.generation);
            self.cx.engine.watch(kick, token)?;
        }
        source.start(&mut self.cx, id)?;
        // SAFETY: the memory of an attached source stays (`Source::memory`),
        // and `release` removes it before it gives the source back.
        unsafe { self.cx.engine.add_memory(&source.memory()) };
        let counters = self.counters.add_source(source.queue(), capacity);
        self.slots[index] = Some(Slot {
            counters,
            own_io: source.kick_fd().is_none(),
            source,
            generation: self.generation,
            in_flight: 0,
            capacity,
            armed: false,
            kicked: true,
            dirty: false,
            notify: false,
            closed: false,
            leaving: None,
        });
        self.look_at_peers();
        Ok(id)
    }

    /// Give back the sources that are leaving and have nothing in flight.
    fn release(&mut self) {
        let before = self.cx.leaving.len();
        for (index, entry) in self.slots.iter_mut().enumerate() {
            let Some(slot) = entry.take_if(|slot| slot.is_drained()) else {
                continue;
            };
            if let Some(kick) = slot.source.kick_fd() {
                let token = Token::kick(index as u16, slot.generation);
                self.cx.engine.unwatch(kick, token);
            }
            self.cx.engine.remove_memory(&slot.source.memory());
            self.counters.remove_source(&slot.counters);
            self.cx.leaving.retain(|slot| usize::from(*slot) != index);
            if let Some(reply) = slot.leaving {
                let _ = reply.send(slot.source);
            }
        }
        if self.cx.leaving.len() < before {
            self.look_at_peers();
        }
    }
}

fn submit_queued(engine: &mut dyn Engine, wait: Wait, completions: &mut Vec<Completion>) {
    if let Err(error) = engine.submit(wait, completions) {
        tracing::error!("submitting I/O failed: {}", cause(error));
    }
}

fn occupied(slots: &mut [Option<Slot>], index: u16) -> &mut Slot {
    slots[usize::from(index)]
        .as_mut()
        .expect("a source stays attached while it has requests in flight")
}

fn changes_data(op: Op) -> bool {
    match op {
        Op::Write | Op::Discard | Op::WriteZeroes => true,
        Op::Read | Op::Flush | Op::BlockStatus => false,
    }
}

fn trace_record(request: &Request) -> TraceRecord {
    TraceRecord {
        stamps: request.stamps.raw(),
        offset: request.offset,
        len: request.len,
        queue: request.queue,
        op: request.op,
        error: request.error,
        polled: request.polled,
        wire: request.wire,
    }
}
