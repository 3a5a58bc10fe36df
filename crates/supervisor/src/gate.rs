//! Who opens things for a tenant, and reads its log: a thread at its gate.

use super::log::Log;
use super::permits::{Denied, Permits};
use super::relayed::Relay;
use fathom_host::link::{AtGate, FromGate, Link};
use fathom_host::signals::LeftToThisThread;
use fathom_metrics::Events;
use fathom_sockets::Descriptors;
use fathom_units::cause;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Who opens something for a tenant at the moment that this ends has no time for its last words.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// A tenant's gate, which is attended until the tenant has ended.
pub struct Gate(Arc<Post>);

/// What its thread has to do with.
struct Post {
    link: Link,
    log: Mutex<Log>,
    turn: Turn,
}

impl Gate {
    pub fn new(link: Link, log: Log) -> Gate {
        Gate(Arc::new(Post {
            link,
            log: Mutex::new(log),
            turn: Turn::default(),
        }))
    }

    /// Serve this tenant from now on, by what it may have.
    pub fn open(&self, tenant: &str, permits: Arc<Permits>, events: Events) -> io::Result<()> {
        let _signals = LeftToThisThread::begin();
        let post = self.0.clone();
        let tenant = tenant.to_owned();
        let thread = std::thread::Builder::new().name("gate".into());
        self.0.turn.now().is_attended = true;
        let started = thread.stack_size(STACK).spawn(move || {
            post.attend(&tenant, &permits, &events);
            post.turn.leave();
        });
        started.map(drop).inspect_err(|_| self.0.turn.leave())
    }

    /// Takes nothing in from now on, until [`Gate::go_on`]: requests wait in the socket. A request that was
    /// taken in and is not answered until `deadline` is not answered while the gate is held:
    /// [`Gate::owes_answer`] tells of it.
    pub fn hold(&self, deadline: Instant) {
        self.0.turn.now().is_held = true;
        let left = deadline.saturating_duration_since(Instant::now());
        let mut now = self.0.turn.wait_while(left, |now| now.is_busy);
        now.is_late = now.is_busy;
    }

    /// Whether a request is not answered while the gate is held. A successor answers it by an error.
    pub fn owes_answer(&self) -> bool {
        self.0.turn.now().is_late
    }

    /// A predecessor owes the tenant an answer.
    pub fn answer_owed(&self) {
        self.0.turn.now().owes = true;
    }

    pub fn go_on(&self) {
        let mut now = self.0.turn.now();
        now.is_held = false;
        now.is_late = false;
        self.0.turn.changed.notify_all();
    }

    /// The tenant has ended: wait for its last words, but not for long.
    pub fn finish(&self) {
        drop(self.0.turn.wait_while(LAST_WORDS, |now| now.is_attended));
    }

    /// For a successor of this supervisor, while it is held: the gate, and the log.
    pub fn hand_over(&self, files: &mut Descriptors) -> io::Result<(usize, Option<usize>)> {
        let log = self.0.log().hand_over();
        Ok((files.add(&self.0.link)?, files.add_any(log.as_ref())?))
    }
}

/// Whether the thread may take something in.
#[derive(Default)]
struct Turn {
    now: Mutex<Now>,
    changed: Condvar,
}

#[derive(Default)]
struct Now {
    is_held: bool,
    /// Something is taken in, and not answered.
    is_busy: bool,
    /// It took too long, and is not answered while the gate is held.
    is_late: bool,
    /// A predecessor has taken something in, and has not answered it.
    owes: bool,
    /// The thread is there.
    is_attended: bool,
}

impl Turn {
    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_while(
        &self,
        most: Duration,
        mut waits: impl FnMut(&Now) -> bool,
    ) -> MutexGuard<'_, Now> {
        let waited = self
            .changed
            .wait_timeout_while(self.now(), most, |now| waits(now));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn begin(&self) {
        let is_held = |now: &mut Now| now.is_held;
        let waited = self.changed.wait_while(self.now(), is_held);
        waited.unwrap_or_else(PoisonError::into_inner).is_busy = true;
    }

    /// Calls `send` to answer, when an answer may be sent.
    fn answer<T>(&self, send: impl FnOnce() -> T) -> T {
        let is_late = |now: &mut Now| now.is_late;
        let waited = self.changed.wait_while(self.now(), is_late);
        let _now = waited.unwrap_or_else(PoisonError::into_inner);
        send()
    }

    fn end(&self) {
        self.now().is_busy = false;
        self.changed.notify_all();
    }

    fn leave(&self) {
        self.now().is_attended = false;
        self.changed.notify_all();
    }
}

/// It opens files, and traces are made here.
const STACK: usize = 256 << 10;

impl Post {
    /// Serve a tenant at its gate, and read its log, until it has ended.
    fn attend(&self, tenant: &str, permits: &Permits, events: &Events) {
        let mut is_understood = true;
        let mut relay = Relay::new(tenant);
        if std::mem::take(&mut self.turn.now().owes) {
            let text = "the server was replaced while it opened the file; retry";
            let refused: FromGate = Err(io::Error::other(text).into());
            // An error comes again.
            let _ = self.link.send(&refused, None, false);
        }
        loop {
            let has_ended = self.wait(is_understood);
            self.turn.begin();
            self.log().pass_on();
            let told = match is_understood {
                true => self.answer(permits, events, &mut relay),
                false => Ok(()),
            };
            self.turn.end();
            match told {
                Err(error) if is_end(&error) => break,
                _ if has_ended && !is_understood => break,
                Ok(()) => {}
                Err(error) => {
                    tracing::error!(
                        "tenant '{tenant}': malformed message from its process, which can open \
                         no more files: {}",
                        cause(error)
                    );
                    is_understood = false;
                }
            }
        }
        self.log().finish();
    }

