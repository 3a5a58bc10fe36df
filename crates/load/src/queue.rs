//! A virtqueue as a [`Port`]: a ring, slots and eventfds.

use std::sync::Arc;

use crate::dirty_log::LogCheck;
use crate::error::{Error, Result};
use crate::host::buffers::scribble;
use crate::memory::{Buffer, GuestMemory, Layout};
use crate::options::Wait;
use crate::port::{Counters, Done, Op, Port};
use crate::ring::{DriverRing, NOT_IN_RING, RingLayout};
use crate::session::{self, Events};
use crate::slots::{STATUS_UNWRITTEN, Shape, SlotLayout, Slots};
use crate::workload::Rng;

/// Number of polls of the used ring before the worker checks the phase.
const SPINS: u32 = 4096;
/// Marks a descriptor that is not the head of any slot.
const NO_SLOT: u16 = u16::MAX;

/// Offsets of a queue's parts in guest memory.
#[derive(Clone, Copy, Debug)]
pub struct QueueLayout {
    pub ring: RingLayout,
    pub slots: SlotLayout,
}

impl QueueLayout {
    pub fn new(layout: &mut Layout, size: u16, shape: Shape) -> QueueLayout {
        QueueLayout {
            ring: RingLayout::new(layout, size, shape.packed),
            slots: SlotLayout::new(layout, shape),
        }
    }
}

/// Behaviour of a queue.
#[derive(Debug)]
pub struct Manner {
    pub index: usize,
    pub event_idx: bool,
    pub wait: Wait,
    /// Check the status byte and the length reported by the device.
    pub strict: bool,
    pub log: Option<LogCheck>,
}

/// The driver's side of one virtqueue.
pub struct Queue<R> {
    /// Keeps the memory mapped that `ring` and `slots` point into.
    memory: Arc<GuestMemory>,
    ring: R,
    slots: Slots,
    layout: QueueLayout,
    /// Slot of each head descriptor.
    slot_of: Box<[u16]>,
    in_flight: u16,
    manner: Manner,
    events: Arc<Events>,
    counters: Counters,
}

impl<R: DriverRing> Queue<R> {
    /// Creates a queue in zeroed memory, with prepared slots.
    pub fn new(
        memory: Arc<GuestMemory>,
        layout: QueueLayout,
        shape: Shape,
        events: Arc<Events>,
        manner: Manner,
    ) -> Result<Queue<R>> {
        let mut ring = R::new(&memory, &layout.ring, manner.event_idx)?;
        let slots = Slots::new(&memory, layout.slots, &ring);
        let mut slot_of = vec![NO_SLOT; usize::from(layout.ring.size)];
        for slot in 0..shape.slots {
            slot_of[usize::from(slots.head(slot))] = slot;
        }
        match manner.wait {
            Wait::Poll => ring.suppress(),
            Wait::Interrupt => ring.disarm(),
        }
        Ok(Queue {
            memory,
            ring,
            slots,
            layout,
            slot_of: slot_of.into_boxed_slice(),
            in_flight: 0,
            manner,
            events,
            counters: Counters::default(),
        })
    }

    /// Fills the data buffers with random data.
    pub fn scribble(&self, seed: u64) {
        let mut rng = Rng::new(seed);
        for slot in 0..self.layout.slots.count() {
            scribble(self.slots.buffer(slot), &mut rng);
        }
    }

    #[cold]
    fn broken(&self, what: String) -> Error {
        Error::Device {
            queue: self.manner.index,
            what,
        }
    }

    /// Returns the slot whose head is in a used entry.
    #[inline(always)]
    fn slot_at(&self, head: u32) -> Option<u16> {
        let slot = *self.slot_of.get(head as usize)?;
        (slot != NO_SLOT).then_some(slot)
    }

