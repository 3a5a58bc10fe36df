//! Parents of processes and threads, as reported by perf: of those that existed when perf started,
//! and of new ones.

use std::collections::HashMap;

/// Maximum number of processes, and of threads.
const MOST: usize = 1_000_000;
/// Maximum number of processes in a chain of parents.
const MOST_PARENTS: usize = 64;
/// Process ID of kthreadd, the parent of the kernel's threads.
const KTHREADD: u32 = 2;

/// Processes and their threads.
#[derive(Debug, Default)]
pub struct Tasks {
    /// Parent of each process.
    parents: HashMap<u32, u32>,
    /// Process of each thread.
    threads: HashMap<u32, u32>,
}

impl Tasks {
    /// Takes the parent of a new thread: `(6500:6501):(6496:6497)` has the new process and thread,
    /// and those that have started it. `None` if the text has another form.
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

    /// Returns the process of a thread.
    pub fn process(&self, thread: u32) -> Option<u32> {
        self.threads.get(&thread).copied()
    }

    /// Returns a process and its ancestors.
    pub fn above(&self, process: u32) -> impl Iterator<Item = u32> {
        let above = |one: &u32| self.parents.get(one).copied();
        std::iter::successors(Some(process), above).take(MOST_PARENTS)
    }

    /// Whether a process is a thread of the kernel, or the idle task.
    pub fn is_kernels(&self, process: u32) -> bool {
        process == 0 || self.above(process).any(|one| one == KTHREADD)
    }
}
