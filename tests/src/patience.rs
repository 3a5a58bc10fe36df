//! Ends a test program in which a test hangs, and reports where the test hangs.
//!
//! A timeout of the whole run would report nothing.

use std::collections::HashMap;
use std::io::Write;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

/// Time after which a test counts as hanging: many times that of the longest one.
const PATIENCE: Duration = Duration::from_secs(30 * 60);
const LOOK: Duration = Duration::from_secs(5);

/// Name and start of each running test, by the thread that runs it.
static RUNNING: Mutex<Option<HashMap<ThreadId, (String, Instant)>>> = Mutex::new(None);

thread_local! {
    static WATCHED: Watched = Watched::begin();
}

/// Watches the test of this thread, which must end within [`PATIENCE`].
pub(crate) fn watch() {
    WATCHED.with(|_| {});
}

/// A test that is watched until its thread ends.
struct Watched;

impl Watched {
    fn begin() -> Watched {
        static WATCHER: Once = Once::new();
        WATCHER.call_once(|| {
            thread::spawn(look_again_and_again);
        });
        let thread = thread::current();
        // With a single thread for all tests, the main thread runs them, and no test ends it.
        if let Some(name) = thread.name().filter(|name| *name != "main") {
            let begun = (name.to_owned(), Instant::now());
            running().get_or_insert_default().insert(thread.id(), begun);
        }
        Watched
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let id = thread::current().id();
        running().as_mut().map(|tests| tests.remove(&id));
    }
}

fn running() -> MutexGuard<'static, Option<HashMap<ThreadId, (String, Instant)>>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn look_again_and_again() {
    loop {
        thread::sleep(LOOK);
        let tests = running();
        let hangs = |(_, since): &&(String, Instant)| since.elapsed() > PATIENCE;
        let Some((name, _)) = tests.iter().flat_map(HashMap::values).find(hangs) else {
            continue;
        };
        // Tests capture the output of print macros, which would be lost with this process.
        let said = format!(
            "{name} hangs. What waits for what:\n{}",
            fathom_testing::threads_of(std::process::id())
        );
        let _ = std::io::stderr().write_all(said.as_bytes());
        std::process::exit(101);
    }
}
