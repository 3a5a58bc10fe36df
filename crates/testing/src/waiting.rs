//! Waits for events in tests. All waits have the same timeout, which only a hang reaches.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Timeout for an event in a test. Many times longer than any event takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(180);
/// Interval between two polls.
const LOOK: Duration = Duration::from_millis(2);

/// Deadline of a wait.
#[derive(Debug)]
pub struct Deadline<'a> {
    what: &'a str,
    at: Instant,
}

impl<'a> Deadline<'a> {
    /// Starts a wait. `what` names the event, and completes the message `waited in vain for`.
    #[must_use]
    pub fn new(what: &'a str) -> Deadline<'a> {
        let at = Instant::now() + PATIENCE;
        Deadline { what, at }
    }

    /// Panics if the deadline has passed.
    ///
    /// # Panics
    /// If the deadline has passed. The message contains [the states of all threads](threads_of).
    pub fn check(&self) {
        if Instant::now() > self.at {
            let threads = threads_of(std::process::id());
            panic!("waited in vain for {}\n{threads}", self.what);
        }
    }

    /// Like [`check`](Deadline::check); `seen` returns the last observation for the message.
    ///
    /// # Panics
    /// If the deadline has passed. The message contains `seen` and [the states of all
    /// threads](threads_of).
    pub fn check_with(&self, seen: impl FnOnce() -> String) {
        if Instant::now() > self.at {
            let (seen, threads) = (seen(), threads_of(std::process::id()));
            panic!("waited in vain for {}\n{seen}\n{threads}", self.what);
        }
    }

    /// Sleeps until the next poll.
    ///
    /// # Panics
    /// Like [`check`](Deadline::check).
    pub fn pause(&self) {
        self.check();
        sleep(LOOK);
    }
}

/// Polls `probe` until it returns a value, and returns that value.
///
/// # Panics
/// After [`PATIENCE`]. The message contains [the states of all threads](threads_of).
pub fn eventually<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let deadline = Deadline::new(what);
    loop {
        if let Some(found) = probe() {
            return found;
        }
        deadline.pause();
    }
}

/// Polls `is_so` until it returns `true`.
///
/// # Panics
/// Like [`eventually`].
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    eventually(what, || is_so().then_some(()));
}

/// Describes all threads of a process and of its descendants, one line per thread. A line contains
/// the thread's state, wait channel, system call and, if readable, kernel stack.
#[must_use]
pub fn threads_of(process: u32) -> String {
    let mut said = String::new();
    let mut processes = vec![process];
    while let Some(process) = processes.pop() {
        let dir = Path::new("/proc").join(process.to_string());
        let _ = writeln!(said, "{process}: {:.300}", line(&dir.join("cmdline")));
        for task in fs::read_dir(dir.join("task"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let of = |name| line(&task.path().join(name));
            let stat = of("stat");
            let state = stat
                .rsplit_once(") ")
                .map_or("gone", |(_, rest)| &rest[..1]);
            let (name, at, call, stack) = (of("comm"), of("wchan"), of("syscall"), of("stack"));
            let _ = writeln!(said, "    {name}{state} in {at}: {call}{stack}");
            let children = of("children");
            let children = children.split_whitespace();
            processes.extend(children.filter_map(|pid| pid.parse::<u32>().ok()));
        }
    }
    said
}

/// Reads a file of /proc as a single line. Returns an empty string if the file cannot be read.
fn line(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&bytes).replace(['\0', '\n'], " ")
}

#[cfg(test)]
mod tests {
    use super::{threads_of, until};
    use std::process::{Command, Stdio};

    #[test]
    fn threads_of_children_are_told() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let process = format!("\n{}: cat", child.id());
        // The child has the name and the command line of this program until it calls exec.
        until("a process and a thread of cat", || {
            let said = threads_of(std::process::id());
            said.contains(&process) && said.contains("    cat S in ")
        });
        drop(child.stdin.take());
        child.wait().unwrap();
    }
}
