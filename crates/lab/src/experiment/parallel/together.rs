//! Appliances that are up at the same time: all start at once, and none closes before all are up.

use parking_lot::RwLock;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::evidence::{self, Newcomers, Watched};
use crate::guest::Guest;
use crate::machine::Machine;

/// The life of each appliance.
pub struct Life<'a> {
    /// Work to do when the guest has booted. The appliance is up when the work is done.
    pub work: &'a (dyn Fn(&mut Guest) -> Result<()> + Sync),
    /// Gets each QEMU as soon as it runs.
    pub newcomers: Newcomers,
}

/// Results of the appliances.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Times from the first start until each appliance was up, for those that came up.
    pub up: Vec<Duration>,
    /// Time from the first order to close until the last appliance has ended.
    pub closing: Duration,
    /// Why the others did not come up or did not close, one line each.
    pub failures: Vec<String>,
}

/// An appliance that is up.
struct Up {
    pid: u32,
    after: Duration,
}

impl Outcome {
    /// Returns the time from the first start until the last appliance was up.
    pub fn all_up(&self) -> Duration {
        self.up.iter().max().copied().unwrap_or_default()
    }
}

/// Starts all machines. When each is up or has failed, calls `at_barrier` with the process IDs of
/// the running QEMUs; then all machines close.
pub fn run(machines: &[Machine], life: &Life, at_barrier: impl FnOnce(&[u32])) -> Outcome {
    let barrier = RwLock::new(());
    let mut outcome = Outcome::default();
    thread::scope(|scope| {
        // Appliances that are up wait until this guard is dropped.
        let closed = barrier.write();
        let begin = Instant::now();
        let start = |machine| {
            let (tell, told) = mpsc::channel();
            let barrier = &barrier;
            (
                told,
                scope.spawn(move || live(machine, life, begin, &tell, barrier)),
            )
        };
        let (told, threads): (Vec<_>, Vec<_>) = machines.iter().map(start).unzip();
        let mut pids = Vec::new();
        for (number, told) in (1..).zip(told) {
            match told.recv() {
                Ok(Ok(up)) => {
                    outcome.up.push(up.after);
                    pids.push(up.pid);
                }
                Ok(Err(error)) => outcome.failures.push(said(number, &error)),
                Err(_) => {} // the thread has panicked
            }
        }
        at_barrier(&pids);
        let begin = Instant::now();
        drop(closed);
        for (number, thread) in (1..).zip(threads) {
            let end = thread.join();
            if let Err(error) = end.unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
                outcome.failures.push(said(number, &error));
            }
        }
        outcome.closing = begin.elapsed();
    });
    outcome
}

/// Runs one appliance. QEMU is killed when the thread that has started it ends.
fn live(
    machine: &Machine,
    life: &Life,
    begin: Instant,
    tell: &Sender<Result<Up>>,
    barrier: &RwLock<()>,
) -> Result<()> {
    let up = Guest::start(machine).and_then(|mut guest| {
        let qemu = Watched::new(guest.pid(), evidence::Kind::Qemu);
        life.newcomers.watch(qemu);
        guest.wait_ready(0)?;
        (life.work)(&mut guest)?;
        Ok(guest)
    });
    let after = begin.elapsed();
    let (told, guest) = match up {
        Ok(guest) => {
            let pid = guest.pid();
            (Ok(Up { pid, after }), Some(guest))
        }
        Err(error) => (Err(error), None),
    };
    let _ = tell.send(told); // fails only if the receiver has panicked
    drop(barrier.read());
    guest.map_or(Ok(()), |mut guest| guest.quit())
}

fn said(number: usize, error: &Error) -> String {
    format!("appliance {number}: {}", reason(error))
}

/// Returns an error in one line, with the last line of a program's output.
pub fn reason(error: &Error) -> String {
    let text = error.to_string();
    let first = text.lines().next().unwrap_or_default();
    let Error::Program { tail, .. } = error else {
        return first.to_owned();
    };
    // The rest is the guest's console.
    let own = { tail.0.lines() }.take_while(|line| !line.starts_with("-- "));
    match own.last() {
        Some(last) => format!("{first}: {last}"),
        None => first.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Tail;

    #[test]
    fn a_failure_is_told_in_a_line() {
        let tail = "warning: old\nqemu: cannot set up guest memory\n-- console --\nBooting";
        let program = |tail: &str| Error::Program {
            program: "QEMU".into(),
            status: "exit status: 1".into(),
            tail: Tail(tail.into()),
        };
        assert_eq!(
            said(3, &program(tail)),
            "appliance 3: QEMU failed (exit status: 1): qemu: cannot set up guest memory"
        );
        let late = Error::Timeout {
            what: "waiting for the guest to boot".into(),
            after: Duration::from_secs(9),
            tail: Tail("one\ntwo".into()),
        };
        assert_eq!(
            reason(&late),
            "waiting for the guest to boot: nothing after 9 s"
        );
        assert!(reason(&program("")).ends_with("(exit status: 1)"));
    }
}
