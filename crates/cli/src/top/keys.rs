//! Key bindings. Where a function also exists in esxtop, its key is the same.

use super::columns::Column;
use super::parse_interval;
use super::state::{Overlay, State};
use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use std::time::Duration;

/// The effect of a key beyond a change of the state.
#[derive(Debug, PartialEq, Eq)]
pub enum Effect {
    Nothing,
    Quit,
    /// Clears and redraws the screen.
    Redraw,
    Interval(Duration),
}

/// Maximum length of entered text in characters.
const LONGEST: usize = 60;

pub fn press(state: &mut State, key: KeyEvent) -> Effect {
    state.note = None;
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return match key.code {
            KeyCode::Char('c') => Effect::Quit,
            KeyCode::Char('l') => Effect::Redraw,
            _ => Effect::Nothing,
        };
    }
    match std::mem::replace(&mut state.overlay, Overlay::Nothing) {
        Overlay::Nothing if state.detail.is_some() => in_detail(state, key.code),
        Overlay::Nothing => in_table(state, key.code),
        // Any key closes the help.
        Overlay::Help => Effect::Nothing,
        Overlay::Fields => in_fields(state, key.code),
        Overlay::Order => in_order(state, key.code),
        Overlay::Filter(text) => in_filter(state, text, key.code),
        Overlay::Interval(text) => in_interval(state, text, key.code),
    }
}

/// Handles keys that work everywhere.
fn anywhere(state: &mut State, code: KeyCode) -> Effect {
    match code {
        KeyCode::Char('q') => return Effect::Quit,
        KeyCode::Char('h' | '?') => state.overlay = Overlay::Help,
        KeyCode::Char('s') => state.overlay = Overlay::Interval(String::new()),
        KeyCode::Char(' ') => return Effect::Redraw,
        _ => {}
    }
    Effect::Nothing
}

fn in_table(state: &mut State, code: KeyCode) -> Effect {
    let page = isize::try_from(state.size.1.saturating_sub(6))
        .unwrap_or(1)
        .max(1);
    match code {
        KeyCode::Up | KeyCode::Char('k') => state.step(-1),
        KeyCode::Down | KeyCode::Char('j') => state.step(1),
        KeyCode::PageUp => state.step(-page),
        KeyCode::PageDown => state.step(page),
        KeyCode::Home => state.step(isize::MIN),
        KeyCode::End => state.step(isize::MAX),
        KeyCode::Left | KeyCode::Char('<') => sort_beside(state, -1),
        KeyCode::Right | KeyCode::Char('>') => sort_beside(state, 1),
        KeyCode::Enter => state.enter(),
        KeyCode::Esc => state.filter.clear(),
        KeyCode::Char('/') => state.overlay = Overlay::Filter(state.filter.clone()),
        KeyCode::Char('f') => state.overlay = Overlay::Fields,
        KeyCode::Char('o') => state.overlay = Overlay::Order,
        KeyCode::Char('V') => state.used_only = !state.used_only,
        KeyCode::Char('r') => state.sort_by(Column::Reads),
        KeyCode::Char('w') => state.sort_by(Column::Writes),
        KeyCode::Char('R') => state.sort_by(Column::ReadMb),
        KeyCode::Char('T') => state.sort_by(Column::WriteMb),
        KeyCode::Char('N') => state.sort_by(Column::Disk),
        KeyCode::Char('I') => state.sort_by(Column::Iops),
        KeyCode::Char('L') => state.sort_by(Column::P99),
        KeyCode::Char('E') => state.sort_by(Column::Errors),
        KeyCode::Char('U') => state.sort_by(Column::Cpu),
        other => return anywhere(state, other),
    }
    Effect::Nothing
}

fn in_detail(state: &mut State, code: KeyCode) -> Effect {
    match code {
        KeyCode::Esc | KeyCode::Backspace | KeyCode::Left => state.detail = None,
        // The previous or next disk of the table.
        KeyCode::Up | KeyCode::Down => {
            state.step(if code == KeyCode::Up { -1 } else { 1 });
            state.enter();
        }
        other => return anywhere(state, other),
    }
    Effect::Nothing
}

/// Sorts by another visible column, `by` places right of the present one.
fn sort_beside(state: &mut State, by: isize) {
    let shown = &state.columns;
    let at = shown.iter().position(|column| *column == state.sort);
    let at = at.map_or(0, |at| at.saturating_add_signed(by));
    if let Some(column) = shown.get(at.min(shown.len().saturating_sub(1))).copied()
        && column != state.sort
    {
        state.sort_by(column);
    }
}

/// Returns the letter that selects a column.
pub fn letter_of(column: Column) -> char {
    let index = Column::ALL.iter().position(|one| *one == column);
    index.map_or('?', |index| char::from(b'a' + index as u8))
}

fn column_of(code: KeyCode) -> Option<Column> {
    let KeyCode::Char(letter) = code else {
        return None;
    };
    let letter = letter.to_ascii_lowercase();
    Column::ALL
        .into_iter()
        .find(|column| letter_of(*column) == letter)
}

fn in_fields(state: &mut State, code: KeyCode) -> Effect {
    if let Some(column) = column_of(code) {
        let is_shown = |one: &Column| match *one == column {
            true => !state.columns.contains(one),
            false => state.columns.contains(one),
        };
        let columns: Vec<_> = Column::ALL.into_iter().filter(is_shown).collect();
        if !columns.is_empty() {
            state.columns = columns;
        }
        state.overlay = Overlay::Fields;
    }
    Effect::Nothing
}

fn in_order(state: &mut State, code: KeyCode) -> Effect {
    if let Some(column) = column_of(code) {
        state.sort_by(column);
    }
    Effect::Nothing
}

