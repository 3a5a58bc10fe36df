//! How tests wait: for events, with one limit for all of them, which only a hang reaches.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long a test waits for an event. Many times what it takes on a machine that is busy with other things.
pub const PATIENCE: Duration = Duration::from_secs(180);
/// Time between two looks at what is waited for.
const LOOK: Duration = Duration::from_millis(2);

/// The end of a wait.
#[derive(Debug)]
pub struct Deadline<'a> {
    what: &'a str,
    at: Instant,
}

impl<'a> Deadline<'a> {
    /// For a wait that begins now; `what` completes "waited in vain for".
    #[must_use]
    pub fn new(what: &'a str) -> Deadline<'a> {
        let at = Instant::now() + PATIENCE;
        Deadline { what, at }
    }

    /// # Panics
    /// If the time is over, with [what all threads do](threads_of).
    pub fn check(&self) {
        if Instant::now() > self.at {
            let threads = threads_of(std::process::id());
            panic!("waited in vain for {}\n{threads}", self.what);
        }
    }

    /// Like [`check`](Deadline::check); `seen` adds what the last look showed.
    ///
    /// # Panics
    /// If the time is over, with that and [what all threads do](threads_of).
    pub fn check_with(&self, seen: impl FnOnce() -> String) {
        if Instant::now() > self.at {
            let (seen, threads) = (seen(), threads_of(std::process::id()));
            panic!("waited in vain for {}\n{seen}\n{threads}", self.what);
        }
    }

    /// Sleeps until it is time to look again.
    ///
    /// # Panics
    /// Like [`check`](Deadline::check).
    pub fn pause(&self) {
        self.check();
        sleep(LOOK);
    }
}

/// Waits until `probe` finds what it looks for, and returns that.
///
/// # Panics
/// After [`PATIENCE`], with [what all threads do](threads_of).
pub fn eventually<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let deadline = Deadline::new(what);
    loop {
        if let Some(found) = probe() {
            return found;
        }
        deadline.pause();
    }
}

/// Waits until `is_so`.
///
/// # Panics
/// Like [`eventually`].
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    eventually(what, || is_so().then_some(()));
}

/// All threads of a process and of its descendants, a line each: state, place in the kernel, system call and, where
/// that may be read, kernel stack.
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

/// A file of /proc on one line; nothing if it cannot be read.
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
