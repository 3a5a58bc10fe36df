//! In which order tenants get other processes.

use fathom_host::handover::Progress;
use std::collections::VecDeque;
use std::time::Instant;

/// Tenants whose turn it is not yet.
pub struct Turns {
    pub todo: VecDeque<String>,
    /// Until when the first one may have something else to do.
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
