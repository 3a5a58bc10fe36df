//! The table of all disks.

use super::columns::{Column, fit};
use super::look::Look;
use super::model::Row;
use super::state::State;
use super::words::cut;
use fathom_trace::Stage;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::text::{Line, Span};

pub fn draw(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let rows = state.rows();
    let columns = fit(&state.columns, usize::from(area.width), &rows);
    let selected = state.index(&rows);
    // If the selected disk's hint does not fit into its column, the hint gets a line of its own.
    let hint = rows.get(selected).map(|row| Column::Hint.cell(row));
    let needed = hint.map_or(0, |hint| hint.chars().count());
    let has_hint =
        { columns.iter() }.any(|(column, width)| *column == Column::Hint && *width >= needed);
    let below = usize::from(!has_hint && area.height > 3);
    let height = usize::from(area.height).saturating_sub(1 + below);
    let mut lines = vec![head(state, &columns)];
    if rows.is_empty() {
        lines.push(Line::styled(nothing(state), state.look.quiet()));
    }
    let first = (selected + 1).saturating_sub(height.max(1));
    let shown = rows.iter().enumerate().skip(first).take(height);
    lines.extend(shown.map(|(index, row)| line(state, &columns, row, index == selected)));
    for (line, at) in lines.into_iter().zip(area.rows()) {
        frame.render_widget(line, at);
    }
    if let (1, Some(row)) = (below, rows.get(selected)) {
        let at = Rect::new(area.x, area.bottom() - 1, area.width, 1);
        let text = format!("{}: {}", row.disk.name, Column::Hint.cell(row));
        let text = Line::styled(state.look.clean(&text), state.look.hint());
        frame.render_widget(text, at);
    }
}

fn nothing(state: &State) -> &'static str {
    match (state.model.rows().is_empty(), state.model.samples().next()) {
        (false, _) => "no disk matches (Esc: all)",
        (true, Some(_)) => "no disk is served",
        (true, None) => "waiting for a server",
    }
}

fn head(state: &State, columns: &[(Column, usize)]) -> Line<'static> {
    let cells = columns.iter().map(|(column, width)| {
        let mut text = column.head().to_owned();
        if *column == state.sort && text.chars().count() < *width {
            let up = state.reversed;
            text.push(if up {
                state.look.up()
            } else {
                state.look.down()
            });
        }
        aligned(
            &cut(&text, *width, state.look.more()),
            *width,
            column.is_text(),
        )
    });
    let text = cells.collect::<Vec<_>>().join(" ");
    Line::styled(text, state.look.head())
}

fn aligned(text: &str, width: usize, is_text: bool) -> String {
    match is_text {
        true => format!("{text:<width$}"),
        false => format!("{text:>width$}"),
    }
}

fn line(
    state: &State,
    columns: &[(Column, usize)],
    row: &Row<'_>,
    is_selected: bool,
) -> Line<'static> {
    let look = &state.look;
    let mut spans = Vec::new();
    for (index, (column, width)) in columns.iter().enumerate() {
        if index > 0 {
            spans.push(Span::raw(" "));
        }
        if *column == Column::Stages {
            spans.extend(bar(look, row, *width));
            continue;
        }
        let text = cut(&look.clean(&column.cell(row)), *width, look.more());
        let style = match column {
            Column::Errors if row.disk.all.errors > 0 => look.bad(),
            Column::Hint => look.hint(),
            _ => Style::new(),
        };
        spans.push(Span::styled(
            aligned(&text, *width, column.is_text()),
            style,
        ));
    }
    let line = Line::from(spans);
    match (is_selected, row.is_gone) {
        (true, _) => line.style(look.selected()),
        (false, true) => line.style(look.quiet()),
        (false, false) => line,
    }
}

/// Draws the mean request's time as a bar: each stage has a part of `width` characters.
pub fn bar(look: &Look, row: &Row<'_>, width: usize) -> Vec<Span<'static>> {
    let stages = row.stages().unwrap_or_default();
    let total: f64 = stages.iter().sum();
    if total <= 0.0 {
        return vec![Span::raw(" ".repeat(width))];
    }
    let mut spans = Vec::new();
    let (mut until, mut drawn) = (0.0, 0);
    for (stage, us) in Stage::ALL.into_iter().zip(stages) {
        until += us;
        let end = (until / total * width as f64).round() as usize;
        let (letter, style) = look.stage(stage);
        let part: String = (drawn..end).map(|_| letter).collect();
        drawn = end.max(drawn);
        spans.push(Span::styled(part, style));
    }
    spans
}
