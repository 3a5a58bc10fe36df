//! Limits repeated log lines.
//!
//! A failing client, front-end or disk can cause any number of log lines. This module, and no
//! other, suppresses most of them: in each [`WINDOW`] some similar lines are written, and then the
//! number of suppressed ones.

use fathom_core::{ThreadKind, thread_starts};
use fathom_units::redacted;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fmt::{self, Debug, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// Window in which at most [`LINES`] similar lines are written.
const WINDOW: Duration = Duration::from_secs(10);
const LINES: u64 = 20;

/// Maximum number of different kinds of lines per place in the code.
///
/// Because of this maximum, a peer that can choose the words of a line cannot evade the limit.
const KINDS: usize = 8;

/// Target of messages that are never suppressed: the start and the end of the server.
const ALWAYS: &str = "fathom_daemon::daemon";

/// A layer of the log that suppresses repeated lines.
#[derive(Clone, Default)]
pub struct Repeats(Arc<Mutex<Window>>);

#[derive(Default)]
struct Window {
    begun: Option<Instant>,
    places: HashMap<Identifier, Vec<Kind>>,
    /// Whether a thread will report the suppressed lines when the window ends.
    will_tell: bool,
}

/// Similar lines: from one place in the code, with the same words except for numbers.
struct Kind {
    /// Hash of the words. `None`: all kinds for which there was no room.
    words: Option<u64>,
    seen: u64,
    /// The first suppressed line.
    first: Option<(Level, String)>,
}

impl Repeats {
    /// Returns whether to write the line. If not, the line is counted.
    fn admit(&self, event: &Event<'_>) -> bool {
        let level = *event.metadata().level();
        let target = event.metadata().target();
        if level > Level::INFO || target == ALWAYS || target == module_path!() {
            return true;
        }
        let mut window = self.0.lock();
        window.renew();
        let kind = window.kind(event);
        kind.seen += 1;
        if kind.seen <= LINES {
            return true;
        }
        if kind.first.is_none() {
            kind.first = Some((level, message_of(event)));
        }
        if !window.will_tell {
            let repeats = self.clone();
            let thread = std::thread::Builder::new().name("log".into());
            // If the thread cannot be started, the next suppressed line tries again.
            let told = thread.spawn(move || {
                thread_starts(ThreadKind::Log);
                repeats.tell_later();
            });
            window.will_tell = told.is_ok();
        }
        false
    }

    fn tell_later(&self) {
        std::thread::sleep(WINDOW);
        self.tell();
    }

    /// Reports the suppressed lines now.
    pub fn tell(&self) {
        let mut window = self.0.lock();
        let lasted = window
            .begun
            .take()
            .map_or(Duration::ZERO, |begun| begun.elapsed());
        let places = std::mem::take(&mut window.places);
        window.will_tell = false;
        drop(window);
        let seconds = lasted.as_secs().max(1);
        for kind in places.into_values().flatten() {
            let Some((level, text)) = kind.first else {
                continue;
            };
            let more = match kind.seen - LINES - 1 {
                0 => String::new(),
                more => format!(" (and {more} more like this in the last {seconds} s)"),
            };
            match level {
                Level::ERROR => tracing::error!("{text}{more}"),
                Level::WARN => tracing::warn!("{text}{more}"),
                _ => tracing::info!("{text}{more}"),
            }
        }
    }
}

impl Window {
    /// Begins a new window if this one is over and has no suppressed lines to report.
    fn renew(&mut self) {
        let is_over = self.begun.is_none_or(|begun| begun.elapsed() >= WINDOW);
        let all_told = || {
            let mut kinds = self.places.values().flatten();
            kinds.all(|kind| kind.first.is_none())
        };
        if is_over && all_told() {
            self.places.clear();
            self.begun = Some(Instant::now());
        }
    }

    fn kind(&mut self, event: &Event<'_>) -> &mut Kind {
        let mut words = Words(0xcbf2_9ce4_8422_2325);
        event.record(&mut Message(&mut words));
        let kinds = self.places.entry(event.metadata().callsite()).or_default();
        let known = kinds.iter().position(|kind| kind.words == Some(words.0));
        let index = known.unwrap_or(kinds.len().min(KINDS));
        if index == kinds.len() {
            kinds.push(Kind {
                words: (index < KINDS).then_some(words.0),
                seen: 0,
                first: None,
            });
        }
        &mut kinds[index]
    }
}

impl<S: Subscriber> Layer<S> for Repeats {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        self.admit(event)
    }
}

