//! Lines of log that come again and again do not fill the log.
//!
//! A client, a front-end or a disk that fails can cause a line as often as it
//! likes. Here, and nowhere else, most of them are left out: of lines alike
//! some are written in each [`WINDOW`], and then how many more there were.

use fathom_core::{ThreadKind, thread_starts};
use fathom_units::redacted;
use std::collections::HashMap;
use std::fmt::{self, Debug, Write};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// In this time at most [`LINES`] lines that are alike are written.
const WINDOW: Duration = Duration::from_secs(10);
const LINES: u64 = 20;

/// Of one place in the code, lines of so many kinds are told apart, so that a
/// peer that can choose a line's words gains nothing by that.
const KINDS: usize = 8;

/// What is said once, however many disks there are: the start and the end.
const ALWAYS: &str = "fathom_daemon::daemon";

/// A layer for the log that leaves repeated lines out.
#[derive(Clone, Default)]
pub struct Repeats(Arc<Mutex<Window>>);

#[derive(Default)]
struct Window {
    begun: Option<Instant>,
    places: HashMap<Identifier, Vec<Kind>>,
    /// A thread will tell what was left out when the window ends.
    will_tell: bool,
}

/// Lines that are alike: of one place, with the same words but for numbers.
struct Kind {
    /// Of the words; None: all those for which there was no room.
    words: Option<u64>,
    seen: u64,
    /// The first that was left out.
    first: Option<(Level, String)>,
}

impl Repeats {
    fn window(&self) -> MutexGuard<'_, Window> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Whether to write the line. If not, it is counted.
    fn admit(&self, event: &Event<'_>) -> bool {
        let level = *event.metadata().level();
        let target = event.metadata().target();
        if level > Level::INFO || target == ALWAYS || target == module_path!() {
            return true;
        }
        let mut window = self.window();
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
            // If there is no thread now, perhaps there is one for the next.
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

    /// Say now what has been left out.
    pub fn tell(&self) {
        let mut window = self.window();
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
    /// Begin another one if this is over and nothing of it is to be told.
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

/// An event's text.
pub fn message_of(event: &Event<'_>) -> String {
    let mut text = String::new();
    event.record(&mut Message(&mut text));
    redacted(&text).into_owned()
}

/// Writes an event's text somewhere.
struct Message<'a, W>(&'a mut W);

impl<W: Write> Visit for Message<'_, W> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            // What is written to here takes everything.
            let _ = write!(self.0, "{value:?}");
        }
    }
}

/// A hash (FNV-1a) of what is written, but for numbers and addresses.
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
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The lines that are written while `work` logs.
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
        let bytes = log.0.lock().unwrap();
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
