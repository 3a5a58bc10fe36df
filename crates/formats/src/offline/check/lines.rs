//! The lines of a check about single problems.

/// Maximum number of lines about single problems. Further problems are only counted.
const MAX_LINES: u64 = 1000;

/// The output of lines about single problems.
pub(crate) struct Lines<'a> {
    say: &'a mut dyn FnMut(&str),
    said: u64,
}

impl<'a> Lines<'a> {
    pub(crate) fn new(say: &'a mut dyn FnMut(&str)) -> Lines<'a> {
        Lines { say, said: 0 }
    }

    /// Says a line, unless there have been too many.
    pub(crate) fn say(&mut self, text: &str) {
        self.said += 1;
        if self.said < MAX_LINES {
            (self.say)(text);
        } else if self.said == MAX_LINES {
            (self.say)("There are more problems than are listed here.");
        }
    }
}
