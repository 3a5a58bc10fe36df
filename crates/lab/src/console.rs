//! Collects a guest's serial console from its first byte and searches it for markers.

use parking_lot::{Condvar, Mutex};
use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, Result, Tail};
use crate::process::tail_of;

/// Maximum size of the collected text in bytes, which bounds memory if a guest prints endlessly.
const KEPT: usize = 8 << 20;
/// Maximum number of recorded arrival times. Text that arrives later has none.
const ARRIVALS: usize = 1 << 16;

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    text: Vec<u8>,
    /// Arrival times: the length of the text after each read, and the time of that read.
    arrivals: Vec<(usize, Instant)>,
    closed: bool,
}

/// The collected console output. A thread appends to it until the other end closes.
#[derive(Debug, Clone)]
pub struct Console {
    shared: Arc<Shared>,
}

impl Console {
    /// Starts collecting. If `FATHOM_LAB_VERBOSE` is set, all output is also copied to standard
    /// error.
    pub fn collect(mut source: impl Read + Send + 'static) -> Self {
        let shared = Arc::new(Shared::default());
        let console = Self {
            shared: Arc::clone(&shared),
        };
        let verbose = std::env::var_os("FATHOM_LAB_VERBOSE").is_some();
        std::thread::spawn(move || {
            let mut chunk = [0; 4096];
            while let Ok(n @ 1..) = source.read(&mut chunk) {
                if verbose {
                    eprint!("{}", String::from_utf8_lossy(&chunk[..n]));
                }
                let mut state = shared.state.lock();
                let room = KEPT.saturating_sub(state.text.len());
                state.text.extend_from_slice(&chunk[..n.min(room)]);
                if state.arrivals.len() < ARRIVALS {
                    let arrival = (state.text.len(), Instant::now());
                    state.arrivals.push(arrival);
                }
                drop(state);
                shared.changed.notify_all();
            }
            shared.state.lock().closed = true;
            shared.changed.notify_all();
        });
        console
    }

    /// Returns the text collected so far.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.shared.state.lock().text).into_owned()
    }

    /// Returns the current length of the text, as the `from` of a later wait.
    pub fn position(&self) -> usize {
        self.shared.state.lock().text.len()
    }

    /// Returns when the first occurrence of a marker was complete.
    pub fn seen_at(&self, marker: &str) -> Option<Instant> {
        let state = self.shared.state.lock();
        let mut windows = state.text.windows(marker.len().max(1));
        let end = windows.position(|window| window == marker.as_bytes())? + marker.len();
        let arrival = state.arrivals.partition_point(|(len, _)| *len < end);
        state.arrivals.get(arrival).map(|(_, when)| *when)
    }

    /// Returns the last lines.
    pub fn tail(&self) -> Tail {
        tail_of(&self.text())
    }

    /// Waits until the other end has closed, so that all output of a guest that has ended is
    /// collected.
    pub(crate) fn wait_end(&self, timeout: Duration) {
        let mut state = self.shared.state.lock();
        let is_open = |state: &mut State| !state.closed;
        self.shared
            .changed
            .wait_while_for(&mut state, is_open, timeout);
    }

    /// Waits for `marker` at or after position `from` and returns the rest of its line.
    ///
    /// # Errors
    /// [`Error::Timeout`] with the last lines of the console, also when the guest has ended.
    pub fn wait_for(&self, marker: &str, from: usize, timeout: Duration) -> Result<String> {
        let seen = self.wait_for_either([marker], from, timeout);
        seen.map(|(_, line)| line)
    }

    /// Waits for the first of several markers at or after position `from`. Returns the index of the
    /// marker and the rest of its line. If several are present, the first in `markers` wins.
    ///
    /// # Errors
    /// Like [`wait_for`](Self::wait_for).
    pub(crate) fn wait_for_either<const N: usize>(
        &self,
        markers: [&str; N],
        from: usize,
        timeout: Duration,
    ) -> Result<(usize, String)> {
        let deadline = Instant::now() + timeout;
        let mut state = self.shared.state.lock();
        loop {
            let text = String::from_utf8_lossy(state.text.get(from..).unwrap_or_default());
            let mut lines = markers.iter().map(|marker| line_after(&text, marker));
            if let Some(which) = lines.position(|line| line.is_some()) {
                let line = line_after(&text, markers[which]).unwrap_or_default();
                return Ok((which, line.to_owned()));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if state.closed || left.is_zero() {
                let gone = if state.closed {
                    " (the guest has ended)"
                } else {
                    ""
                };
                return Err(Error::Timeout {
                    what: format!(
                        "waiting for '{}' on the guest's console{gone}",
                        markers.join("' or '")
                    ),
                    after: timeout,
                    tail: tail_of(&String::from_utf8_lossy(&state.text)),
                });
            }
            self.shared.changed.wait_for(&mut state, left);
        }
    }
}

/// Returns the text between a marker and the end of its line, once the line is complete.
fn line_after<'a>(text: &'a str, marker: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(marker)?;
    let (line, _) = rest.split_once('\n')?;
    Some(line.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_testing::PATIENCE;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    #[test]
    fn markers_are_found_once_their_line_is_complete() {
        let (mut guest, host) = UnixStream::pair().unwrap();
        let console = Console::collect(host);
        guest.write_all(b"booting\r\nRESULT 4").unwrap();
        assert!(
            console
                .wait_for("RESULT ", 0, Duration::from_millis(30))
                .is_err()
        );
        guest.write_all(b"2\r\n").unwrap();
        assert_eq!(console.wait_for("RESULT ", 0, PATIENCE).unwrap(), "42");
        let here = console.position();
        // The two pieces arrived at different times.
        let seen = |marker| console.seen_at(marker).unwrap();
        assert!(seen("RESULT 4") < seen("RESULT 42"));
        assert_eq!(seen("boo"), seen("booting"));
        assert!(console.seen_at("RESULT 43").is_none());
        drop(guest);
        let error = console.wait_for("RESULT ", here, PATIENCE).unwrap_err();
        assert!(error.to_string().contains("RESULT 42"), "{error}");
    }
}
