//! Draws a frame of the view.

use super::state::{Overlay, State};
use super::words::{megabytes, rate, time_or_dash};
use super::{detail, help, table};
use fathom_trace::Stage;
use fathom_units::short_duration;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::text::{Line, Span};

pub fn draw(frame: &mut Frame<'_>, state: &State) {
    let parts = [
        Constraint::Length(2),
        Constraint::Min(1),
        Constraint::Length(1),
    ];
    let [head, body, foot] = Layout::vertical(parts).areas(frame.area());
    for (line, at) in head_lines(state).into_iter().zip(head.rows()) {
        frame.render_widget(line, at);
    }
    match &state.detail {
        Some(key) => detail::draw(frame, body, state, key),
        None => table::draw(frame, body, state),
    }
    frame.render_widget(foot_line(state, foot), foot);
    match state.overlay {
        Overlay::Help => help::keys(frame, body, state),
        Overlay::Fields | Overlay::Order => help::columns(frame, body, state),
        _ => {}
    }
}

/// Returns the header: the totals of all servers and the settings of the view.
fn head_lines(state: &State) -> [Line<'static>; 2] {
    let rows = state.rows();
    let totals = state.model.totals(&rows);
    let plural = |n: usize, word: &str| format!("{n} {word}{}", if n == 1 { "" } else { "s" });
    let other = match totals.other_iops > 0.0 {
        true => format!(" other {}", rate(totals.other_iops)),
        false => String::new(),
    };
    let figures = format!(
        ", {}  IOPS r {} w {}{other}  MB/s r {} w {}  CPU {:.0}%  p99 {}",
        plural(totals.disks, "disk"),
        rate(totals.read_iops),
        rate(totals.write_iops),
        megabytes(totals.read_bytes_per_second),
        megabytes(totals.write_bytes_per_second),
        totals.cpu_percent,
        time_or_dash(totals.p99_us),
    );
    let mut first = vec![
        Span::styled("fathom top", state.look.title()),
        Span::raw(format!("  {}", plural(totals.servers, "server"))),
        Span::raw(figures),
    ];
    if totals.errors_per_second > 0.0 {
        let errors = format!("  ERR/s {}", rate(totals.errors_per_second));
        first.push(Span::styled(errors, state.look.bad()));
    }
    let mut second = vec![Span::styled("stages ", state.look.quiet())];
    for stage in Stage::ALL {
        let (letter, style) = state.look.stage(stage);
        second.push(Span::styled(letter.to_string(), style));
        let name = match letter.is_ascii_alphabetic() {
            true => format!("={} ", stage.name()),
            false => format!("{} ", stage.name()),
        };
        second.push(Span::raw(name));
    }
    second.push(Span::styled(settings(state), state.look.quiet()));
    [first.into(), second.into()]
}

/// Returns the settings. The filter comes first, because the user must see that disks are hidden.
fn settings(state: &State) -> String {
    let order = if state.reversed { "up" } else { "down" };
    let mut all = Vec::new();
    if !state.filter.is_empty() {
        all.push(format!("/{}", state.look.clean(&state.filter)));
    }
    if state.used_only {
        all.push("used only".to_owned());
    }
    all.push(format!("every {}", short_duration(state.interval)));
    all.push(format!("by {} ({order})", state.sort.head()));
    format!(" {}", all.join(", "))
}

/// Returns the footer: an input line, a note or problem, or the main keys.
fn foot_line(state: &State, area: Rect) -> Line<'static> {
    let written = |what: &str, text: &str| {
        Line::from(vec![
            Span::styled(what.to_owned(), state.look.title()),
            Span::raw(state.look.clean(text)),
            Span::styled(" ", state.look.head()),
        ])
    };
    match &state.overlay {
        Overlay::Filter(text) => return written("filter: ", text),
        Overlay::Interval(text) => return written("interval (0.5s to 60s): ", text),
        _ => {}
    }
    let problem = state
        .note
        .as_deref()
        .or_else(|| state.model.problems().next().map(|(_, problem)| problem));
    if let Some(text) = problem {
        return Line::styled(state.look.clean(text), state.look.bad());
    }
    let keys = match (&state.detail, area.width < 60) {
        (Some(_), _) => "q quit  h help  Esc back  Up/Down other disk  s interval",
        (None, true) => "q quit  h help  Enter disk",
        (None, false) => {
            "q quit  h help  Enter disk  / filter  f fields  o order  s interval  V used"
        }
    };
    Line::styled(keys, state.look.quiet())
}

#[cfg(test)]
mod tests;
