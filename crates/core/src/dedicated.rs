//! The loop of a thread with one worker.
//!
//! Between turns the loop spins for a while and then sleeps in one place, [`Engine::submit`].
//!
//! [`Engine::submit`]: crate::Engine::submit

use crate::engine::Wait;
use crate::mailbox::{Inbox, Message};
use crate::polling::{Awaited, Poller, Waited};
use crate::token::Token;
use crate::worker::Worker;
use probe::probe;
use std::io;

/// A worker with its own thread.
pub(crate) struct Dedicated {
    worker: Worker,
    inbox: Inbox,
    poller: Poller,
    awaited: Awaited,
}

impl Dedicated {
    pub(crate) fn new(mut worker: Worker, inbox: Inbox, poller: Poller) -> io::Result<Dedicated> {
        worker.cx.engine.watch(inbox.fd(), Token::MAILBOX)?;
        Ok(Dedicated {
            worker,
            inbox,
            poller,
            awaited: Awaited::Peer,
        })
    }

    /// Serves until told to stop.
    pub(crate) fn run(mut self) {
        while !self.worker.is_stopping {
            match self.turn() {
                true => self.poller.moved(),
                false => self.wait(),
            }
            // Other kinds of letters are for pools.
            if let Some(Message::To(_, command)) = self.inbox.take() {
                self.worker.obey(command);
                self.awaited = self.worker.peers;
            }
        }
    }

    /// Moves every request as far as possible without waiting. Returns false if there was nothing
    /// to do.
    fn turn(&mut self) -> bool {
        let worker = &mut self.worker;
        worker.pop();
        let submitted = worker.submit() | worker.alarm();
        worker.enter(Wait::No);
        let moved = worker.dispatch();
        let answered = worker.finish();
        worker.let_go();
        if answered {
            self.poller.answered(worker.latency);
            self.awaited = worker.peers;
        } else if submitted {
            self.awaited = Awaited::Device;
        }
        submitted || answered || moved
    }

    /// Spins for a while, then sleeps until something happens. Called when there is no work.
    fn wait(&mut self) {
        let start = self.worker.cx.clock.now();
        let slept = !self.spin(start) && !self.arm();
        let worker = &mut self.worker;
        if slept {
            worker.counters.sleeps.increment();
            probe!(fathom, sleep);
            worker.enter(worker.cx.until_alarm(start));
            worker.dispatch();
        }
        let now = worker.cx.clock.now();
        worker.cx.now = now;
        if slept {
            probe!(fathom, wake, now - start, now);
        }
        // The end of a wait that was scheduled says nothing about the peer or the device.
        if now < worker.cx.alarm {
            self.poller.waited(Waited {
                awaited: self.awaited,
                ticks: now - start,
                slept,
                answered: worker.answered,
            });
        }
    }

    /// Polls for work without sleeping, with kicks suppressed. Returns true if there is some.
    fn spin(&mut self, start: u64) -> bool {
        let window = self.poller.window(self.awaited, start);
        if window == 0 {
            return false;
        }
        self.worker.disarm();
        let mut now = start;
        let mut found = false;
        while !found && now - start < window {
            found = self.has_work() || now >= self.worker.cx.alarm;
            std::hint::spin_loop();
            now = self.worker.cx.clock.now();
        }
        probe!(fathom, poll, found, now - start, now);
        self.poller.spun(now - start, found);
        self.worker.counters.polled(now - start, found);
        found
    }

    fn has_work(&mut self) -> bool {
        self.worker.cx.engine.ready() || self.inbox.has_mail() || self.worker.has_pending()
    }

    /// Asks for kicks. Returns true if work arrived before kicks were enabled.
    fn arm(&mut self) -> bool {
        // Every source must be armed, even if there are commands.
        self.inbox.has_mail() | self.worker.arm()
    }
}
