//! Dialogs in front of the table: the keys, and the columns to choose from.

use super::columns::Column;
use super::keys::letter_of;
use super::look::Look;
use super::state::{Overlay, State};
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::Line;
use ratatui::widgets::{Block, Clear};

const KEYS: [&str; 19] = [
    "Up Down PgUp PgDn Home End   select a disk (also j, k)",
    "Enter   details: heat map of latencies, stages, workers; Esc: back",
    "Left Right   sort by the previous or next column (also <, >)",
    "r w   sort by reads, writes per second; again: reverse the order",
    "R T   sort by megabytes read, written",
    "I L E U N   sort by IOPS, p99, errors, CPU, name",
    "o   choose the column to sort by",
    "f   choose the columns",
    "s   choose the interval",
    "/   filter by a part of the name, guest or image; Esc: all disks",
    "V   only disks with a guest or client",
    "space   redraw the screen",
    "q   quit (also Ctrl-C)",
    "",
    "wake: until a worker takes the request; queue: held by filters",
    "map: lookup of the request in the image; device: in the storage",
    "finish, notify: until the reply is ready; until it is sent",
    "p99 with <: too few requests for a percentile; the maximum",
    "",
];

pub fn keys(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let lines = KEYS.iter().map(|text| Line::raw(*text));
    boxed(
        frame,
        area,
        &state.look,
        " keys (any key: back) ",
        lines.collect(),
    );
}

/// Draws the columns to choose from: the visible ones, or the one to sort by.
pub fn columns(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let is_order = state.overlay == Overlay::Order;
    let title = match is_order {
        true => " sort by (a letter; again: reverse the order) ",
        false => " columns (a letter: on or off; Enter: back) ",
    };
    let lines = Column::ALL.into_iter().map(|column| {
        let is_on = match is_order {
            true => column == state.sort,
            false => state.columns.contains(&column),
        };
        let mark = if is_on { '*' } else { ' ' };
        let text = format!(
            "{mark} {}  {:<10}  {}",
            letter_of(column),
            column.head(),
            column.meaning()
        );
        match is_on {
            true => Line::styled(text, state.look.title()),
            false => Line::raw(text),
        }
    });
    boxed(frame, area, &state.look, title, lines.collect());
}

fn boxed(
    frame: &mut Frame<'_>,
    area: Rect,
    look: &Look,
    title: &'static str,
    lines: Vec<Line<'static>>,
) {
    let longest = lines
        .iter()
        .map(Line::width)
        .max()
        .unwrap_or(0)
        .max(title.len());
    let size = |n: usize| u16::try_from(n + 2).unwrap_or(u16::MAX);
    let (width, height) = (
        size(longest).min(area.width),
        size(lines.len()).min(area.height),
    );
    let at = Rect::new(
        area.x + (area.width - width) / 2,
        area.y + (area.height - height) / 2,
        width,
        height,
    );
    let block = Block::bordered().title(title);
    let block = match look.unicode {
        true => block,
        false => block.border_set(ASCII),
    };
    let inside = block.inner(at);
    frame.render_widget(Clear, at);
    frame.render_widget(block, at);
    for (line, at) in lines.into_iter().zip(inside.rows()) {
        frame.render_widget(line, at);
    }
}

const ASCII: ratatui::symbols::border::Set<'_> = ratatui::symbols::border::Set {
    top_left: "+",
    top_right: "+",
    bottom_left: "+",
    bottom_right: "+",
    vertical_left: "|",
    vertical_right: "|",
    horizontal_top: "-",
    horizontal_bottom: "-",
};
