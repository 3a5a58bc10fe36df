//! The order in which tenants' processes are replaced.

use fathom_host::handover::Progress;
use std::collections::VecDeque;
use std::time::Instant;

/// Tenants whose processes have not been replaced yet.
pub struct Turns {
    pub todo: VecDeque<String>,
    /// Time until which the first tenant may complete earlier commands.
    pub until: Option<Instant>,
    pub tell: Box<dyn FnMut(Progress) + Send>,
}

impl Turns {
    pub fn new(todo: VecDeque<String>, tell: Box<dyn FnMut(Progress) + Send>) -> Turns {
        Turns {
            todo,
            until: None,
            tell,
        }
    }

    pub fn next(&mut self) {
        self.todo.pop_front();
        self.until = None;
    }
}
