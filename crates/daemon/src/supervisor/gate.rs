//! Who opens things for a tenant: a thread at its gate.

use super::permits::Permits;
use crate::events::Events;
use crate::link::{AtGate, FromGate, Link};
use crate::signals::LeftToThisThread;
use rustix::event::{PollFd, PollFlags, poll};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// A tenant's gate, which is attended until the tenant has ended.
pub struct Gate {
    link: Arc<Link>,
    turn: Arc<Turn>,
}

impl Gate {
    pub fn new(link: Link) -> Gate {
        Gate {
            link: Arc::new(link),
            turn: Arc::default(),
        }
    }

    /// Serve this tenant from now on, by what it may have.
    pub fn open(&self, tenant: &str, permits: Arc<Permits>, events: Events) -> io::Result<()> {
        let _signals = LeftToThisThread::new();
        let (link, turn) = (self.link.clone(), self.turn.clone());
        let tenant = tenant.to_owned();
        let thread = std::thread::Builder::new().name("gate".into());
        thread
            .stack_size(STACK)
            .spawn(move || attend(&tenant, &link, &turn, &permits, &events))?;
        Ok(())
    }

    /// Take nothing in from now on, until [`Gate::go_on`]: what comes waits in the socket. False: what
    /// was taken in is not answered until `deadline`.
    pub fn hold(&self, deadline: Instant) -> bool {
        let mut now = self.turn.now();
        now.is_held = true;
        let left = deadline.saturating_duration_since(Instant::now());
        let is_busy = |now: &mut Now| now.is_busy;
        let waited = self.turn.changed.wait_timeout_while(now, left, is_busy);
        let (now, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !now.is_busy
    }

    pub fn go_on(&self) {
        self.turn.now().is_held = false;
        self.turn.changed.notify_all();
    }
}

/// For a successor of this supervisor.
impl AsFd for Gate {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.link.as_fd()
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
}

impl Turn {
    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self) {
        let is_held = |now: &mut Now| now.is_held;
        let waited = self.changed.wait_while(self.now(), is_held);
        waited.unwrap_or_else(PoisonError::into_inner).is_busy = true;
    }

    fn end(&self) {
        self.now().is_busy = false;
        self.changed.notify_all();
    }
}

/// It opens files, and traces are made here.
const STACK: usize = 256 << 10;

/// Serve a tenant at its gate, until it has ended.
fn attend(tenant: &str, gate: &Link, turn: &Turn, permits: &Permits, events: &Events) {
    loop {
        // What is an error comes again.
        let _ = poll(
            &mut [PollFd::from_borrowed_fd(gate.as_fd(), PollFlags::IN)],
            None,
        );
        turn.begin();
        let told = answer(gate, permits, events);
        turn.end();
        match told {
            Ok(()) => {}
            Err(error) if is_end(&error) => return,
            Err(error) => return tracing::error!("tenant '{tenant}' is not understood: {error}"),
        }
    }
}

fn answer(gate: &Link, permits: &Permits, events: &Events) -> io::Result<()> {
    match gate.receive::<AtGate>(false)? {
        Some((AtGate::Want(wanted), with)) => {
            let got = permits.get(&wanted, with.as_ref().map(AsFd::as_fd));
            let (answer, file): (FromGate, _) = match got {
                Ok(got) => (Ok(got.path), Some(got.file)),
                Err(refused) => (Err(refused), None),
            };
            gate.send(&answer, file.as_ref().map(AsFd::as_fd), true)
        }
        Some((AtGate::Happened(happened), _)) => {
            // Only what it can know.
            if happened.disk().is_none_or(|disk| permits.has(disk)) {
                events.tell(happened);
            }
            Ok(())
        }
        None => Ok(()),
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
    use std::time::Duration;

    #[test]
    fn what_comes_while_it_is_held_waits() {
        let (ours, theirs) = Link::pair().unwrap();
        let theirs = Link::from(theirs);
        let gate = Gate::new(ours);
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
        assert!(is_answered(Duration::from_secs(60)));
        assert!(gate.hold(Instant::now() + Duration::from_secs(60)));
        ask();
        assert!(!is_answered(Duration::from_millis(100)));
        gate.go_on();
        assert!(is_answered(Duration::from_secs(60)));
    }
}
