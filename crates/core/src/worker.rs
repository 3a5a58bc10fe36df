//! The worker: moves a disk's requests on one thread.
//!
//! A turn pops the sources' requests, submits them, reaps completions, and sends the replies. All
//! requests that make a transition together share one reading of the clock. The thread decides when
//! a worker has its turn and when to sleep: a thread with one worker (`dedicated.rs`) or with many
//! (`pooled.rs`).

use crate::changes::Changes;
use crate::counters::Counters;
use crate::cx::Cx;
use crate::disk::Channel;
use crate::engine::{Completion, Engine, Wait};
use crate::mailbox::{Command, WorkerWaker};
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

/// Number of requests in the first piece of a large batch. Each further piece extends to eight
/// times as many requests. The device thus works on the first requests while the worker submits the
/// rest. A device takes several times as long for a request as the kernel takes to submit it, so
/// the device does not run idle.
const HEAD_START: usize = 1;

/// Smallest batch that is split into pieces; for fewer requests the extra system calls do not pay.
const LARGE_BATCH: usize = 24;

/// The state of a worker, which stays on its thread.
pub(crate) struct Worker {
    pub(crate) cx: Cx,
    channel: Box<dyn Channel>,
    slots: Vec<Option<Slot>>,
    generation: u32,
    waker: Arc<WorkerWaker>,
    /// Number of requests that were last answered together.
    pub(crate) answered: usize,
    /// Latency of one of them, in ticks.
    pub(crate) latency: u64,
    /// Event to wait for after a reply, given the kind of the attached sources.
    pub(crate) peers: Awaited,
    recorder: Recorder,
    trace: Option<RingWriter>,
    changes: Option<Arc<Changes>>,
    pub(crate) counters: Arc<Counters>,
    batch: Vec<RequestId>,
    /// Completions to be dispatched.
    pub(crate) completions: Vec<Completion>,
    /// Slot from which the next `pop_some` starts.
    first: usize,
    unsettled: Unsettleds,
    pub(crate) is_stopping: bool,
}

impl Worker {
    pub(crate) fn new(
        cx: Cx,
        channel: Box<dyn Channel>,
        waker: Arc<WorkerWaker>,
        recorder: Recorder,
        counters: Arc<Counters>,
    ) -> Worker {
        Worker {
            cx,
            channel,
            slots: Vec::new(),
            generation: 0,
            waker,
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

    /// Pops the requests of all sources.
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

    /// Pops at most `most` requests of all sources. The sources take turns at being first.
    pub(crate) fn pop_some(&mut self, most: usize) {
        // (A source that was detached may have left more than that.)
        if !self.cx.admits || self.batch.len() >= most {
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

    /// Pops at most `most` requests of one source.
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
                slot.dirty = true; // the source may have answered requests before
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

    /// Submits the popped requests. Returns false if no request was popped.
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

    /// Calls the channel's timer if it is due. Returns whether it is.
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

    /// Submits queued I/O to the kernel and collects completions.
    #[inline]
    pub(crate) fn enter(&mut self, wait: Wait) {
        submit_queued(&mut *self.cx.engine, wait, &mut self.completions);
    }

    /// Dispatches completions. Returns true if a source's own I/O has completed.
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

    /// Sends the replies of completed requests: status and used ring, then at most one notification
    /// per source, then statistics. Returns false if there was nothing to send.
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

    /// Publishes the replies of each source that has any. Returns false if none has.
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

    /// Notifies each peer that wants it. Returns false if none does.
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

    /// Counts and traces the answered requests, and releases their slots.
    fn record(&mut self, published: u64, notified: u64) {
        self.answered = self.cx.done.len();
        self.counters.answered.add(self.answered as u64);
        // The latency of a single request is enough to recognise a slow disk.
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
                // A failed request may have been carried out in part.
                changes.mark(request.offset, request.len);
            }
            self.cx.slab.put(id);
        }
        self.recorder.flush();
        if let Some(latency) = latency {
            self.latency = latency;
        }
    }

    /// Gives back the sources that are leaving and have nothing in flight.
    #[inline]
    pub(crate) fn let_go(&mut self) {
        if !self.cx.leaving.is_empty() {
            self.release();
        }
    }

    /// Asks all peers not to kick, because the thread polls.
    pub(crate) fn disarm(&mut self) {
        self.slots.iter_mut().flatten().for_each(Slot::disarm);
    }

    /// Returns whether a source has something to pop; no system call.
    pub(crate) fn has_pending(&mut self) -> bool {
        let mut slots = self.slots.iter_mut().flatten();
        self.cx.admits && slots.any(|slot| slot.looks_open() && slot.source.pending())
    }

    /// Asks for kicks. Returns true if work arrived before kicks were enabled.
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
            // The next pop disarms the source. A kick may also have been reaped since the last pop.
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
                if self.waker.took_command(&wanted) {
                    // The control thread waits for the reply, unless it has ended.
                    let _ = reply.send(self.attach(source));
                }
            }
            Command::Detach { id, reply } => {
                let slot = occupied(&mut self.slots, id.slot);
                assert_eq!(slot.generation, id.generation, "detached twice");
                // The driver would never see a reply to an inherited request that is not popped
                // here. Requests that are not inherited stay with the peer.
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
                // Applies even if the sender has given up: the peer uses the new eventfd.
                self.waker.took_command(&wanted);
                let slot = occupied(&mut self.slots, id.slot);
                let engine = &mut *self.cx.engine;
                let _ = reply.send(slot.set_eventfd(engine, id, which, fd));
            }
            Command::Trace(writer) => self.trace = writer,
            Command::Note(changes) => self.changes = changes,
            Command::Look { wanted, reply } => {
                // Applies even if the sender has given up: no other command may follow.
                self.waker.took_command(&wanted);
                self.look();
                let _ = reply.send(());
            }
            Command::Oldest { reply } => {
                // The sender may have given up.
                let _ = reply.send(self.oldest());
            }
            Command::Settle { reply } => self.unsettled.add(&self.cx, reply),
            Command::Stop => self.is_stopping = true,
        }
    }

    /// Returns the request that has been in flight for longest.
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

    /// Updates `peers` after a source was attached or detached.
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
        // At most one kick arrives per request, and one wake-up of the mailbox.
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
        // SAFETY: the memory of an attached source stays mapped (`Source::memory`), and `release`
        // removes it before it gives the source back.
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

    /// Gives back the sources that are leaving and have nothing in flight.
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