    /// Until there is something at the gate, or for the log. True: the other side has ended.
    fn wait(&self, is_understood: bool) -> bool {
        let (pipe, within) = self.log().awaited();
        let gate = match is_understood {
            true => PollFlags::IN,
            false => PollFlags::empty(),
        };
        let mut fds = vec![PollFd::from_borrowed_fd(self.link.as_fd(), gate)];
        fds.extend(pipe.as_ref().map(|pipe| PollFd::new(pipe, PollFlags::IN)));
        let within = within.and_then(|within| Timespec::try_from(within).ok());
        // What is an error comes again.
        let _ = poll(&mut fds, within.as_ref());
        fds[0].revents().contains(PollFlags::HUP)
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, permits: &Permits, events: &Events, relay: &mut Relay) -> io::Result<()> {
        match self.link.receive::<AtGate>(false)? {
            Some((AtGate::Want(wanted), with)) => {
                let got = permits.get(&wanted, with.as_ref().map(AsFd::as_fd));
                if let Err(Denied::Forbidden) = got {
                    self.log().warn(format_args!(
                        "its process was denied {wanted}, which none of its disks uses"
                    ));
                }
                let (answer, file): (FromGate, _) = match got {
                    Ok(got) => (Ok(got.path), Some(got.file)),
                    Err(denied) => (Err(denied.into()), None),
                };
                let file = file.as_ref().map(AsFd::as_fd);
                // A tenant has one request at a time, so there is room, unless it does not read.
                self.turn.answer(|| self.link.send(&answer, file, false))
            }
            Some((AtGate::Happened(happened), _)) => {
                let has = |disk: &str| permits.has(disk);
                relay.pass(happened, has, Instant::now(), |one| events.tell(one));
                Ok(())
            }
            None => Ok(()),
        }
    }
}

fn is_end(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_files::gate::Wanted;
    use fathom_testing::PATIENCE;
    use std::path::PathBuf;
    use std::time::Duration;

    #[test]
    fn what_comes_while_it_is_held_waits() {
        let (ours, theirs) = Link::pair().unwrap();
        let theirs = Link::from(theirs);
        let gate = Gate::new(ours, Log::new("a", None));
        gate.open("a", Arc::default(), Events::default()).unwrap();
        let ask = || {
            let path = "/nonexistent".into();
            let want = AtGate::Want(Wanted::Place { path });
            theirs.send(&want, None, true).unwrap();
        };
        let is_answered = |within| {
            let is = theirs.has_message(within);
            is && theirs
                .receive::<FromGate>(false)
                .is_ok_and(|got| got.is_some())
        };
        ask();
        assert!(is_answered(PATIENCE));
        gate.hold(Instant::now() + PATIENCE);
        assert!(!gate.owes_answer());
        ask();
        assert!(!is_answered(Duration::from_millis(100)));
        gate.go_on();
        assert!(is_answered(PATIENCE));
    }

    /// As for a file on a server that is gone: whoever wants to hand over does not wait for it.
    #[test]
    fn request_that_takes_too_long_is_answered_by_the_successor() {
        let (ours, theirs) = Link::pair().unwrap();
        let gate = Gate::new(ours, Log::new("a", None));
        let turn = &gate.0.turn;
        turn.begin();
        gate.hold(Instant::now());
        assert!(gate.owes_answer());
        // It is got after all, too late, and again when the handover has failed.
        let sent = std::sync::atomic::AtomicBool::new(false);
        let is_sent = || sent.load(std::sync::atomic::Ordering::SeqCst);
        std::thread::scope(|scope| {
            scope.spawn(|| turn.answer(|| sent.store(true, std::sync::atomic::Ordering::SeqCst)));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!is_sent());
            gate.go_on();
        });
        assert!(is_sent() && !gate.owes_answer());
        gate.answer_owed();
        gate.open("a", Arc::default(), Events::default()).unwrap();
        let theirs = Link::from(theirs);
        assert!(theirs.has_message(PATIENCE));
        let (answer, _) = theirs.receive::<FromGate>(false).unwrap().unwrap();
        assert!(answer.unwrap_err().text.contains("retry"));
    }

    #[test]
    fn tenant_that_reads_no_answers_does_not_hold_up_the_gate() {
        let (ours, theirs) = Link::pair().unwrap();
        let theirs = Link::from(theirs);
        let gate = Gate::new(ours, Log::new("a", None));
        gate.open("a", Arc::default(), Events::default()).unwrap();
        let path = PathBuf::from("/nonexistent/".to_owned() + &"x".repeat(4000));
        let want = AtGate::Want(Wanted::Place { path });
        let begun = Instant::now();
        // Until its own requests fill the socket, which nobody reads any more.
        while theirs.send(&want, None, false).is_ok() && begun.elapsed() < Duration::from_secs(5) {}
        gate.hold(Instant::now() + PATIENCE);
        assert!(!gate.owes_answer());
    }
}
