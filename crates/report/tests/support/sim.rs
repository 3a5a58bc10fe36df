//! A simulation of guests, queues and a server, event by event, and the truth about each request.
//!
//! It knows nothing of the join: it moves requests through rings, doorbells, eventfds, interrupts
//! and handlers as a guest's driver, KVM and a server would, and notes what happened to each.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use fathom_report::analysis::{Delivery, HostClass, Point};
use fathom_run::{Event, Kind, flags};

use super::random::Random;

pub const GUEST_DEV: u64 = 254 << 20;
pub const HOST_DEV: u64 = 259 << 20;
pub const SERVER_PID: u32 = 500;
pub const QEMU_PID: u32 = 600;
/// Where the image lies on the host's device: two extents, the second before the first.
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

/// What is simulated.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub requests: u64,
    pub depth: u64,
    pub vcpus: u16,
    pub queues: u16,
    /// How long the server looks by itself before it sleeps, in ns.
    pub polling: i64,
    /// Kicks as kvm_fast_mmio, told after the signal.
    pub fast_mmio: bool,
    /// There is a probe on eventfd_signal.
    pub eventfds: bool,
    /// The guest's probes tell virtqueues and interrupts.
    pub vqs: bool,
    /// Random places instead of sequential ones.
    pub random: bool,
    /// How many places of 4 KiB the disk has; few make requests that cannot be told apart.
    pub places: u64,
    /// Of 100 requests: flushes, discards, writes, host splits, host merges (of neighbours), page
    /// cache hits.
    pub flushes: u64,
    pub discards: u64,
    pub writes: u64,
    pub splits: u64,
    pub merges: u64,
    pub cached: u64,
    /// Of 100 operations: split by the guest into two requests.
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

/// Streams, by what writes them; times in ns of the host's CLOCK_MONOTONIC.
#[derive(Clone, Debug, Default)]
pub struct Streams {
    pub bench: Vec<Event>,
    pub guest: Vec<Event>,
    pub kvm: Vec<Event>,
    pub block: Vec<Event>,
    pub fathom: Vec<Event>,
}

/// One request in the ring.
#[derive(Clone, Debug)]
struct Rq {
    op: usize,
    flags: u64,
    offset: u64,
    length: u64,
    queue: u16,
    at: [Option<i64>; 19],
    kick: Option<usize>,
    popped: bool,
    polled: bool,
    delivery: Delivery,
    host: HostClass,
    wake: i64,
    /// The interrupt that was sent for its batch, and the vCPU's entry if it was outside.
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
    /// As an analysis can see the signal.
    seen: i64,
    brought: u32,
}

#[derive(Clone, Debug)]
struct Sent {
    at: i64,
    entry: Option<i64>,
}

#[derive(Debug, Default)]
struct Vcpu {
    inside: bool,
    busy: i64,
    /// Its last entry; it may lie ahead.
    entry: i64,
    /// Its last exit for a doorbell, and when it comes back.
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
    /// The server's thread is busy with interrupts until then.
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