/// Returns the text of an event.
pub fn message_of(event: &Event<'_>) -> String {
    let mut text = String::new();
    event.record(&mut Message(&mut text));
    redacted(&text).into_owned()
}

/// A visitor that writes an event's text to a writer.
struct Message<'a, W>(&'a mut W);

impl<W: Write> Visit for Message<'_, W> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            // These writers never fail.
            let _ = write!(self.0, "{value:?}");
        }
    }
}

/// An FNV-1a hash of the text except for hexadecimal digits, and so numbers and addresses.
struct Words(u64);

impl Write for Words {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes().filter(|b| !b.is_ascii_hexdigit()) {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use tracing_subscriber::layer::SubscriberExt;

    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Returns the lines that are written while `work` logs.
    fn lines(work: impl FnOnce(&Repeats)) -> Vec<String> {
        let (log, repeats) = (Log::default(), Repeats::default());
        let writer = log.clone();
        let lines = tracing_subscriber::fmt()
            .with_ansi(false)
            .without_time()
            .with_target(false)
            .with_writer(move || writer.clone())
            .finish();
        let subscriber = lines.with(repeats.clone());
        tracing::subscriber::with_default(subscriber, || {
            work(&repeats);
            repeats.tell();
        });
        let bytes = log.0.lock();
        let text = String::from_utf8(bytes.clone()).unwrap();
        text.lines().map(|line| line.trim().to_owned()).collect()
    }

    #[test]
    fn lines_alike_are_counted_after_some() {
        let lines = lines(|_| {
            for n in 0..1000 {
                tracing::warn!("10.0.0.{n}: no");
                tracing::error!("yes");
            }
        });
        assert_eq!(lines.len(), 2 * (LINES as usize + 1));
        let count = |line: &str| lines.iter().filter(|l| *l == line).count();
        assert_eq!(count("WARN 10.0.0.7: no"), 1);
        assert_eq!(count("ERROR yes"), LINES as usize);
        assert_eq!(
            count("WARN 10.0.0.20: no (and 979 more like this in the last 1 s)"),
            1
        );
        assert_eq!(
            count("ERROR yes (and 979 more like this in the last 1 s)"),
            1
        );
    }

    #[test]
    fn what_differs_is_told_apart_up_to_a_bound() {
        let named = |n: u64| "xyz".repeat(n as usize);
        let few = lines(|_| {
            for n in 0..100 {
                tracing::warn!("{}: no", named(n % 4));
            }
        });
        assert_eq!(few.len(), 4 * (LINES as usize + 1), "{few:?}");
        let many = lines(|_| (0..1000).for_each(|n| tracing::warn!("{}: no", named(n))));
        assert_eq!(many.len(), KINDS + LINES as usize + 1);
        let left = 1000 - KINDS as u64 - LINES - 1;
        let last = many.last().unwrap();
        assert!(last.contains(&format!("(and {left} more")), "{last}");
    }

    #[test]
    fn counting_begins_again_when_it_was_told() {
        let lines = lines(|repeats| {
            for _ in 0..2 {
                (0..=LINES).for_each(|_| tracing::info!("one too many"));
                repeats.tell();
            }
            (0..LINES).for_each(|_| tracing::info!("one too many"));
            (0..100).for_each(|_| tracing::debug!("not shown"));
        });
        assert_eq!(lines, vec!["INFO one too many"; 3 * LINES as usize + 2]);
    }
}