/// Applies a key to entered text; returns `None` after Enter.
fn write(mut text: String, code: KeyCode) -> Option<String> {
    match code {
        KeyCode::Enter => return None,
        KeyCode::Backspace => drop(text.pop()),
        KeyCode::Char(letter) if text.chars().count() < LONGEST => text.push(letter),
        _ => {}
    }
    Some(text)
}

fn in_filter(state: &mut State, text: String, code: KeyCode) -> Effect {
    if code == KeyCode::Esc {
        state.filter.clear();
        return Effect::Nothing;
    }
    // The filter applies while it is being typed.
    if let Some(text) = write(text, code) {
        state.filter.clone_from(&text);
        state.overlay = Overlay::Filter(text);
    }
    Effect::Nothing
}

fn in_interval(state: &mut State, text: String, code: KeyCode) -> Effect {
    if code == KeyCode::Esc {
        return Effect::Nothing;
    }
    match write(text.clone(), code) {
        Some(text) => state.overlay = Overlay::Interval(text),
        None if text.is_empty() => {}
        None => match parse_interval(&text) {
            Ok(interval) => {
                state.set_interval(interval);
                return Effect::Interval(interval);
            }
            Err(problem) => state.note = Some(problem),
        },
    }
    Effect::Nothing
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::samples::{disk, look, sample};

    fn state() -> State {
        let mut state = State::new(look(), Duration::from_secs(1));
        let disks = vec![disk("web", 100.0), disk("db", 5.0), disk("log", 7.0)];
        state.model.take("s".into(), sample(1, disks), None);
        state
    }

    fn type_in(state: &mut State, keys: &str) -> Vec<Effect> {
        let pressed = keys.chars().map(|letter| match letter {
            '\n' => KeyCode::Enter,
            '\x1b' => KeyCode::Esc,
            '\x7f' => KeyCode::Backspace,
            letter => KeyCode::Char(letter),
        });
        pressed.map(|code| press(state, code.into())).collect()
    }

    fn names(state: &State) -> Vec<&str> {
        state.rows().iter().map(|row| &*row.disk.name).collect()
    }

    #[test]
    fn disks_are_sorted_by_keys_and_the_selection_stays() {
        let mut state = state();
        assert_eq!(names(&state), ["web", "log", "db"]);
        type_in(&mut state, "j");
        assert_eq!(state.selected.as_ref().unwrap().disk, "log");
        type_in(&mut state, "N");
        assert_eq!(names(&state), ["db", "log", "web"]);
        assert_eq!(state.index(&state.rows()), 1);
        type_in(&mut state, "N");
        assert_eq!(names(&state), ["web", "log", "db"]);
        type_in(&mut state, "os");
        assert_eq!(
            (state.sort, &state.overlay),
            (Column::Hint, &Overlay::Nothing)
        );
        type_in(&mut state, "r");
        press(&mut state, KeyCode::Right.into());
        assert_eq!(state.sort, Column::Writes);
        press(&mut state, KeyCode::End.into());
        assert_eq!(state.index(&state.rows()), 2);
        press(&mut state, KeyCode::PageUp.into());
        assert_eq!(state.index(&state.rows()), 0);
    }

    #[test]
    fn a_filter_shows_what_it_finds_while_it_is_written() {
        let mut state = state();
        type_in(&mut state, "/Db");
        assert_eq!(names(&state), ["db"]);
        type_in(&mut state, "\x7f\x7fO\n");
        assert_eq!(
            (names(&state), &state.overlay),
            (vec!["log"], &Overlay::Nothing)
        );
        type_in(&mut state, "\x1b");
        assert_eq!(names(&state).len(), 3);
        // No disk is in use.
        type_in(&mut state, "V");
        assert_eq!(names(&state).len(), 0);
        type_in(&mut state, "jk\n");
        assert_eq!(state.detail, None);
    }

    #[test]
    fn one_disk_is_entered_and_left() {
        let mut state = state();
        type_in(&mut state, "j\n");
        assert_eq!(state.detail.as_ref().unwrap().disk, "log");
        press(&mut state, KeyCode::Down.into());
        assert_eq!(state.detail.as_ref().unwrap().disk, "db");
        type_in(&mut state, "?");
        assert_eq!(state.overlay, Overlay::Help);
        type_in(&mut state, "x\x1b");
        assert_eq!((&state.detail, &state.overlay), (&None, &Overlay::Nothing));
    }

    #[test]
    fn fields_are_switched_and_one_is_left() {
        let mut state = state();
        let before = state.columns.clone();
        type_in(&mut state, "fb");
        assert_eq!(state.columns[0], Column::Server);
        type_in(&mut state, "b\n");
        assert_eq!(
            (&state.columns, &state.overlay),
            (&before, &Overlay::Nothing)
        );
        type_in(&mut state, "f");
        let all: String = Column::ALL.into_iter().map(letter_of).collect();
        type_in(&mut state, &all);
        type_in(&mut state, &all);
        assert!(!state.columns.is_empty());
    }

    #[test]
    fn another_interval_is_one_that_there_may_be() {
        let mut state = state();
        let effects = type_in(&mut state, "s2.5\n");
        assert_eq!(
            effects.last(),
            Some(&Effect::Interval(Duration::from_millis(2500)))
        );
        assert_eq!(state.interval, Duration::from_millis(2500));
        type_in(&mut state, "s0.1\n");
        assert!(state.note.as_ref().unwrap().contains("from 500ms"));
        assert_eq!(type_in(&mut state, "q"), [Effect::Quit]);
        assert_eq!(state.note, None);
        let quits = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        type_in(&mut state, "/q");
        assert_eq!(press(&mut state, quits), Effect::Quit);
    }
}