    fn check_strictly(&self, slot: u16, len: u32) -> Result<()> {
        let status = self.slots.status(slot);
        if status == STATUS_UNWRITTEN {
            return Err(self.broken(format!("request {slot} was completed without a status")));
        }
        let most = self.slots.writable(slot);
        if len > most {
            return Err(self.broken(format!(
                "request {slot}: the used entry says {len} bytes written, {most} were writable"
            )));
        }
        Ok(())
    }

    fn expect_logged(&mut self, slot: u16) {
        let Some(log) = &mut self.manner.log else {
            return;
        };
        if self.slots.op(slot) == Op::Read {
            let len = self.slots.buffer(slot).words() * 8;
            log.expect(self.layout.slots.data(slot), len, "data");
        }
        log.expect(self.layout.slots.status(slot), 1, "status byte");
        let (offset, len) = self.ring.last_written(&self.layout.ring);
        log.expect(offset, len, "used ring");
    }
}

impl<R: DriverRing> Port for Queue<R> {
    fn buffer(&self, slot: u16) -> Buffer {
        self.slots.buffer(slot)
    }

    #[inline(always)]
    fn queue(&mut self, slot: u16, op: Op, offset: u64) {
        self.slots.prepare(slot, op, offset);
        if self.manner.strict {
            self.slots.clear_status(slot);
        }
        self.ring.push(self.slots.head(slot));
        self.in_flight += 1;
    }

    #[inline(always)]
    fn submit(&mut self) -> Result<()> {
        if self.ring.publish() {
            self.counters.kicks += 1;
            session::kick(&self.events.kick)?;
        }
        Ok(())
    }

    #[inline(always)]
    fn reap(&mut self, done: &mut Vec<Done>) -> Result<()> {
        let count = self.ring.refresh();
        if count > self.in_flight {
            return Err(self.broken(format!(
                "the used index passed {count} requests, {} are in flight",
                self.in_flight
            )));
        }
        let mut popped = 0;
        while let Some(used) = self.ring.pop() {
            popped += 1;
            if used.head == NOT_IN_RING {
                return Err(self.broken("the device used a buffer that it does not have".into()));
            }
            let Some(slot) = self.slot_at(used.head) else {
                return Err(self.broken(format!(
                    "the used ring names descriptor {}, which heads no request",
                    used.head
                )));
            };
            if self.manner.strict {
                self.check_strictly(slot, used.len)?;
            }
            if self.manner.log.is_some() {
                self.expect_logged(slot);
            }
            done.push(Done {
                slot,
                status: i32::from(self.slots.status(slot)),
            });
        }
        self.in_flight -= popped;
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        match self.manner.wait {
            Wait::Poll => {
                for _ in 0..SPINS {
                    if self.ring.is_ready() {
                        break;
                    }
                }
            }
            Wait::Interrupt => {
                if self.ring.arm() {
                    self.counters.calls += session::sleep_on(&self.events.call)?;
                }
                self.ring.disarm();
            }
        }
        Ok(())
    }

    fn counters(&mut self) -> Counters {
        if self.manner.wait == Wait::Poll {
            self.counters.calls += session::take(&self.events.call).unwrap_or(0);
        }
        self.counters
    }

    fn describe_status(&self, status: i32) -> String {
        match status {
            1 => "the device says IOERR".into(),
            2 => "the device says UNSUPP".into(),
            other => format!("the device says {other}, which is no status of virtio-blk"),
        }
    }

    fn rest_every(&self) -> Option<u32> {
        // Between two checks, use each slot only once. Otherwise the mark of a later request could
        // hide a missing mark.
        let slots = u32::from(self.layout.slots.count());
        self.manner.log.is_some().then_some(slots)
    }

    fn at_rest(&mut self) -> Result<()> {
        match &mut self.manner.log {
            Some(log) => log.check(),
            None => Ok(()),
        }
    }

    fn log_pages(&self) -> u64 {
        self.manner.log.as_ref().map_or(0, LogCheck::checked)
    }
}

impl<R: DriverRing> std::fmt::Debug for Queue<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue")
            .field("ring", &self.ring)
            .field("memory", &self.memory.map().len())
            .finish_non_exhaustive()
    }
}
