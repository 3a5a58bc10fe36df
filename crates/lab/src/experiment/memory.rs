//! Memory used by processes. A page that several processes share counts in part for each.

use std::collections::HashSet;
use std::fs;

use crate::error::{Context, Error, Result};
use crate::process_tree;

/// Memory of processes, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// The proportional set size: each page is divided by the number of processes that map it. The
    /// sum over all processes of the machine is the memory that they use.
    pub proportional: u64,
    /// Size of the pages that other processes map, too, each counted in full.
    pub shared: u64,
}

impl Memory {
    /// Returns the memory of these processes and all their descendants.
    ///
    /// # Errors
    /// If a process does not exist, or may only be inspected by root.
    pub fn of(pids: &[u32]) -> Result<Memory> {
        let mut sum = Memory::default();
        let below = pids.iter().flat_map(|pid| process_tree::below(*pid));
        let all: HashSet<u32> = pids.iter().copied().chain(below).collect();
        for pid in all {
            let path = format!("/proc/{pid}/smaps_rollup");
            let text = match fs::read_to_string(&path) {
                // A descendant may have ended meanwhile.
                Err(_) if !pids.contains(&pid) => continue,
                other => other.context(|| format!("cannot read {path}"))?,
            };
            let one = parse(&text)
                .ok_or_else(|| Error::Protocol(format!("{path} has no sizes: '{text}'")))?;
            sum.proportional += one.proportional;
            sum.shared += one.shared;
        }
        Ok(sum)
    }
}

/// Parses lines such as `Pss:      206 kB`.
fn parse(text: &str) -> Option<Memory> {
    let bytes = |name: &str| -> Option<u64> {
        let line = { text.lines() }.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
        kib.checked_mul(1024)
    };
    Some(Memory {
        proportional: bytes("Pss")?,
        shared: bytes("Shared_Clean")?.checked_add(bytes("Shared_Dirty")?)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn sizes_are_read_as_the_kernel_writes_them() {
        let text = "55-7f ---p 00000000 00:00 0    [rollup]\nRss:    1724 kB\nPss:     206 kB\n\
                    Pss_Anon: 116 kB\nShared_Clean:   1564 kB\nShared_Dirty:  4 kB\n";
        let memory = parse(text).unwrap();
        assert_eq!(
            (memory.proportional, memory.shared),
            (206 << 10, 1568 << 10)
        );
        assert_eq!(parse("Pss: 1 kB\n"), None);
        assert_eq!(
            parse("Pss: 1\nShared_Clean: 1 kB\nShared_Dirty: 1 kB\n"),
            None
        );
    }

    #[test]
    fn what_a_process_has_started_counts_as_its_own() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let own = std::process::id();
        assert!(process_tree::below(own).contains(&child.id()));
        assert!(Memory::of(&[child.id()]).unwrap().proportional > 0);
        // A process that is named twice is counted once.
        let [once, twice] = [&[own][..], &[own, own]].map(|pids| Memory::of(pids).unwrap());
        assert!(twice.proportional < 3 * once.proportional / 2);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(Memory::of(&[child.id()]).is_err(), "it is gone");
    }
}
