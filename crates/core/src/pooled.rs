//! The loop of a pool's thread: many workers on one engine.
//!
//! Only those are touched that have something to do: whose peer has kicked, whose I/O has completed, who
//! have mail, whose time has come. These are *active*, take turns, each with a bounded number of requests,
//! and are asked for in one system call. One that had nothing for a while asks for kicks again, and costs
//! nothing until it gets one.

use crate::cx::Cx;
use crate::disk::{Disk, DiskError};
use crate::engine::{Engine, Wait};
use crate::mailbox::{Address, Command, Inbox, Joining, Letter};
use crate::polling::{Awaited, Poller, Waited};
use crate::shared_engine::{InFlight, Share, SharedEngine, cancel_all};
use crate::token::{MEMBERS, Target, Token};
use crate::worker::Worker;
use fathom_trace::Clock;
use fathom_units::cause;
use probe::probe;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

/// Requests that a disk may have popped in one turn, while others wait for theirs.
const BUDGET: usize = 32;

/// So many operations are handed to the kernel at once, at least while there are others to come: a device
/// had better not wait for the end of a long turn.
const PIECE: usize = 64;

/// A disk that has had nothing to do in so many turns in a row is not looked at any more.
const QUIET_TURNS: u8 = 16;

/// Letters read in one turn.
const LETTERS: usize = 16;

/// One disk's worker here.
struct Member {
    /// If it is stopping, it only waits for what it has in flight.
    worker: Worker,
    in_flight: Rc<InFlight>,
    serial: u64,
    /// Turns in a row without anything to do.
    quiet: u8,
    is_active: bool,
    /// Has completions to be dispatched.
    is_touched: bool,
    /// When it is to be woken, as far as `alarms` knows.
    alarm: u64,
    /// After the worker, whose channel is this disk's.
    _disk: Arc<dyn Disk>,
    /// Last: who waits for the end sees all of it.
    _alive: SyncSender<Infallible>,
}

/// A pool's thread.
pub(crate) struct Pooled {
    members: Vec<Option<Member>>,
    /// Whose turn it is, one after the other.
    active: Vec<u16>,
    touched: Vec<u16>,
    /// When members go on by themselves. What a member does not know of any more is passed over.
    alarms: BinaryHeap<Reverse<(u64, u16)>>,
    serial: u64,
    inbox: Inbox,
    poller: Poller,
    awaited: Awaited,
    /// How many requests were answered at once last.
    answered: usize,
    clock: &'static Clock,
    /// The last tick, of whoever had its turn.
    now: u64,
    is_ending: bool,
    /// After all members.
    engine: Rc<SharedEngine>,
}

impl Pooled {
    pub(crate) fn new(engine: Box<dyn Engine>, inbox: Inbox, poller: Poller) -> io::Result<Pooled> {
        let engine = SharedEngine::new(engine);
        engine.watch(inbox.fd(), Token::MAILBOX)?;
        Ok(Pooled {
            members: Vec::new(),
            active: Vec::new(),
            touched: Vec::new(),
            alarms: BinaryHeap::new(),
            serial: 0,
            inbox,
            poller,
            awaited: Awaited::Peer,
            answered: 0,
            clock: Clock::get(),
            now: Clock::get().now(),
            is_ending: false,
            engine,
        })
    }

    /// Serve until told to end.
    pub(crate) fn run(mut self) {
        while !self.is_ending || self.members.iter().any(Option::is_some) {
            match self.turn() {
                true => self.poller.moved(),
                false => self.wait(),
            }
            self.read_letters();
        }
    }

    /// Give each active member its turn. False when none had anything to do.
    fn turn(&mut self) -> bool {
        self.now = self.clock.now();
        self.ring_alarms();
        self.engine.is_crowded.set(self.active.len() > 1);
        let mut busy = false;
        for index in 0..self.active.len() {
            let number = self.active[index];
            busy |= self.give_turn(number);
            if self.engine.pushed() >= PIECE {
                self.enter(Wait::No);
            }
        }
        self.enter(Wait::No);
        busy |= self.distribute();
        self.rest_quiet();
        busy
    }

    fn give_turn(&mut self, number: u16) -> bool {
        let Some(member) = serving(&mut self.members, number) else {
            return false;
        };
        let worker = &mut member.worker;
        worker.cx.now = self.now;
        worker.pop_some(BUDGET);
        let submitted = worker.submit() | worker.alarm();
        if submitted {
            member.quiet = 0;
            self.awaited = Awaited::Device;
        } else {
            member.quiet += 1;
        }
        // Answered by now are those whose storage waits for no device.
        let answered = self.answer(number);
        submitted || answered
    }

