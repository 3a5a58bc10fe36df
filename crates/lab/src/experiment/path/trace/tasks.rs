//! Who has begun whom, as perf tells it: of what was there at its start, and of what has come since.

use std::collections::HashMap;

/// Processes, or threads.
const MOST: usize = 1_000_000;
/// Processes between one and the first of all.
const MOST_PARENTS: usize = 64;
/// The kernel's threads are its children.
const KTHREADD: u32 = 2;

/// Processes and their threads.
#[derive(Debug, Default)]
pub struct Tasks {
    /// Processes by those that they have begun.
    parents: HashMap<u32, u32>,
    /// Processes by their threads.
    threads: HashMap<u32, u32>,
}

impl Tasks {
    /// Takes in `(6500:6501):(6496:6497)`: a thread, with its process, and who has begun it. `None`
    /// if it is nothing of that kind.
    pub fn begun(&mut self, text: &str) -> Option<()> {
        let pair = |text: &str| {
            let text = text.trim().trim_start_matches('(').trim_end_matches(')');
            let (process, thread) = text.split_once(':')?;
            Some((process.parse().ok()?, thread.parse().ok()?))
        };
        let (new, by) = text.split_once("):(")?;
        let (new, by): ((u32, u32), (u32, u32)) = (pair(new)?, pair(by)?);
        if self.threads.len() < MOST {
            self.threads.insert(new.1, new.0);
        }
        if new.0 != by.0 && self.parents.len() < MOST {
            self.parents.insert(new.0, by.0);
        }
        Some(())
    }

    /// The process that a thread is of.
    pub fn process(&self, thread: u32) -> Option<u32> {
        self.threads.get(&thread).copied()
    }

    /// A process and those above it.
    pub fn above(&self, process: u32) -> impl Iterator<Item = u32> {
        let above = |one: &u32| self.parents.get(one).copied();
        std::iter::successors(Some(process), above).take(MOST_PARENTS)
    }

    /// Whether it is a thread of the kernel's, or an idle CPU.
    pub fn is_kernels(&self, process: u32) -> bool {
        process == 0 || self.above(process).any(|one| one == KTHREADD)
    }
}
