//! Simulates guests, queues and a server, event by event, and records the truth about each request.
//!
//! The simulation is independent of the join. Simulated requests move through rings, doorbells,
//! eventfds, interrupts and handlers as a guest's driver, KVM and a server would.

mod guest_side;
mod server_side;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use fathom_report::analysis::{Delivery, HostClass, Point};
use fathom_run::{Event, Kind};

use super::random::Random;

pub const GUEST_DEV: u64 = 254 << 20;
pub const HOST_DEV: u64 = 259 << 20;
pub const SERVER_PID: u32 = 500;
pub const QEMU_PID: u32 = 600;
/// Extents of the image on the host's device, as (offset in the image, offset on the device,
/// length); the second lies before the first.
pub const EXTENTS: [(u64, u64, u64); 2] = [(0, 1 << 40, 1 << 20), (1 << 20, 1 << 30, 1 << 50)];

pub fn vq(queue: u16) -> u64 {
    0xffff_8880_0000_1000 + u64::from(queue) * 0x800
}
pub fn doorbell(queue: u16) -> u64 {
    0xfe00_3000 + u64::from(queue) * 4
}
pub fn msi(queue: u16) -> (u64, u64) {
    (0xfee0_0000, 0x4020 + u64::from(queue))
}
pub fn irq(queue: u16) -> u64 {
    24 + u64::from(queue)
}
pub fn kick_eventfd(queue: u16) -> u64 {
    70 + u64::from(queue)
}
pub fn worker(queue: u16) -> u32 {
    SERVER_PID + 1 + u32::from(queue)
}
pub fn vcpu_tid(vcpu: u16) -> u32 {
    QEMU_PID + 1 + u32::from(vcpu)
}

/// The parameters of a simulation.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub requests: u64,
    pub depth: u64,
    pub vcpus: u16,
    pub queues: u16,
    /// Time in ns for which the server polls before it sleeps.
    pub polling: i64,
    /// Kicks are kvm_fast_mmio events, which follow the signal.
    pub fast_mmio: bool,
    /// eventfd_signal has a probe.
    pub eventfds: bool,
    /// The guest's probes record virtqueues and interrupts.
    pub vqs: bool,
    /// Random places instead of sequential ones.
    pub random: bool,
    /// Number of places of 4 KiB on the disk; few places make requests with equal keys.
    pub places: u64,
    /// Number of flushes, discards, writes, host splits, host merges (of neighbours) and page cache
    /// hits per 100 requests.
    pub flushes: u64,
    pub discards: u64,
    pub writes: u64,
    pub splits: u64,
    pub merges: u64,
    pub cached: u64,
    /// Number of operations per 100 that the guest splits into two requests.
    pub large: u64,
}

impl Plan {
    pub fn new(seed: u64, depth: u64, requests: u64) -> Plan {
        Plan {
            seed,
            requests,
            depth,
            vcpus: 1,
            queues: 1,
            polling: 0,
            fast_mmio: false,
            eventfds: true,
            vqs: true,
            random: true,
            places: 1 << 26,
            flushes: 0,
            discards: 0,
            writes: 30,
            splits: 5,
            merges: 0,
            cached: 5,
            large: 0,
        }
    }
}

/// The truth about one operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Truth {
    pub flags: u64,
    pub offset: u64,
    pub length: u64,
    pub points: Vec<(Point, i64)>,
    pub delivery: Delivery,
    pub batch: u32,
    pub host: HostClass,
}

/// Streams, by their writer; times are in ns of the host's CLOCK_MONOTONIC.
#[derive(Clone, Debug, Default)]
pub struct Streams {
    pub bench: Vec<Event>,
    pub guest: Vec<Event>,
    pub kvm: Vec<Event>,
    pub block: Vec<Event>,
    pub fathom: Vec<Event>,
    /// The system calls of a server without its own stamps.
    pub calls: Vec<Event>,
}