    /// Answer what a member has done. False when that is nothing.
    fn answer(&mut self, number: u16) -> bool {
        let Some(member) = serving(&mut self.members, number) else {
            return false;
        };
        let worker = &mut member.worker;
        let answered = worker.finish();
        worker.let_go();
        self.now = worker.cx.now;
        if answered {
            member.quiet = 0;
            self.awaited = worker.peers;
            self.answered = worker.answered;
            self.poller.answered(worker.latency);
        }
        if worker.cx.alarm < member.alarm {
            member.alarm = worker.cx.alarm;
            self.alarms.push(Reverse((member.alarm, number)));
        }
        answered
    }

    fn enter(&mut self, wait: Wait) {
        if let Err(error) = self.engine.enter(wait) {
            tracing::error!("submitting I/O failed: {}", cause(error));
        }
    }

    /// Give what has completed to whom it belongs. True when somebody has something to do now.
    fn distribute(&mut self) -> bool {
        let mut completions = self.engine.take_completions();
        for completion in completions.drain(..) {
            if completion.token.target() == Target::Mailbox {
                continue;
            }
            let number = completion.token.member();
            let Some(Some(member)) = self.members.get_mut(usize::from(number)) else {
                continue;
            };
            member.in_flight.completed(completion.token);
            if !member.worker.is_stopping {
                member.worker.completions.push(completion);
            }
            if !std::mem::replace(&mut member.is_touched, true) {
                self.touched.push(number);
            }
        }
        self.engine.give_back(completions);
        let any = !self.touched.is_empty();
        let mut touched = std::mem::take(&mut self.touched);
        for number in touched.drain(..) {
            self.touch(number);
        }
        self.touched = touched;
        any
    }

    /// Let a member see what has completed.
    fn touch(&mut self, number: u16) {
        let Some(member) = &mut self.members[usize::from(number)] else {
            return;
        };
        member.is_touched = false;
        if member.worker.is_stopping {
            return self.remove_if_idle(number);
        }
        member.worker.dispatch();
        self.answer(number);
        self.activate(number);
    }

    fn activate(&mut self, number: u16) {
        let Some(member) = &mut self.members[usize::from(number)] else {
            return;
        };
        member.quiet = 0;
        if !std::mem::replace(&mut member.is_active, true) {
            self.active.push(number);
        }
    }

    /// Members whose time has come are active.
    fn ring_alarms(&mut self) {
        while let Some(Reverse((alarm, number))) = self.alarms.peek().copied()
            && alarm <= self.now
        {
            self.alarms.pop();
            if let Some(Some(member)) = self.members.get_mut(usize::from(number))
                && member.alarm == alarm
            {
                member.alarm = u64::MAX;
                self.activate(number);
            }
        }
    }

    /// Those that have been quiet for long ask for kicks and are left alone.
    fn rest_quiet(&mut self) {
        let members = &mut self.members;
        self.active.retain(|number| {
            let Some(member) = &mut members[usize::from(*number)] else {
                return false;
            };
            member.quiet < QUIET_TURNS || !rest(member)
        });
    }

    /// Nothing to do: spin for a while, then sleep until something happens.
    fn wait(&mut self) {
        let start = self.clock.now();
        let slept = !self.spin(start) && !self.rest_all();
        if slept {
            probe!(fathom, sleep);
            self.enter(self.until_alarm(start));
            self.distribute();
        }
        let now = self.clock.now();
        if slept {
            probe!(fathom, wake, now - start, now);
        }
        if now < self.next_alarm() {
            self.poller.waited(Waited {
                awaited: self.awaited,
                ticks: now - start,
                slept,
                answered: self.answered,
            });
        }
    }

    /// Watch for work of those that are active without sleeping. True when there is some.
    fn spin(&mut self, start: u64) -> bool {
        let window = self.poller.window(self.awaited, start);
        if window == 0 {
            return false;
        }
        for number in &self.active {
            if let Some(member) = serving(&mut self.members, *number) {
                member.worker.disarm();
            }
        }
        let alarm = self.next_alarm();
        let mut now = start;
        let mut found = false;
        while !found && now - start < window {
            found = self.has_work() || now >= alarm;
            std::hint::spin_loop();
            now = self.clock.now();
        }
        let spun = now - start;
        probe!(fathom, poll, found, spun, now);
        self.poller.spun(spun, found);
        // It was for all of them.
        let each = spun / self.active.len().max(1) as u64;
        for number in &self.active {
            if let Some(member) = serving(&mut self.members, *number) {
                member.worker.counters.polled(each, found);
            }
        }
        found
    }

