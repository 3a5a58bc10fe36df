//! The directory of persistent disks' files, and the thread that writes them one after another.

use fathom_control::Effect;
use fathom_spec::DiskSpec;
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};

#[derive(Clone, Debug, Default, Serialize)]
pub struct Store {
    /// Durable contents of the directory.
    pub files: BTreeMap<String, DiskSpec>,
    /// File operations that have not ended.
    pub operations: VecDeque<Effect>,
}

/// The outcome of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    Succeeds,
    /// The file system is full, and nothing has changed.
    FailsBefore,
    /// The file has changed, but may not be durable.
    FailsAfter,
}

impl Store {
    /// Applies an operation to the files.
    pub fn change(&mut self, operation: &Effect) {
        match operation {
            Effect::Write(spec) => drop(self.files.insert(spec.name.clone(), (**spec).clone())),
            Effect::Erase { disk } => drop(self.files.remove(disk)),
            _ => {}
        }
    }
}
