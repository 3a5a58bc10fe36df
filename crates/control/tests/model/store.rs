//! The directory of persistent disks' files, and the thread that writes there: one operation after the other.

use fathom_control::Effect;
use fathom_spec::DiskSpec;
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};

#[derive(Clone, Debug, Default, Serialize)]
pub struct Store {
    /// Durable contents of the directory.
    pub files: BTreeMap<String, DiskSpec>,
    /// Writes, removals and reads of files that have not ended.
    pub operations: VecDeque<Effect>,
}

/// How an operation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    Succeeds,
    /// The file system is full: nothing has changed.
    FailsBefore,
    /// The file has changed, but is not known to be durable.
    FailsAfter,
}

impl Store {
    /// Changes the files as the operation does.
    pub fn change(&mut self, operation: &Effect) {
        match operation {
            Effect::Write(spec) => drop(self.files.insert(spec.name.clone(), (**spec).clone())),
            Effect::Erase { disk } => drop(self.files.remove(disk)),
            _ => {}
        }
    }
}
