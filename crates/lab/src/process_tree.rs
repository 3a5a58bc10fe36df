//! A process tree: the descendants of a process and the CPU time that they have used.

use std::collections::{HashMap, HashSet};
use std::fs;

use rustix::param::clock_ticks_per_second;

/// Returns the CPU seconds of a process and all its descendants since they started. Descendants
/// that have ended count if their parent has waited for them.
pub(crate) fn cpu_seconds(root: u32) -> f64 {
    let all = look();
    let ticks: u64 = tree(root, &all).iter().map(|pid| all[pid].ticks).sum();
    ticks as f64 / clock_ticks_per_second() as f64
}

/// Returns a process and its descendants.
pub(crate) fn below(root: u32) -> HashSet<u32> {
    tree(root, &look())
}

/// Returns the processes in a process's tree whose command name is `name`.
pub(crate) fn named(root: u32, name: &str) -> Vec<u32> {
    let is_called = |pid: &u32| {
        let called = fs::read_to_string(format!("/proc/{pid}/comm"));
        called.is_ok_and(|called| called.trim_end() == name)
    };
    below(root).into_iter().filter(is_called).collect()
}

/// Reads the statistics of all processes of this machine.
fn look() -> HashMap<u32, Stat> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let stats = numbers.filter_map(|pid: u32| {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        Some((pid, parse(&text)?))
    });
    stats.collect()
}

/// The fields used of proc_pid_stat(5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stat {
    parent: u32,
    /// User and system time of the process and of its reaped children, in clock ticks.
    ticks: u64,
}

/// Parses `358 (a name) S 356 ...`. The name may hold any character, also parentheses.
fn parse(text: &str) -> Option<Stat> {
    let (_, rest) = text.rsplit_once(')')?;
    // The first of these fields is field 3, the state.
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    let times = [14, 15, 16, 17].map(number);
    Some(Stat {
        parent: u32::try_from(number(4)?).ok()?,
        ticks: times.into_iter().sum::<Option<u64>>()?,
    })
}

fn tree(root: u32, all: &HashMap<u32, Stat>) -> HashSet<u32> {
    let mut found: HashSet<u32> = HashSet::from([root]);
    found.retain(|pid| all.contains_key(pid));
    loop {
        let children = all.iter().filter(|(_, one)| found.contains(&one.parent));
        let children: Vec<u32> = children.map(|(pid, _)| *pid).collect();
        let before = found.len();
        found.extend(children);
        if found.len() == before {
            return found;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn grandchildren_count() {
        let one = |pid, parent| (pid, Stat { parent, ticks: 1 });
        let all = HashMap::from([one(1, 0), one(7, 1), one(8, 7), one(9, 8), one(10, 1)]);
        assert_eq!(tree(7, &all), HashSet::from([7, 8, 9]));
        assert!(tree(77, &all).is_empty());
        let text = "8 (a) b) S 7 8 8 0 -1 4 1 2 3 4 10 20 300 4000 20 0 1 0";
        let (parent, ticks) = (7, 4330);
        assert_eq!(parse(text), Some(Stat { parent, ticks }));
        assert_eq!(parse("8 (a"), None);
    }

    #[test]
    fn what_children_took_stays_when_they_have_ended() {
        let me = std::process::id();
        let before = cpu_seconds(me);
        let spin = "i=0; while [ $i -lt 300000 ]; do i=$((i + 1)); done";
        // The loop runs in a grandchild.
        let script = format!("sh -c '{spin}'; true");
        let done = Command::new("sh").args(["-c", &script]).status().unwrap();
        assert!(done.success());
        assert!(cpu_seconds(me) > before + 0.02);
    }
}
