//! The supervisor's end of a tenant's gate: a thread that opens files for the tenant, and reads its
//! log.

use super::log::Log;
use super::permits::{Denied, Permits};
use super::relayed::Relay;
use fathom_host::link::{AtGate, FromGate, Link};
use fathom_host::signals::LeftToThisThread;
use fathom_metrics::Events;
use fathom_sockets::Descriptors;
use fathom_units::cause;
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time that [`Gate::finish`] waits for the tenant's last log lines. A thread that is opening a
/// file reads none.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// A tenant's gate, which a thread serves until the tenant has ended.
pub struct Gate(Arc<Post>);

/// State that the thread shares with the supervisor.
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

    /// Starts the thread that serves the tenant, with these permissions.
    pub fn open(&self, tenant: &str, permits: Arc<Permits>, events: Events) -> io::Result<()> {
        let _signals = LeftToThisThread::begin();
        let post = self.0.clone();
        let tenant = tenant.to_owned();
        let thread = std::thread::Builder::new().name("gate".into());
        self.0.turn.now.lock().is_attended = true;
        let started = thread.stack_size(STACK).spawn(move || {
            post.attend(&tenant, &permits, &events);
            post.turn.leave();
        });
        started.map(drop).inspect_err(|_| self.0.turn.leave())
    }

    /// Stops receiving requests until [`Gate::go_on`], so that they wait in the socket. A request
    /// in progress gets no reply after `deadline` while the gate is held: [`Gate::owes_answer`]
    /// then returns true.
    pub fn hold(&self, deadline: Instant) {
        self.0.turn.now.lock().is_held = true;
        let left = deadline.saturating_duration_since(Instant::now());
        let mut now = self.0.turn.wait_while(left, |now| now.is_busy);
        now.is_late = now.is_busy;
    }

    /// Whether a request gets no reply while the gate is held. A successor replies to it with an
    /// error.
    pub fn owes_answer(&self) -> bool {
        self.0.turn.now.lock().is_late
    }

    /// Records that a predecessor owes the tenant a reply.
    pub fn answer_owed(&self) {
        self.0.turn.now.lock().owes = true;
    }

    pub fn go_on(&self) {
        let mut now = self.0.turn.now.lock();
        now.is_held = false;
        now.is_late = false;
        self.0.turn.changed.notify_all();
    }

    /// Waits until the thread has passed on the last lines of a tenant that has ended, with a short
    /// timeout.
    pub fn finish(&self) {
        drop(self.0.turn.wait_while(LAST_WORDS, |now| now.is_attended));
    }

    /// Returns the gate and the log for a successor of this supervisor. The gate must be held.
    pub fn hand_over(&self, files: &mut Descriptors) -> io::Result<(usize, Option<usize>)> {
        let log = self.0.log.lock().hand_over();
        Ok((files.add(&self.0.link)?, files.add_any(log.as_ref())?))
    }
}

/// Whether the thread may receive a request or send a reply.
#[derive(Default)]
struct Turn {
    now: Mutex<Now>,
    changed: Condvar,
}

#[derive(Default)]
struct Now {
    is_held: bool,
    /// A request has been received, and has no reply yet.
    is_busy: bool,
    /// The request took too long, and gets no reply while the gate is held.
    is_late: bool,
    /// A predecessor has received a request, and has not replied.
    owes: bool,
    /// The thread runs.
    is_attended: bool,
}

impl Turn {
    fn wait_while(
        &self,
        most: Duration,
        mut waits: impl FnMut(&Now) -> bool,
    ) -> MutexGuard<'_, Now> {
        let mut now = self.now.lock();
        self.changed
            .wait_while_for(&mut now, |now| waits(now), most);
        now
    }

    fn begin(&self) {
        let mut now = self.now.lock();
        self.changed.wait_while(&mut now, |now| now.is_held);
        now.is_busy = true;
    }

    /// Calls `send` as soon as a reply may be sent.
    fn answer<T>(&self, send: impl FnOnce() -> T) -> T {
        let mut now = self.now.lock();
        self.changed.wait_while(&mut now, |now| now.is_late);
        send()
    }

    fn end(&self) {
        self.now.lock().is_busy = false;
        self.changed.notify_all();
    }

    fn leave(&self) {
        self.now.lock().is_attended = false;
        self.changed.notify_all();
    }
}

/// The thread opens files and creates traces, so it needs a stack of this many bytes.
const STACK: usize = 256 << 10;

impl Post {
    /// Serves the tenant's requests and reads its log, until the tenant has ended.
    fn attend(&self, tenant: &str, permits: &Permits, events: &Events) {
        let mut is_understood = true;
        let mut relay = Relay::new(tenant);
        if std::mem::take(&mut self.turn.now.lock().owes) {
            let text = "the server was replaced while it opened the file; retry";
            let refused: FromGate = Err(io::Error::other(text).into());
            // (A broken connection is noticed below.)
            let _ = self.link.send(&refused, None, false);
        }
        loop {
            let has_ended = self.wait(is_understood);
            self.turn.begin();
            self.log.lock().pass_on();
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
        self.log.lock().finish();
    }

    /// Waits for a message at the gate, or until the log has work to do. True: the tenant has
    /// closed the gate.
    fn wait(&self, is_understood: bool) -> bool {
        let (pipe, within) = self.log.lock().awaited();
        let gate = match is_understood {
            true => PollFlags::IN,
            false => PollFlags::empty(),
        };
        let mut fds = vec![PollFd::from_borrowed_fd(self.link.as_fd(), gate)];
        fds.extend(pipe.as_ref().map(|pipe| PollFd::new(pipe, PollFlags::IN)));
        let within = within.and_then(|within| Timespec::try_from(within).ok());
        // (The next call of `poll` reports an error again.)
        let _ = poll(&mut fds, within.as_ref());
        fds[0].revents().contains(PollFlags::HUP)
    }

    fn answer(&self, permits: &Permits, events: &Events, relay: &mut Relay) -> io::Result<()> {
        match self.link.receive::<AtGate>(false)? {
            Some((AtGate::Want(wanted), with)) => {
                let got = permits.get(&wanted, with.as_ref().map(AsFd::as_fd));
                if let Err(Denied::Forbidden) = got {
                    self.log.lock().warn(format_args!(
                        "its process was denied {wanted}, which none of its disks uses"
                    ));
                }
                let (answer, file): (FromGate, _) = match got {
                    Ok(got) => (Ok(got.path), Some(got.file)),
                    Err(denied) => (Err(denied.into()), None),
                };
                let file = file.as_ref().map(AsFd::as_fd);
                // A tenant has one request at a time, so the socket has room for the reply, unless
                // the tenant does not read.
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

    /// An example is a file on a server that is down: a handover does not wait for that file.
    #[test]
    fn request_that_takes_too_long_is_answered_by_the_successor() {
        let (ours, theirs) = Link::pair().unwrap();
        let gate = Gate::new(ours, Log::new("a", None));
        let turn = &gate.0.turn;
        turn.begin();
        gate.hold(Instant::now());
        assert!(gate.owes_answer());
        // The file is opened in the end, and the reply is sent when the handover has failed.
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
        // The tenant sends requests until they fill the socket, because the gate does not read them
        // any more.
        while theirs.send(&want, None, false).is_ok() && begun.elapsed() < Duration::from_secs(5) {}
        gate.hold(Instant::now() + PATIENCE);
        assert!(!gate.owes_answer());
    }
}
