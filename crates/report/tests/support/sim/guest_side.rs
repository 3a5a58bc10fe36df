//! The guest: its benchmark, its driver, its vCPUs.

use fathom_report::analysis::{Delivery, HostClass, Point};
use fathom_run::{Event, Kind, flags};

use super::*;

impl World {
    pub(super) fn enter(&mut self, at: i64, vcpu: u16) {
        let cpu = &mut self.vcpus[usize::from(vcpu)];
        if !cpu.inside {
            cpu.inside = true;
            cpu.entry = at;
            let tid = vcpu_tid(vcpu);
            self.kvm(at, Kind::KvmEntry, tid, &[u64::from(vcpu), 0x1000]);
        }
    }

    pub(super) fn leave(&mut self, at: i64, vcpu: u16, reason: u64) {
        self.vcpus[usize::from(vcpu)].inside = false;
        let tid = vcpu_tid(vcpu);
        let args = [reason, 2, 0x1000, u64::from(vcpu)];
        self.kvm(at, Kind::KvmExit, tid, &args);
    }

    pub(super) fn halt(&mut self, now: i64, vcpu: u16) {
        let cpu = &self.vcpus[usize::from(vcpu)];
        if cpu.inside && cpu.busy < now {
            self.leave(now, vcpu, 0x78);
        }
    }

    /// Keeps a vCPU busy until this time; it halts a little later if nothing arrives.
    pub(super) fn work_until(&mut self, vcpu: u16, until: i64) {
        let cpu = &mut self.vcpus[usize::from(vcpu)];
        cpu.busy = cpu.busy.max(until);
        let idle = self.some(500, 8_000);
        self.at(until + idle, Ev::Halt(vcpu));
    }

    pub(super) fn next_op(&mut self, slot: u64, call: i64, bio: i64) -> usize {
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

    pub(super) fn submit(&mut self, now: i64, vcpu: u16) {
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

    pub(super) fn issue(&mut self, mut t: i64, op: usize, vcpu: u16, queue: u16, tid: u32) -> i64 {
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
            let mut at = [None; Point::ALL.len()];
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

    pub(super) fn kick_check(&mut self, now: i64, vcpu: u16, queue: u16, tid: u32) {
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
        // The vCPU enters at once in the simulation's order; the event's time is when it comes
        // back.
        self.vcpus[usize::from(vcpu)].inside = true;
        self.kvm(back, Kind::KvmEntry, host, &[u64::from(vcpu), 0]);
        self.after_submit(back + 10, vcpu);
    }

    pub(super) fn after_submit(&mut self, now: i64, vcpu: u16) {
        self.work_until(vcpu, now);
        let again = !self.vcpus[usize::from(vcpu)].idle.is_empty();
        if again {
            let think = self.some(200, 40_000);
            self.at(now + think, Ev::Submit(vcpu));
        }
    }

    pub(super) fn irq(&mut self, now: i64, queue: u16, sent: usize) {
        let vcpu = queue % self.plan.vcpus;
        let cpu = &self.vcpus[usize::from(vcpu)];
        let (busy, (exit, back)) = (cpu.busy, cpu.kick);
        let mut handler = (now + self.some(200, 2_000)).max(busy.min(now + 5_000) + 1);
        if exit <= now && now < back {
            self.sent[sent].entry = Some(back);
        } else if self.vcpus[usize::from(vcpu)].entry > now {
            let cpu = &self.vcpus[usize::from(vcpu)];
            self.sent[sent].entry = Some(cpu.entry);
            self.sent[sent].woken = (cpu.woken >= now).then_some(cpu.woken);
        } else if !self.vcpus[usize::from(vcpu)].inside {
            let entry = now + self.some(2_000, 30_000);
            self.enter(entry, vcpu);
            self.sent[sent].entry = Some(entry);
            let woken = entry - self.some(100, 1_900);
            self.vcpus[usize::from(vcpu)].woken = woken;
            self.sent[sent].woken = Some(woken);
            let args = [entry as u64 - now as u64, 1, 1];
            self.kvm(woken, Kind::KvmVcpuWakeup, vcpu_tid(vcpu), &args);
            handler = entry + self.some(100, 900);
        }
        let cpu = &mut self.vcpus[usize::from(vcpu)];
        cpu.busy = cpu.busy.max(handler);
        self.at(handler, Ev::Handler(queue, vcpu));
    }

    pub(super) fn handler(&mut self, now: i64, queue: u16, vcpu: u16) {
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

    pub(super) fn reap(&mut self, now: i64, queue: u16, vcpu: u16, start: i64) {
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
                        rq.at[Point::Woken as usize] = sent.woken;
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

    pub(super) fn answer(&mut self, complete: i64, op: usize) {
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
}