/// A request in the ring.
#[derive(Clone, Debug)]
struct Rq {
    op: usize,
    flags: u64,
    offset: u64,
    length: u64,
    queue: u16,
    at: [Option<i64>; Point::ALL.len()],
    kick: Option<usize>,
    popped: bool,
    polled: bool,
    delivery: Delivery,
    host: HostClass,
    wake: i64,
    /// The interrupt that was sent for the request's batch, as an index of the sent ones.
    sent: Option<usize>,
}

#[derive(Clone, Debug)]
struct Op {
    flags: u64,
    offset: u64,
    length: u64,
    slot: u64,
    call: i64,
    bio: i64,
    end: i64,
    rqs: Vec<usize>,
    left: usize,
}

#[derive(Clone, Debug, Default)]
struct KickInfo {
    at: i64,
    exit: i64,
    signal: i64,
    /// The time of the signal as an analysis can see it.
    seen: i64,
    brought: u32,
}

#[derive(Clone, Debug)]
struct Sent {
    at: i64,
    entry: Option<i64>,
    /// When the host ran the vCPU's thread again, before that entry, if it slept.
    woken: Option<i64>,
}

#[derive(Debug, Default)]
struct Vcpu {
    inside: bool,
    busy: i64,
    /// The last entry, which may be in the future.
    entry: i64,
    /// When the vCPU last resumed after a sleep, before that entry.
    woken: i64,
    /// The last exit for a doorbell, and the time of the return.
    kick: (i64, i64),
    handling: bool,
    idle: Vec<u64>,
}

#[derive(Debug, Default)]
struct Queue {
    avail: Vec<usize>,
    waiting: Vec<usize>,
    armed: bool,
    asleep: bool,
    signalled: bool,
    waking: bool,
    looked: i64,
    poll_until: i64,
    done: Vec<usize>,
    finishing: bool,
    /// The server's thread is busy with interrupts until this time.
    free: i64,
    used: Vec<usize>,
    callbacks: bool,
    outstanding: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Ev {
    Submit(u16),
    KickCheck(u16, u16, u32),
    Signal(u16),
    Wake(u16),
    Pop(u16, i64, bool),
    Look(u16),
    Done(u16, usize),
    Finish(u16),
    Irq(u16, usize),
    Handler(u16, u16),
    Loop(u16, u16, i64),
    Halt(u16),
}

/// The simulated world.
pub struct World {
    plan: Plan,
    random: Random,
    agenda: BinaryHeap<Reverse<(i64, u64, Ev)>>,
    serial: u64,
    ops: Vec<Op>,
    rqs: Vec<Rq>,
    kicks: Vec<KickInfo>,
    sent: Vec<Sent>,
    vcpus: Vec<Vcpu>,
    queues: Vec<Queue>,
    position: u64,
    out: Streams,
}

impl World {
    pub fn new(plan: Plan) -> World {
        let mut world = World {
            random: Random::new(plan.seed),
            agenda: BinaryHeap::new(),
            serial: 0,
            ops: Vec::new(),
            rqs: Vec::new(),
            kicks: Vec::new(),
            sent: Vec::new(),
            vcpus: (0..plan.vcpus).map(|_| Vcpu::default()).collect(),
            queues: (0..plan.queues)
                .map(|_| Queue {
                    armed: true,
                    asleep: true,
                    callbacks: true,
                    ..Queue::default()
                })
                .collect(),
            position: 0,
            out: Streams::default(),
            plan,
        };
        for vcpu in 0..world.plan.vcpus {
            let depth = world.plan.depth;
            world.vcpus[usize::from(vcpu)].idle = (0..depth)
                .filter(|slot| slot % u64::from(world.plan.vcpus) == u64::from(vcpu))
                .collect();
            let at = 1_000_000_000 + i64::from(vcpu) * 777;
            world.at(at, Ev::Submit(vcpu));
        }
        world
    }

