//! Whether new clients are admitted.

use parking_lot::{Condvar, Mutex};

#[derive(Debug, Default)]
pub(super) struct Admission {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Open,
    /// New clients wait.
    Held,
    /// The server stops: it admits no more.
    Stopped,
}

impl Admission {
    pub(super) fn hold(&self) {
        self.set(State::Held);
    }

    /// Admits clients again after [`Admission::hold`].
    pub(super) fn open(&self) {
        self.set(State::Open);
    }

    /// Admits no more clients, whether they wait or not.
    pub(super) fn stop(&self) {
        self.set(State::Stopped);
    }

    fn set(&self, to: State) {
        let mut state = self.state.lock();
        if *state != State::Stopped {
            *state = to;
        }
        self.changed.notify_all();
    }

    /// Waits while new clients must wait. Returns false if no more are admitted.
    pub(super) fn wait(&self) -> bool {
        let mut state = self.state.lock();
        let is_held = |state: &mut State| *state == State::Held;
        self.changed.wait_while(&mut state, is_held);
        *state == State::Open
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_that_wait_are_admitted_or_not() {
        for (opens, admitted) in [(true, true), (false, false)] {
            let admission = Admission::default();
            assert!(admission.wait());
            admission.hold();
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| admission.wait());
                match opens {
                    true => admission.open(),
                    false => admission.stop(),
                }
                assert_eq!(waiting.join().unwrap(), admitted);
            });
        }
    }

    #[test]
    fn server_that_stops_admits_nobody_again() {
        let admission = Admission::default();
        admission.stop();
        admission.hold();
        assert!(!admission.wait());
        admission.open();
        assert!(!admission.wait());
    }
}
