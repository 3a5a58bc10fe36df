//! The screen of `fathom top`: sets the terminal up, and restores it on every kind of exit.

use super::feed::{Feed, News};
use super::keys::{Effect, press};
use super::slow::Slow;
use super::state::State;
use super::view::draw;
use anyhow::Context;
use crossterm::cursor::{Hide, Show};
use crossterm::event::{Event, KeyEventKind, poll, read};
use crossterm::execute;
use crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use std::io::{Stdout, stdout};
use std::time::{Duration, Instant};

/// Time to wait for a key, after which new samples are shown. Keys take effect immediately.
const TURN: Duration = Duration::from_millis(100);
/// Interval between requests for slow requests; longer while the server reports none.
const SLOW: Duration = Duration::from_secs(2);
const NO_SLOW: Duration = Duration::from_secs(30);

/// The terminal in raw mode with the alternate screen; restores it when dropped.
struct Taken;

impl Taken {
    fn take() -> std::io::Result<Taken> {
        enable_raw_mode()?;
        let taken = Taken;
        execute!(stdout(), EnterAlternateScreen, Hide)?;
        // A panic must restore the terminal first so that its message is visible. Release builds
        // abort without running destructors.
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            give_back();
            before(panic);
        }));
        Ok(taken)
    }
}

fn give_back() {
    // The terminal may be gone.
    let _ = execute!(stdout(), Show, LeaveAlternateScreen);
    let _ = disable_raw_mode();
}

impl Drop for Taken {
    fn drop(&mut self) {
        give_back();
    }
}

pub fn run(mut state: State, feed: &Feed, count: Option<u64>) -> anyhow::Result<()> {
    end_by_signals().context("cannot catch signals")?;
    let _taken = Taken::take().context("cannot use the terminal")?;
    look(&mut state, feed, count)
}

/// Starts a thread that restores the terminal and exits on a signal.
///
/// The thread is necessary because reading keys never returns once the terminal is gone.
fn end_by_signals() -> std::io::Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    let body = move || {
        for number in signals.forever() {
            give_back();
            // The default action lets the sender see that the signal ended the process.
            if emulate_default_handler(number).is_err() {
                std::process::exit(1);
            }
        }
    };
    let builder = std::thread::Builder::new().name("signals".into());
    builder.spawn(body).map(drop)
}

/// Shows the disks until the user quits or `count` intervals have passed.
fn look(state: &mut State, feed: &Feed, count: Option<u64>) -> anyhow::Result<()> {
    let mut terminal = Terminal::new(CrosstermBackend::new(stdout()))?;
    let mut asked = Asked::default();
    let mut intervals = 0;
    show(&mut terminal, state)?;
    loop {
        let mut is_new = false;
        if poll(TURN)? {
            match read()? {
                Event::Key(key) if key.kind != KeyEventKind::Release => match press(state, key) {
                    Effect::Nothing => {}
                    Effect::Quit => return Ok(()),
                    Effect::Redraw => terminal.clear()?,
                    Effect::Interval(interval) => feed.set_interval(interval),
                },
                _ => {}
            }
            is_new = true;
        }
        let now = Instant::now();
        for news in feed.take(Duration::ZERO) {
            // All servers have about the same intervals, so only those of the first one are
            // counted.
            if let News::Sample(server, _) = &news {
                let first = state.model.rows().first().map(|row| row.server.to_owned());
                intervals += u64::from(first.is_none_or(|first| first == *server));
            }
            state.take(news, now);
            is_new = true;
        }
        is_new |= state.model.expire(now);
        asked.ask(state, feed, now);
        if is_new {
            show(&mut terminal, state)?;
        }
        if count.is_some_and(|count| intervals >= count) {
            return Ok(());
        }
    }
}

fn show(
    terminal: &mut Terminal<CrosstermBackend<Stdout>>,
    state: &mut State,
) -> anyhow::Result<()> {
    let size = terminal.size()?;
    state.size = (size.width, size.height);
    terminal.draw(|frame| draw(frame, state))?;
    Ok(())
}

/// Time of the last request for slow requests.
#[derive(Default)]
struct Asked(Option<Instant>);

impl Asked {
    fn ask(&mut self, state: &State, feed: &Feed, now: Instant) {
        let Some(key) = &state.detail else {
            self.0 = None;
            return;
        };
        let pause = if state.slow == Slow::None {
            NO_SLOW
        } else {
            SLOW
        };
        let is_other = state.slow == Slow::Unknown && self.0.is_some_and(|at| now > at + TURN * 5);
        if is_other || self.0.is_none_or(|at| now > at + pause) {
            feed.ask_slow(&key.server, &key.disk);
            self.0 = Some(now);
        }
    }
}