    /// Runs to the end. Returns the streams, and the truth by operation.
    pub fn run(mut self) -> (Streams, Vec<Truth>) {
        while let Some(Reverse((now, _, ev))) = self.agenda.pop() {
            self.happen(now, ev);
        }
        for rq in 0..self.rqs.len() {
            self.write_record(rq);
            self.write_calls(rq);
        }
        let truths = (0..self.ops.len()).map(|op| self.truth(op)).collect();
        let out = &mut self.out;
        for events in [
            &mut out.bench,
            &mut out.guest,
            &mut out.kvm,
            &mut out.block,
            &mut out.fathom,
            &mut out.calls,
        ] {
            events.sort_by_key(|event| event.time);
        }
        (self.out, truths)
    }

    fn at(&mut self, at: i64, ev: Ev) {
        self.serial += 1;
        self.agenda.push(Reverse((at, self.serial, ev)));
    }

    fn some(&mut self, low: i64, high: i64) -> i64 {
        low + self.random.below((high - low) as u64) as i64
    }

    fn chance(&mut self, of_100: u64) -> bool {
        self.random.below(100) < of_100
    }

    fn guest(&mut self, at: i64, kind: Kind, vcpu: u16, tid: u32, args: &[u64]) {
        assert!(
            self.vcpus[usize::from(vcpu)].inside,
            "a guest event outside the guest"
        );
        let event = Event::new(at as u64, kind, vcpu, tid, args);
        self.out.guest.push(event);
    }

    fn kvm(&mut self, at: i64, kind: Kind, tid: u32, args: &[u64]) {
        self.out.kvm.push(Event::new(at as u64, kind, 0, tid, args));
    }

    fn block(&mut self, at: i64, kind: Kind, tid: u32, args: &[u64]) {
        let event = Event::new(at as u64, kind, 0, tid, args);
        self.out.block.push(event);
    }

    fn happen(&mut self, now: i64, ev: Ev) {
        match ev {
            Ev::Submit(vcpu) => self.submit(now, vcpu),
            Ev::KickCheck(vcpu, queue, tid) => self.kick_check(now, vcpu, queue, tid),
            Ev::Signal(queue) => self.signal(now, queue),
            Ev::Wake(queue) => self.wake(now, queue),
            Ev::Pop(queue, wake, polled) => self.pop(now, queue, wake, polled),
            Ev::Look(queue) => self.look(now, queue),
            Ev::Done(queue, rq) => self.done(now, queue, rq),
            Ev::Finish(queue) => self.finish(now, queue),
            Ev::Irq(queue, sent) => self.irq(now, queue, sent),
            Ev::Handler(queue, vcpu) => self.handler(now, queue, vcpu),
            Ev::Loop(queue, vcpu, start) => self.reap(now, queue, vcpu, start),
            Ev::Halt(vcpu) => self.halt(now, vcpu),
        }
    }

    fn truth(&self, op: usize) -> Truth {
        let op = &self.ops[op];
        let last = op
            .rqs
            .iter()
            .max_by_key(|&&rq| self.rqs[rq].at[Point::Complete as usize])
            .unwrap();
        let rq = &self.rqs[*last];
        let mut at = rq.at;
        at[Point::Call as usize] = Some(op.call);
        at[Point::Bio as usize] = Some(op.bio);
        at[Point::Return as usize] = Some(op.end);
        let kick = rq.kick.map(|kick| &self.kicks[kick]);
        if let Some(kick) = kick {
            at[Point::Kick as usize] = Some(kick.at);
            at[Point::Exit as usize] = Some(kick.exit);
            at[Point::Signal as usize] = Some(kick.seen);
            at[Point::Wake as usize] = Some(rq.wake);
        }
        Truth {
            flags: op.flags,
            offset: op.offset,
            length: op.length,
            points: Point::ALL
                .iter()
                .filter_map(|&point| Some((point, at[point as usize]?)))
                .collect(),
            delivery: rq.delivery,
            batch: kick.map_or(0, |kick| kick.brought),
            host: rq.host,
        }
    }
}

/// Returns the ranges of the device that hold the image's bytes.
fn physical(offset: u64, length: u64) -> Vec<(u64, u64)> {
    EXTENTS
        .iter()
        .filter_map(|&(start, place, size)| {
            let from = offset.max(start);
            let to = (offset + length).min(start + size);
            (from < to).then(|| (place + from - start, to - from))
        })
        .collect()
}
