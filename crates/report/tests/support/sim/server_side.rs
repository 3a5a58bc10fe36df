//! The server and the host's block layer.

use fathom_report::analysis::{Delivery, HostClass, Point};
use fathom_run::{Event, Kind, flags};

use super::*;

impl World {
    pub(super) fn signal(&mut self, now: i64, queue: u16) {
        let ring = &mut self.queues[usize::from(queue)];
        ring.signalled = true;
        if ring.asleep && !ring.waking {
            ring.waking = true;
            let latency = self.some(1_000, 12_000);
            self.at(now + latency, Ev::Wake(queue));
        }
    }

    pub(super) fn wake(&mut self, now: i64, queue: u16) {
        let ring = &mut self.queues[usize::from(queue)];
        ring.waking = false;
        ring.asleep = false;
        ring.armed = false;
        ring.signalled = false;
        ring.poll_until = now + self.plan.polling;
        let pop = now + self.some(100, 800);
        self.at(pop, Ev::Pop(queue, now, false));
    }

    pub(super) fn pop(&mut self, now: i64, queue: u16, wake: i64, polled: bool) {
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

    /// Simulates the host's block layer.
    pub(super) fn below(&mut self, device: i64, queue: u16, group: &[usize]) {
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

    pub(super) fn look(&mut self, now: i64, queue: u16) {
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
            // Arm, check once more (nothing new, as no time passes), sleep.
            ring.armed = true;
            ring.asleep = true;
            if ring.signalled {
                ring.waking = true;
                self.at(now + 200, Ev::Wake(queue));
            }
        }
    }

    pub(super) fn done(&mut self, now: i64, queue: u16, rq: usize) {
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

    pub(super) fn finish(&mut self, now: i64, queue: u16) {
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
            self.sent.push(Sent {
                at,
                entry: None,
                woken: None,
            });
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
            self.rqs[rq].at[Point::Return as usize] = Some(end); // its record needs the end
            self.rqs[rq].sent = sent;
        }
    }

    /// Returns the calls of a server's thread that serves one request at a time: it waits for the
    /// kick, submits, and waits for the completion.
    fn calls_of(&self, rq: usize) -> Vec<(u64, i64, i64)> {
        const PPOLL: u64 = 271;
        const IO_SUBMIT: u64 = 209;
        let rq = &self.rqs[rq];
        let at = |point: Point| rq.at[point as usize];
        let device = at(Point::Device).unwrap();
        let result = at(Point::Result).unwrap();
        let submitted = at(Point::HostIssue).unwrap_or(device) + 50;
        let mut calls = Vec::new();
        if let Some(kick) = rq.kick {
            calls.push((PPOLL, self.kicks[kick].signal - 500, rq.wake));
        }
        calls.push((IO_SUBMIT, device, submitted));
        calls.push((PPOLL, submitted + 100, result));
        calls
    }

    pub(super) fn write_calls(&mut self, rq: usize) {
        let tid = worker(self.rqs[rq].queue);
        for (number, enter, exit) in self.calls_of(rq) {
            let args = [number, 3, 1, 0, 0];
            let enter = Event::new(enter as u64, Kind::SysEnter, 0, tid, &args);
            let exit = Event::new(exit as u64, Kind::SysExit, 0, tid, &[number, 0]);
            self.out.calls.extend([enter, exit]);
        }
    }

    pub(super) fn write_record(&mut self, rq: usize) {
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
            at(Point::Return),
            rq.offset,
            rq.length,
            Event::pack_fathom_rest(rq.queue, flags, 0),
        ];
        let tid = worker(rq.queue);
        let event = Event::new(rq.wake as u64, Kind::FathomRequest, 0, tid, &args);
        self.out.fathom.push(event);
    }
}
