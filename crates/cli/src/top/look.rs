//! The abilities of the terminal, and the styles that depend on them.

use fathom_trace::Stage;
use ratatui::style::{Color, Modifier, Style};
use std::env::var;

/// Number of shades of a heat map.
pub const LEVELS: u8 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    pub colour: bool,
    /// Whether the terminal has 256 colours.
    pub many: bool,
    pub unicode: bool,
    /// Whether the cursor can be moved.
    pub can_move: bool,
}

impl Look {
    pub fn of_environment() -> Look {
        let set = |name: &str| var(name).ok().filter(|value| !value.is_empty());
        let term = set("TERM").unwrap_or_default();
        let can_move = !["", "dumb"].contains(&&*term);
        let colour = can_move && set("NO_COLOR").is_none();
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set);
        let locale = locale.unwrap_or_default().to_lowercase();
        Look {
            colour,
            many: colour && (term.contains("256") || set("COLORTERM").is_some()),
            unicode: locale.contains("utf-8") || locale.contains("utf8"),
            can_move,
        }
    }

    fn coloured(&self, colour: Color) -> Style {
        match self.colour {
            true => Style::new().fg(colour),
            false => Style::new(),
        }
    }

    pub fn title(&self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    pub fn head(&self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    pub fn selected(&self) -> Style {
        match self.many {
            true => Style::new().bg(Color::Indexed(238)).fg(Color::Indexed(255)),
            false => Style::new().add_modifier(Modifier::REVERSED),
        }
    }

    pub fn quiet(&self) -> Style {
        match self.many {
            true => Style::new().fg(Color::Indexed(245)),
            false => Style::new().add_modifier(Modifier::DIM),
        }
    }

    pub fn bad(&self) -> Style {
        self.coloured(Color::Red).add_modifier(Modifier::BOLD)
    }

    pub fn hint(&self) -> Style {
        self.coloured(Color::Yellow)
    }

    /// Returns the character and style of a stage in a bar.
    pub fn stage(&self, stage: Stage) -> (char, Style) {
        let (letter, basic, fine) = match stage {
            Stage::Wake => ('w', Color::Cyan, 80),
            Stage::Queue => ('q', Color::Red, 203),
            Stage::Map => ('m', Color::Magenta, 177),
            Stage::Device => ('d', Color::Blue, 75),
            Stage::Finish => ('f', Color::Green, 114),
            Stage::Notify => ('n', Color::Yellow, 221),
        };
        let colour = if self.many {
            Color::Indexed(fine)
        } else {
            basic
        };
        let block = self.colour && self.unicode;
        (if block { '█' } else { letter }, self.coloured(colour))
    }

    /// Returns the character and style of a shade of a heat map, 0 to [`LEVELS`].
    pub fn heat(&self, level: u8) -> (char, Style) {
        let index = usize::from(level.min(LEVELS));
        if self.many && level > 0 {
            const SHADES: [u8; LEVELS as usize] = [17, 19, 55, 91, 162, 203, 215, 228];
            let style = Style::new().bg(Color::Indexed(SHADES[index - 1]));
            return (' ', style);
        }
        const BLOCKS: [char; 9] = [' ', '░', '░', '▒', '▒', '▓', '▓', '█', '█'];
        const LETTERS: [char; 9] = [' ', '.', ':', '-', '=', '+', '*', '#', '@'];
        let letters = if self.unicode { BLOCKS } else { LETTERS };
        let colour = match level {
            0..=3 => Color::Blue,
            4..=6 => Color::Magenta,
            _ => Color::Yellow,
        };
        (letters[index], self.coloured(colour))
    }

    pub fn vertical(&self) -> char {
        if self.unicode { '│' } else { '|' }
    }

    pub fn horizontal(&self) -> char {
        if self.unicode { '─' } else { '-' }
    }

    /// Returns the character that replaces the rest of a cut text.
    pub fn more(&self) -> char {
        if self.unicode { '…' } else { '~' }
    }

    pub fn down(&self) -> char {
        if self.unicode { '▼' } else { 'v' }
    }

    pub fn up(&self) -> char {
        if self.unicode { '▲' } else { '^' }
    }

    /// Replaces control characters, and non-ASCII characters if the terminal has no Unicode.
    ///
    /// Anybody may have chosen the names of disks, which must not control the terminal.
    pub fn clean(&self, text: &str) -> String {
        let strange = |c: char| c.is_control() || (!self.unicode && !c.is_ascii());
        let shown = text.chars().map(|c| if strange(c) { '?' } else { c });
        shown.collect()
    }
}