    fn has_work(&mut self) -> bool {
        let members = &mut self.members;
        let mut has_pending = |number: &u16| {
            let member = serving(members, *number);
            member.is_some_and(|member| member.worker.has_pending())
        };
        self.engine.is_ready() || self.inbox.has_mail() || self.active.iter().any(&mut has_pending)
    }

    /// All that are active ask for kicks. True when there is work meanwhile.
    fn rest_all(&mut self) -> bool {
        let members = &mut self.members;
        self.active.retain(|number| {
            let member = members[usize::from(*number)].as_mut();
            member.is_some_and(|member| !rest(member))
        });
        !self.active.is_empty() || self.inbox.has_mail()
    }

    fn next_alarm(&self) -> u64 {
        let next = self.alarms.peek();
        next.map_or(u64::MAX, |Reverse((alarm, _))| *alarm)
    }

    fn until_alarm(&self, now: u64) -> Wait {
        match self.next_alarm() {
            u64::MAX => Wait::Forever,
            alarm => Wait::For(self.clock.duration(alarm.saturating_sub(now))),
        }
    }
}

/// Members that come and go.
impl Pooled {
    fn read_letters(&mut self) {
        for _ in 0..LETTERS {
            match self.inbox.take() {
                None => return,
                Some(Letter::To(address, command)) => {
                    let Some(member) = serving(&mut self.members, address.member) else {
                        continue;
                    };
                    if member.serial != address.serial {
                        continue; // that one has gone
                    }
                    member.worker.cx.tick();
                    let changes =
                        matches!(command, Command::Attach { .. } | Command::SetEventfd { .. });
                    member.worker.obey(command);
                    if member.worker.is_stopping {
                        cancel_all(&self.engine, &member.in_flight);
                        self.remove_if_idle(address.member);
                    } else {
                        self.answer(address.member);
                        self.activate(address.member);
                    }
                    // The next letter may detach the source, whose requests are to be popped before,
                    // or close an eventfd that the engine has not begun to watch.
                    if changes {
                        return;
                    }
                }
                Some(Letter::Join(joining)) => self.join(*joining),
                Some(Letter::End) => self.is_ending = true,
            }
        }
    }

    fn join(&mut self, joining: Joining) {
        let reply = joining.reply.clone();
        // Should who asked have died, there is nobody to tell.
        let _ = reply.send(self.add(joining));
    }

    fn add(&mut self, joining: Joining) -> Result<Address, DiskError> {
        let free = self.members.iter().position(Option::is_none);
        let number = free.unwrap_or(self.members.len());
        if number >= MEMBERS {
            let problem = format!(
                "a thread of the pool has {MEMBERS} disks, which is the limit; add threads to \
                 the pool"
            );
            let path = PathBuf::from("pool");
            return Err(DiskError::Unusable { path, problem });
        }
        let member = number as u16;
        let mut share = Share::new(&self.engine, member);
        if joining.pin_memory {
            share.pin_memory();
        }
        let in_flight = share.in_flight().clone();
        let mut cx = Cx::new(Box::new(share));
        let channel = joining.disk.channel(&mut cx)?;
        let bell = self.inbox.bell().clone();
        let worker = Worker::new(cx, channel, bell, joining.recorder, joining.counters);
        self.serial += 1;
        let member = Member {
            worker,
            in_flight,
            serial: self.serial,
            quiet: 0,
            is_active: false,
            is_touched: false,
            alarm: u64::MAX,
            _disk: joining.disk,
            _alive: joining.alive,
        };
        match free {
            Some(free) => self.members[free] = Some(member),
            None => self.members.push(Some(member)),
        }
        self.active.reserve(self.members.len());
        self.touched.reserve(self.members.len());
        // Its channel may have asked for something.
        self.answer(number as u16);
        self.activate(number as u16);
        Ok(Address {
            member: number as u16,
            serial: self.serial,
        })
    }

    /// A member that is stopping goes when it has nothing in flight.
    fn remove_if_idle(&mut self, number: u16) {
        let entry = &mut self.members[usize::from(number)];
        if entry
            .take_if(|member| member.in_flight.is_nothing())
            .is_some()
        {
            self.active.retain(|active| *active != number);
        }
    }
}

/// The member of that number, unless it is stopping.
fn serving(members: &mut [Option<Member>], number: u16) -> Option<&mut Member> {
    let member = members.get_mut(usize::from(number))?.as_mut();
    member.filter(|member| !member.worker.is_stopping)
}

/// Ask for kicks and be left alone. False when there is work meanwhile.
fn rest(member: &mut Member) -> bool {
    member.quiet = 0;
    if member.worker.arm() {
        return false;
    }
    member.worker.counters.sleeps.increment();
    member.is_active = false;
    true
}
