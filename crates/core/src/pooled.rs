//! The loop of a pool's thread: many workers on one engine.
//!
//! The thread handles only members that have something to do: their peer has kicked, their I/O has
//! completed, they have commands, or their alarm is due. Members with something to do are *active*
//! and take turns, each with a bounded number of requests. A single system call submits the
//! requests of all members. A member that was idle for several turns asks for kicks again, and
//! costs nothing until it gets one.

use crate::cx::Cx;
use crate::disk::{Disk, DiskError};
use crate::engine::{Engine, Wait};
use crate::mailbox::{Address, Command, Inbox, Joining, Message};
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

/// Maximum number of requests that a disk pops in one turn, while other disks wait.
const BUDGET: usize = 32;

/// Number of queued operations after which a turn enters the kernel, so that the device need not
/// wait for the end of a long turn.
const PIECE: usize = 64;

/// Number of consecutive idle turns after which a member is no longer polled.
const QUIET_TURNS: u8 = 16;

/// Maximum number of letters read in one turn.
const LETTERS: usize = 16;

/// A disk's worker on this thread.
struct Member {
    /// The worker. If it is stopping, it only waits for its operations in flight.
    worker: Worker,
    in_flight: Rc<InFlight>,
    serial: u64,
    /// Number of consecutive turns without work.
    quiet: u8,
    is_active: bool,
    /// The worker has completions to dispatch.
    is_touched: bool,
    /// Time of the member's current entry in `alarms`, in ticks.
    alarm: u64,
    /// Dropped after the worker, which contains this disk's channel.
    _disk: Arc<dyn Disk>,
    /// Dropped last. A thread that waits for the end of the worker continues only after the rest
    /// was dropped.
    _alive: SyncSender<Infallible>,
}

/// A pool's thread.
pub(crate) struct Pooled {
    members: Vec<Option<Member>>,
    /// Active members, in the order of their turns.
    active: Vec<u16>,
    touched: Vec<u16>,
    /// Times at which members wake by themselves. Entries that differ from the member's `alarm` are
    /// stale and are ignored.
    alarms: BinaryHeap<Reverse<(u64, u16)>>,
    serial: u64,
    inbox: Inbox,
    poller: Poller,
    awaited: Awaited,
    /// Number of requests that the last member with replies answered together.
    answered: usize,
    clock: &'static Clock,
    /// Last tick of the member that had the most recent turn.
    now: u64,
    is_ending: bool,
    /// Dropped after all members.
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

    /// Serves members until the thread has been ordered to end and the last member has left.
    pub(crate) fn run(mut self) {
        while !self.is_ending || self.members.iter().any(Option::is_some) {
            match self.turn() {
                true => self.poller.moved(),
                false => self.wait(),
            }
            self.read_letters();
        }
    }

    /// Gives each active member a turn. Returns false if none had work.
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
        // Requests are answered already if their storage does not wait for a device.
        let answered = self.answer(number);
        submitted || answered
    }

    /// Sends the replies of a member. Returns false if the member has no replies.
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

    /// Passes completions to their members. Returns true if a member has work now.
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

    /// Lets a member handle its completions.
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

    /// Activates the members whose alarm is due.
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

    /// Deactivates members that have been idle for long; they ask for kicks.
    fn rest_quiet(&mut self) {
        let members = &mut self.members;
        self.active.retain(|number| {
            let Some(member) = &mut members[usize::from(*number)] else {
                return false;
            };
            member.quiet < QUIET_TURNS || !rest(member)
        });
    }

    /// Spins for a while, then sleeps until something happens. Called when there is no work.
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

    /// Polls the active members for work without sleeping. Returns true if there is some.
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
        // The spin is shared by all active members.
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

    /// Lets all active members ask for kicks. Returns true if work has arrived meanwhile.
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

/// Arrival and departure of members.
impl Pooled {
    fn read_letters(&mut self) {
        for _ in 0..LETTERS {
            match self.inbox.take() {
                None => return,
                Some(Message::To(address, command)) => {
                    let Some(member) = serving(&mut self.members, address.member) else {
                        continue;
                    };
                    if member.serial != address.serial {
                        continue; // that member has gone
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
                    // A turn comes first. The next letter may detach the source, whose requests
                    // must be popped before. Or it may close an eventfd that the engine has not
                    // begun to watch.
                    if changes {
                        return;
                    }
                }
                Some(Message::Join(joining)) => self.join(*joining),
                Some(Message::End) => self.is_ending = true,
            }
        }
    }

    fn join(&mut self, joining: Joining) {
        let reply = joining.reply.clone();
        // The requesting thread may have ended.
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
        let waker = self.inbox.waker().clone();
        let worker = Worker::new(cx, channel, waker, joining.recorder, joining.counters);
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
        // The channel may have requested an alarm.
        self.answer(number as u16);
        self.activate(number as u16);
        Ok(Address {
            member: number as u16,
            serial: self.serial,
        })
    }

    /// Removes a member that is stopping and has nothing in flight.
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

/// Returns the member of that number, unless it is stopping.
fn serving(members: &mut [Option<Member>], number: u16) -> Option<&mut Member> {
    let member = members.get_mut(usize::from(number))?.as_mut();
    member.filter(|member| !member.worker.is_stopping)
}

/// Asks for kicks and deactivates the member. Returns false if work has arrived meanwhile.
fn rest(member: &mut Member) -> bool {
    member.quiet = 0;
    if member.worker.arm() {
        return false;
    }
    member.worker.counters.sleeps.increment();
    member.is_active = false;
    true
}
