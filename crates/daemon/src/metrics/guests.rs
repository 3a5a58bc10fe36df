//! Who the front-ends are, read once of each that comes.
//!
//! A process can have whoever reads its arguments wait for as long as it likes (they are in its memory,
//! whose pages it may hold back). So each is read on a thread of its own, and waited for but shortly.

use super::guest::Guest;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

/// Arguments are in memory: whoever needs longer to show them holds them back.
const DEADLINE: Duration = Duration::from_millis(100);
/// Reads that do not end; more are not begun.
const MOST_STUCK: usize = 64;
/// Disks whose front-ends are known; with more, all are read again.
const MOST_KNOWN: usize = 4096;

/// Those of all disks of this process.
pub static GUESTS: LazyLock<Guests> = LazyLock::new(|| Guests::new(Guest::of));

/// A front-end's process, and how many have come before it.
type Which = (i32, u64);

pub struct Guests {
    read: fn(i32) -> Guest,
    /// By the disk's name.
    known: Mutex<HashMap<String, (Which, Guest)>>,
    reading: Arc<AtomicUsize>,
}

impl Guests {
    fn new(read: fn(i32) -> Guest) -> Guests {
        Guests {
            read,
            known: Mutex::default(),
            reading: Arc::default(),
        }
    }

    /// Who has the disk: the front-end of that process, the so-manieth that has come. Of one that does
    /// not show its arguments nothing but its process is known.
    pub fn of(&self, disk: &str, pid: i32, nth: u64) -> Guest {
        let key = (pid, nth);
        let known = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, guest)) = known().get(disk).filter(|(of, _)| *of == key) {
            return guest.clone();
        }
        let guest = self.ask(pid).unwrap_or_else(|| Guest::unknown(pid));
        let mut known = known();
        if known.len() >= MOST_KNOWN {
            known.clear();
        }
        known.insert(disk.to_owned(), (key, guest.clone()));
        guest
    }

    fn ask(&self, pid: i32) -> Option<Guest> {
        let reading = Arc::clone(&self.reading);
        if reading.fetch_add(1, Ordering::Relaxed) >= MOST_STUCK {
            reading.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        let (tell, told) = mpsc::sync_channel(1);
        let read = self.read;
        let ended = Arc::clone(&reading);
        let begun = thread::Builder::new()
            .name("guest".to_owned())
            .spawn(move || {
                let guest = read(pid);
                ended.fetch_sub(1, Ordering::Relaxed);
                // Nobody may wait for it any more.
                let _ = tell.send(guest);
            });
        if begun.is_err() {
            reading.fetch_sub(1, Ordering::Relaxed);
        }
        told.recv_timeout(DEADLINE).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: i32 = 7;

    /// One of them never shows who it is.
    fn read(pid: i32) -> Guest {
        if pid == HOSTILE {
            loop {
                thread::park();
            }
        }
        Guest::of(0)
    }

    #[test]
    fn one_that_holds_its_arguments_back_is_waited_for_but_shortly() {
        let guests = Guests::new(read);
        for nth in 0..MOST_STUCK as u64 + 1 {
            assert_eq!(guests.of("a", HOSTILE, nth), Guest::unknown(HOSTILE));
            assert_eq!(guests.of("a", HOSTILE, nth), Guest::unknown(HOSTILE));
        }
        // No thread for the last.
        assert_eq!(guests.reading.load(Ordering::Relaxed), MOST_STUCK);
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
        assert_eq!(guests.reading.load(Ordering::Relaxed), 0);
    }
}
