//! Identities of front-ends, read once for each connection.
//!
//! A process can delay any reader of its arguments for any time: they are in its memory, whose
//! pages it can hold back. Therefore the arguments of each process are read on a thread of their
//! own, for which the caller waits only briefly.

use super::guest::Guest;
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, LazyLock, mpsc};
use std::thread;
use std::time::Duration;

/// Maximum wait for a process's arguments, which are normally in memory.
const DEADLINE: Duration = Duration::from_millis(100);
/// Maximum number of reads in progress, which may be stuck.
const MOST_STUCK: usize = 64;
/// Maximum number of disks whose front-ends are cached; beyond that, all are read again.
const MOST_KNOWN: usize = 4096;

/// The guests of all disks of this process.
pub static GUESTS: LazyLock<Guests> = LazyLock::new(|| Guests::new(Guest::of));

/// A front-end's process ID, and the number of earlier connections.
type Which = (i32, u64);

pub struct Guests {
    read: fn(i32) -> Guest,
    /// The known guests, by the disk's name.
    known: Mutex<HashMap<String, (Which, Guest)>>,
    /// Processes whose arguments are being read.
    reading: Arc<Mutex<BTreeSet<i32>>>,
}

impl Guests {
    fn new(read: fn(i32) -> Guest) -> Guests {
        Guests {
            read,
            known: Mutex::default(),
            reading: Arc::default(),
        }
    }

    /// Returns the guest of a disk: the process `pid`, whose connection is number `nth`.
    ///
    /// While the process does not show its arguments, only its process ID is known.
    pub fn of(&self, disk: &str, pid: i32, nth: u64) -> Guest {
        let key = (pid, nth);
        if let Some((_, guest)) = locked(&self.known).get(disk).filter(|(of, _)| *of == key) {
            return guest.clone();
        }
        let Some(guest) = self.ask(pid) else {
            return Guest::unknown(pid);
        };
        let mut known = locked(&self.known);
        if known.len() >= MOST_KNOWN {
            known.clear();
        }
        known.insert(disk.to_owned(), (key, guest.clone()));
        guest
    }

    fn ask(&self, pid: i32) -> Option<Guest> {
        {
            let mut reading = locked(&self.reading);
            if reading.len() >= MOST_STUCK || !reading.insert(pid) {
                return None;
            }
        }
        let (tell, told) = mpsc::sync_channel(1);
        let (read, reading) = (self.read, Arc::clone(&self.reading));
        let thread = thread::Builder::new().name("guest".to_owned());
        let begun = thread.spawn(move || {
            let guest = read(pid);
            locked(&reading).remove(&pid);
            // The caller may have stopped waiting.
            let _ = tell.send(guest);
        });
        if begun.is_err() {
            locked(&self.reading).remove(&pid);
        }
        told.recv_timeout(DEADLINE).ok()
    }
}

fn locked<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Instant;

    /// Processes from this ID on never show their arguments.
    const HOSTILE: i32 = 1000;

    fn read(pid: i32) -> Guest {
        if pid >= HOSTILE {
            loop {
                thread::park();
            }
        }
        named()
    }

    fn named() -> Guest {
        Guest::of(0)
    }

    #[test]
    fn process_without_arguments_is_waited_for_once() {
        let guests = Guests::new(read);
        let started = Instant::now();
        for nth in 0..1000 {
            assert_eq!(guests.of("a", HOSTILE, nth), Guest::unknown(HOSTILE));
        }
        assert_eq!(locked(&guests.reading).len(), 1);
        assert!(started.elapsed() < 100 * DEADLINE);
        // Other processes are still identified.
        assert_eq!(guests.of("b", 1, 0), named());
    }

    #[test]
    fn there_are_never_more_threads_than_that() {
        let guests = Guests::new(read);
        for pid in HOSTILE..HOSTILE + MOST_STUCK as i32 + 1 {
            assert_eq!(guests.of("a", pid, 0), Guest::unknown(pid));
        }
        assert_eq!(locked(&guests.reading).len(), MOST_STUCK);
    }

    #[test]
    fn one_that_was_too_slow_is_known_later() {
        static SLOW: Mutex<()> = Mutex::new(());
        let guests = Guests::new(|_| {
            drop(locked(&SLOW));
            named()
        });
        let held = locked(&SLOW);
        assert_eq!(guests.of("a", 1, 0), Guest::unknown(1));
        drop(held);
        fathom_testing::until("the guest's name", || guests.of("a", 1, 0) == named());
    }

    #[test]
    fn each_is_read_once_and_again_when_another_comes() {
        static READS: AtomicUsize = AtomicUsize::new(0);
        let guests = Guests::new(|pid| {
            READS.fetch_add(1, Ordering::Relaxed);
            Guest::unknown(pid)
        });
        for (disk, pid, nth, reads) in [
            ("a", 1, 0, 1),
            ("a", 1, 0, 1),
            ("b", 1, 0, 2),
            ("a", 1, 1, 3),
            ("a", 2, 1, 4),
        ] {
            assert_eq!(guests.of(disk, pid, nth), Guest::unknown(pid));
            assert_eq!(READS.load(Ordering::Relaxed), reads);
        }
        assert!(locked(&guests.reading).is_empty());
    }
}