    /// Runs to the end: the streams, and the truth by operation.
    pub fn run(mut self) -> (Streams, Vec<Truth>) {
        while let Some(Reverse((now, _, ev))) = self.agenda.pop() {
            self.happen(now, ev);
        }
        for rq in 0..self.rqs.len() {
            self.write_record(rq);
        }
        let truths = (0..self.ops.len()).map(|op| self.truth(op)).collect();
        let out = &mut self.out;
        for events in [
            &mut out.bench,
            &mut out.guest,
            &mut out.kvm,
            &mut out.block,
            &mut out.fathom,
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

    fn enter(&mut self, at: i64, vcpu: u16) {
        let cpu = &mut self.vcpus[usize::from(vcpu)];
        if !cpu.inside {
            cpu.inside = true;
            cpu.entry = at;
            let tid = vcpu_tid(vcpu);
            self.kvm(at, Kind::KvmEntry, tid, &[u64::from(vcpu), 0x1000]);
        }
    }

    fn leave(&mut self, at: i64, vcpu: u16, reason: u64) {
        self.vcpus[usize::from(vcpu)].inside = false;
        let tid = vcpu_tid(vcpu);
        let args = [reason, 2, 0x1000, u64::from(vcpu)];
        self.kvm(at, Kind::KvmExit, tid, &args);
    }

    fn halt(&mut self, now: i64, vcpu: u16) {
        let cpu = &self.vcpus[usize::from(vcpu)];
        if cpu.inside && cpu.busy < now {
            self.leave(now, vcpu, 0x78);
        }
    }

    /// The vCPU works until then, and halts a little later if nothing comes.
    fn work_until(&mut self, vcpu: u16, until: i64) {
        let cpu = &mut self.vcpus[usize::from(vcpu)];
        cpu.busy = cpu.busy.max(until);
        let idle = self.some(500, 8_000);
        self.at(until + idle, Ev::Halt(vcpu));
    }

    fn next_op(&mut self, slot: u64, call: i64, bio: i64) -> usize {
        let kind = self.random.below(100);
        let plan = &self.plan;
        let (flags, mut length) = if kind < plan.flushes {
            (flags::WRITE | flags::FLUSH, 0)
        } else if kind < plan.flushes + plan.discards {
            (flags::DISCARD | flags::WRITE, 8192)
        } else if kind < plan.flushes + plan.discards + plan.writes {
            (flags::WRITE, 4096)
        } else {
            (0, 4096)
        };
        let large = plan.large;
        if length == 4096 && self.chance(large) {
            length = 16_384;
        }
        let offset = match (length, self.plan.random) {
            (0, _) => 0,
            (_, true) => self.random.below(self.plan.places) * 4096,
            (_, false) => self.position,
        };
        self.position += length;
        self.ops.push(Op {
            flags,
            offset,
            length,
            slot,
            call,
            bio,
            end: 0,
            rqs: Vec::new(),
            left: 0,
        });
        self.ops.len() - 1
    }

    fn submit(&mut self, now: i64, vcpu: u16) {
        let cpu = &self.vcpus[usize::from(vcpu)];
        if cpu.busy > now {
            let later = cpu.busy.min(now + 2_000) + 1;
            self.at(later, Ev::Submit(vcpu));
            return;
        }
        let left = self.plan.requests.saturating_sub(self.ops.len() as u64);
        let idle = (cpu.idle.len() as u64).min(left);
        if idle == 0 {
            return;
        }
        self.enter(now, vcpu);
        let count = 1 + self.random.below(idle);
        let queue = vcpu % self.plan.queues;
        let tid = 1000 + u32::from(vcpu);
        let mut t = now + self.some(100, 400);
        let mut ops = Vec::new();
        for _ in 0..count {
            let slot = self.vcpus[usize::from(vcpu)].idle.remove(0);
            let (call, bio) = (t, t + self.some(200, 2_000));
            let op = self.next_op(slot, call, bio);
            let Op {
                flags,
                offset,
                length,
                ..
            } = self.ops[op];
            let sector = if length == 0 { u64::MAX } else { offset / 512 };
            let args = [GUEST_DEV, sector, length / 512, flags];
            self.guest(bio, Kind::BlockBioQueue, vcpu, tid, &args);
            ops.push(op);
            t = bio + self.some(50, 500);
        }
        for op in ops {
            t = self.issue(t, op, vcpu, queue, tid);
        }
        t += self.some(50, 200);
        self.vcpus[usize::from(vcpu)].busy = t;
        self.at(t, Ev::KickCheck(vcpu, queue, tid));
    }

    fn issue(&mut self, mut t: i64, op: usize, vcpu: u16, queue: u16, tid: u32) -> i64 {
        let Op {
            flags,
            offset,
            length,
            ..
        } = self.ops[op];
        let parts = if length > 8192 { 2 } else { 1 };
        for part in 0..parts {
            let (offset, length) = (offset + part * length / parts, length / parts);
            let args = [0xffff_0000 + u64::from(queue) * 64, 1];
            self.guest(t, Kind::VirtioQueueRq, vcpu, tid, &args);
            t += self.some(50, 300);
            let args = [GUEST_DEV, offset / 512, length / 512, flags];
            self.guest(t, Kind::BlockRqIssue, vcpu, tid, &args);
            let mut at = [None; 19];
            at[Point::Issue as usize] = Some(t);
            self.rqs.push(Rq {
                op,
                flags,
                offset,
                length,
                queue,
                at,
                kick: None,
                popped: false,
                polled: false,
                delivery: Delivery::Polled,
                host: HostClass::Unknown,
                wake: 0,
                sent: None,
            });
            let rq = self.rqs.len() - 1;
            self.ops[op].rqs.push(rq);
            self.ops[op].left += 1;
            let queue = &mut self.queues[usize::from(queue)];
            queue.avail.push(rq);
            queue.waiting.push(rq);
            t += self.some(50, 300);
        }
        t
    }

    fn kick_check(&mut self, now: i64, vcpu: u16, queue: u16, tid: u32) {
        let rqs = &self.rqs;
        let ring = &mut self.queues[usize::from(queue)];
        ring.waiting
            .retain(|&rq| rqs[rq].at[Point::Complete as usize].is_none());
        if !ring.armed || ring.waiting.is_empty() {
            self.after_submit(now, vcpu);
            return;
        }
        let id = self.kicks.len();
        let at = now + 30 + (self.serial % 70) as i64;
        let (members, later): (Vec<usize>, Vec<usize>) = std::mem::take(&mut ring.waiting)
            .into_iter()
            .partition(|&rq| rqs[rq].at[Point::Issue as usize] <= Some(at));
        ring.waiting = later;
        let issued = |&&rq: &&usize| rqs[rq].at[Point::Issue as usize];
        let newest = members.iter().max_by_key(issued).copied();
        for &rq in &members {
            if !self.rqs[rq].popped {
                self.rqs[rq].kick = Some(id);
                self.rqs[rq].delivery = match Some(rq) == newest {
                    true => Delivery::Kicked,
                    false => Delivery::Batched,
                };
            }
        }
        let known = if self.plan.vqs { vq(queue) } else { 0 };
        self.guest(now, Kind::VirtqueueNotify, vcpu, tid, &[known]);
        self.guest(at, Kind::VpNotify, vcpu, tid, &[known]);
        let exit = at + self.some(300, 3_000);
        self.leave(exit, vcpu, 0x400);
        let host = vcpu_tid(vcpu);
        let rung = exit + self.some(100, 1_000);
        let (signal, seen);
        if self.plan.fast_mmio {
            signal = rung;
            let told = signal + self.some(20, 900);
            seen = if self.plan.eventfds { signal } else { told };
            self.kvm(told, Kind::KvmFastMmio, host, &[doorbell(queue)]);
        } else {
            self.kvm(rung, Kind::KvmMmio, host, &[2, 2, doorbell(queue), 0]);
            signal = rung + self.some(50, 300);
            seen = if self.plan.eventfds { signal } else { rung };
        }
        if self.plan.eventfds {
            self.kvm(signal, Kind::EventfdSignal, host, &[kick_eventfd(queue)]);
        }
        self.kicks.push(KickInfo {
            at,
            exit,
            signal,
            seen,
            brought: 0,
        });
        let back = signal + self.some(1_000, 2_000);
        self.at(signal, Ev::Signal(queue));
        self.vcpus[usize::from(vcpu)].busy = back;
        self.vcpus[usize::from(vcpu)].kick = (exit, back);
        // Entered at once, in the simulation's order; its time is when it comes back.
        self.vcpus[usize::from(vcpu)].inside = true;
        self.kvm(back, Kind::KvmEntry, host, &[u64::from(vcpu), 0]);
        self.after_submit(back + 10, vcpu);
    }

    fn after_submit(&mut self, now: i64, vcpu: u16) {
        self.work_until(vcpu, now);
        let again = !self.vcpus[usize::from(vcpu)].idle.is_empty();
        if again {
            let think = self.some(200, 40_000);
            self.at(now + think, Ev::Submit(vcpu));
        }
    }

    fn signal(&mut self, now: i64, queue: u16) {
        let ring = &mut self.queues[usize::from(queue)];
        ring.signalled = true;
        if ring.asleep && !ring.waking {
            ring.waking = true;
            let latency = self.some(1_000, 12_000);
            self.at(now + latency, Ev::Wake(queue));
        }
    }

    fn wake(&mut self, now: i64, queue: u16) {
        let ring = &mut self.queues[usize::from(queue)];
        ring.waking = false;
        ring.asleep = false;
        ring.armed = false;
        ring.signalled = false;
        ring.poll_until = now + self.plan.polling;
        let pop = now + self.some(100, 800);
        self.at(pop, Ev::Pop(queue, now, false));
    }

    fn pop(&mut self, now: i64, queue: u16, wake: i64, polled: bool) {
        let ring = &mut self.queues[usize::from(queue)];
        let rqs = &self.rqs;
        let (taken, left): (Vec<usize>, Vec<usize>) = std::mem::take(&mut ring.avail)
            .into_iter()
            .partition(|&rq| rqs[rq].at[Point::Issue as usize] <= Some(now));
        ring.avail = left;
        for &rq in &taken {
            let kick = self.rqs[rq]
                .kick
                .filter(|&kick| self.kicks[kick].signal <= wake);
            let rq = &mut self.rqs[rq];
            rq.popped = true;
            rq.polled = polled;
            rq.wake = wake;
            rq.at[Point::Pop as usize] = Some(now);
            match kick.filter(|_| !polled) {
                Some(kick) => {
                    rq.kick = Some(kick);
                    self.kicks[kick].brought += 1;
                }
                None => {
                    rq.kick = None;
                    rq.delivery = Delivery::Polled;
                }
            }
        }
        let mut t = now;
        let mut i = 0;
        while i < taken.len() {
            t += self.some(50, 400);
            let (map, device) = (t, t + self.some(50, 400));
            t = device;
            let pair = taken.get(i + 1).copied().filter(|&next| {
                let (a, b) = (&self.rqs[taken[i]], &self.rqs[next]);
                a.flags == b.flags
                    && a.length > 0
                    && a.offset + a.length == b.offset
                    && a.offset != (1 << 20) - a.length
                    && a.flags & flags::DISCARD == 0
            });
            let merges = self.plan.merges;
            let group: Vec<usize> = match pair.filter(|_| self.chance(merges)) {
                Some(next) => vec![taken[i], next],
                None => vec![taken[i]],
            };
            i += group.len();
            for &rq in &group {
                self.rqs[rq].at[Point::Map as usize] = Some(map);
                self.rqs[rq].at[Point::Device as usize] = Some(device);
            }
            self.below(device, queue, &group);
        }
        let later = t + self.some(300, 1_500);
        self.queues[usize::from(queue)].looked = t;
        self.at(later, Ev::Look(queue));
    }

    /// The host's block layer.
    fn below(&mut self, device: i64, queue: u16, group: &[usize]) {
        let first = &self.rqs[group[0]];
        let (flags, offset) = (first.flags, first.offset);
        let length: u64 = group.iter().map(|&rq| self.rqs[rq].length).sum();
        let tid = worker(queue);
        let issue = device + self.some(500, 3_000);
        let latency = self.some(20_000, 150_000);
        let cached = self.plan.cached;
        let result;
        if length == 0 || flags & flags::DISCARD != 0 {
            result = device + latency;
            let class = if length == 0 {
                HostClass::Unknown
            } else {
                HostClass::Cached
            };
            self.rqs[group[0]].host = class;
        } else if group.len() == 1 && self.chance(cached) {
            result = issue + 500;
            self.rqs[group[0]].host = HostClass::Cached;
        } else {
            let complete = issue + latency;
            result = complete + self.some(500, 5_000);
            let ranges = physical(offset, length);
            let splits = self.plan.splits;
            let class = if group.len() > 1 {
                HostClass::Merged
            } else if ranges.len() > 1 || self.chance(splits) {
                HostClass::Split
            } else {
                HostClass::Direct
            };
            let parts: Vec<(u64, u64)> = match (class, &ranges[..]) {
                (HostClass::Split, &[(place, length)]) => {
                    vec![(place, length / 2), (place + length / 2, length / 2)]
                }
                _ => ranges,
            };
            let last = parts.len() - 1;
            for (i, (place, length)) in parts.into_iter().enumerate() {
                let args = [HOST_DEV, place / 512, length / 512, flags];
                self.block(issue + i as i64 * 50, Kind::BlockRqIssue, tid, &args);
                let done = if i == last {
                    complete
                } else {
                    complete - 5_000
                };
                self.block(done, Kind::BlockRqComplete, 0, &args);
            }
            for &rq in group {
                self.rqs[rq].host = class;
                self.rqs[rq].at[Point::HostIssue as usize] = Some(issue);
                self.rqs[rq].at[Point::HostComplete as usize] = Some(complete);
            }
        }
        for &rq in group {
            self.at(result, Ev::Done(queue, rq));
        }
    }

    fn look(&mut self, now: i64, queue: u16) {
        let polling = self.plan.polling;
        let rqs = &self.rqs;
        let ring = &mut self.queues[usize::from(queue)];
        let ready = ring
            .avail
            .iter()
            .any(|&rq| rqs[rq].at[Point::Issue as usize] <= Some(now));
        if ready {
            let (seen, kicked) = (ring.looked, std::mem::take(&mut ring.signalled));
            ring.poll_until = now + polling;
            let wake = if kicked { now } else { seen };
            self.at(now + 100, Ev::Pop(queue, wake, !kicked));
        } else if now < ring.poll_until {
            ring.looked = now;
            let later = self.some(100, 400);
            self.at(now + later, Ev::Look(queue));
        } else {
            // Arm, look once more (nothing new: this is one instant), sleep.
            ring.armed = true;
            ring.asleep = true;
            if ring.signalled {
                ring.waking = true;
                self.at(now + 200, Ev::Wake(queue));
            }
        }
    }

    fn done(&mut self, now: i64, queue: u16, rq: usize) {
        self.rqs[rq].at[Point::Result as usize] = Some(now);
        let ring = &mut self.queues[usize::from(queue)];
        ring.done.push(rq);
        if !ring.finishing {
            ring.finishing = true;
            let free = ring.free;
            let later = self.some(200, 4_000);
            self.at((now + later).max(free), Ev::Finish(queue));
        }
    }

    fn finish(&mut self, now: i64, queue: u16) {
        let ring = &mut self.queues[usize::from(queue)];
        ring.finishing = false;
        let done = std::mem::take(&mut ring.done);
        ring.used.extend(&done);
        let send = ring.callbacks && !ring.outstanding;
        ring.outstanding |= send;
        let mut sent = None;
        let mut end = now + 30;
        if send {
            let at = now + self.some(100, 900);
            end = at + self.some(100, 500);
            self.queues[usize::from(queue)].free = end + 1;
            self.sent.push(Sent { at, entry: None });
            sent = Some(self.sent.len() - 1);
            let (address, data) = msi(queue);
            self.kvm(at, Kind::KvmMsiSetIrq, worker(queue), &[address, data]);
            let vcpu = u64::from(queue % self.plan.vcpus);
            let args = [vcpu, 0, 0, 0x22];
            self.kvm(at + 30, Kind::KvmApicAcceptIrq, worker(queue), &args);
            self.at(at, Ev::Irq(queue, self.sent.len() - 1));
        }
        for &rq in &done {
            self.rqs[rq].at[Point::Used as usize] = Some(now);
            self.rqs[rq].at[18] = Some(end); // kept for its record
            self.rqs[rq].sent = sent;
        }
    }

    fn irq(&mut self, now: i64, queue: u16, sent: usize) {
        let vcpu = queue % self.plan.vcpus;
        let cpu = &self.vcpus[usize::from(vcpu)];
        let (busy, (exit, back)) = (cpu.busy, cpu.kick);
        let mut handler = (now + self.some(200, 2_000)).max(busy.min(now + 5_000) + 1);
        if exit <= now && now < back {
            self.sent[sent].entry = Some(back);
        } else if self.vcpus[usize::from(vcpu)].entry > now {
            self.sent[sent].entry = Some(self.vcpus[usize::from(vcpu)].entry);
        } else if !self.vcpus[usize::from(vcpu)].inside {
            let entry = now + self.some(2_000, 30_000);
            self.enter(entry, vcpu);
            self.sent[sent].entry = Some(entry);
            handler = entry + self.some(100, 900);
        }
        let cpu = &mut self.vcpus[usize::from(vcpu)];
        cpu.busy = cpu.busy.max(handler);
        self.at(handler, Ev::Handler(queue, vcpu));
    }

    fn handler(&mut self, now: i64, queue: u16, vcpu: u16) {
        let cpu = &self.vcpus[usize::from(vcpu)];
        let taken = cpu.handling || cpu.busy > now;
        if taken {
            let later = cpu.busy.min(now + 2_000) + 1;
            self.at(later, Ev::Handler(queue, vcpu));
            return;
        }
        self.vcpus[usize::from(vcpu)].handling = true;
        let ring = &mut self.queues[usize::from(queue)];
        ring.outstanding = false;
        ring.callbacks = false;
        let (number, known) = match self.plan.vqs {
            true => (irq(queue), vq(queue)),
            false => (0, 0),
        };
        self.guest(now, Kind::VringInterrupt, vcpu, 0, &[number, known]);
        self.guest(now + 40, Kind::VirtblkDone, vcpu, 0, &[known]);
        self.vcpus[usize::from(vcpu)].busy = i64::MAX / 2;
        let later = now + self.some(80, 300);
        self.at(later, Ev::Loop(queue, vcpu, now));
    }

    fn reap(&mut self, now: i64, queue: u16, vcpu: u16, start: i64) {
        let used = std::mem::take(&mut self.queues[usize::from(queue)].used);
        if used.is_empty() {
            self.queues[usize::from(queue)].callbacks = true;
            self.vcpus[usize::from(vcpu)].busy = now;
            self.vcpus[usize::from(vcpu)].handling = false;
            self.work_until(vcpu, now + 50);
            return;
        }
        let mut t = now;
        for rq in used {
            t += self.some(50, 600);
            let Rq {
                op,
                flags,
                offset,
                length,
                ..
            } = self.rqs[rq];
            let args = [GUEST_DEV, offset / 512, length / 512, flags];
            self.guest(t, Kind::BlockRqComplete, vcpu, 0, &args);
            let sent = self.rqs[rq].sent.map(|sent| self.sent[sent].clone());
            let rq = &mut self.rqs[rq];
            rq.at[Point::Complete as usize] = Some(t);
            if rq.at[Point::Used as usize] <= Some(start) {
                match sent.filter(|sent| sent.at <= start) {
                    Some(sent) => {
                        rq.at[Point::Interrupt as usize] = Some(sent.at);
                        rq.at[Point::Entry as usize] = sent.entry;
                        rq.at[Point::Handler as usize] = Some(start);
                    }
                    None if rq.sent.is_none() => rq.at[Point::Handler as usize] = Some(start),
                    None => {}
                }
            }
            self.ops[op].left -= 1;
            if self.ops[op].left == 0 {
                self.answer(t, op);
            }
        }
        let later = t + self.some(50, 3_000);
        self.at(later, Ev::Loop(queue, vcpu, start));
    }

    fn answer(&mut self, complete: i64, op: usize) {
        let end = complete + self.some(100, 900);
        let Op {
            flags,
            offset,
            length,
            slot,
            call,
            ..
        } = self.ops[op];
        self.ops[op].end = end;
        let vcpu = (slot % u64::from(self.plan.vcpus)) as u16;
        let tid = 1000 + u32::from(vcpu);
        let args = [end as u64, offset, length, length, flags];
        let event = Event::new(call as u64, Kind::BenchOperation, vcpu, tid, &args);
        self.out.bench.push(event);
        let idle = &mut self.vcpus[usize::from(vcpu)].idle;
        idle.push(slot);
        if idle.len() == 1 {
            let think = self.some(100, 20_000);
            self.at(end + think, Ev::Submit(vcpu));
        }
    }

    fn write_record(&mut self, rq: usize) {
        let rq = &self.rqs[rq];
        let at = |point: Point| rq.at[point as usize].unwrap() as u64;
        let mut flags = rq.flags;
        if rq.polled {
            flags |= flags::POLLED;
        }
        let args = [
            at(Point::Pop),
            at(Point::Map),
            at(Point::Device),
            at(Point::Result),
            at(Point::Used),
            rq.at[18].unwrap() as u64,
            rq.offset,
            rq.length,
            Event::pack_fathom_rest(rq.queue, flags, 0),
        ];
        let tid = worker(rq.queue);
        let event = Event::new(rq.wake as u64, Kind::FathomRequest, 0, tid, &args);
        self.out.fathom.push(event);
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
            points: POINTS
                .iter()
                .filter_map(|&point| Some((point, at[point as usize]?)))
                .collect(),
            delivery: rq.delivery,
            batch: kick.map_or(0, |kick| kick.brought),
            host: rq.host,
        }
    }
}

pub const POINTS: [Point; 19] = [
    Point::Call,
    Point::Bio,
    Point::Issue,
    Point::Kick,
    Point::Exit,
    Point::Signal,
    Point::Wake,
    Point::Pop,
    Point::Map,
    Point::Device,
    Point::HostIssue,
    Point::HostComplete,
    Point::Result,
    Point::Used,
    Point::Interrupt,
    Point::Entry,
    Point::Handler,
    Point::Complete,
    Point::Return,
];

/// Where bytes of the image lie.
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
