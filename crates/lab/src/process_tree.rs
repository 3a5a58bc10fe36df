//! Processes with everything that they have started: their time on CPUs of this machine.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::mem::MaybeUninit;

use rustix::param::clock_ticks_per_second;

/// Seconds on a CPU of a process and of all processes below it, since they began. Includes processes that have ended and
/// that their parents have waited for; the kernel counts those in ticks (usually 10 ms), and the others in nanoseconds.
pub(crate) fn cpu_seconds(root: u32) -> f64 {
    let all = look();
    let ticks = |ticks: u64| ticks as f64 / clock_ticks_per_second() as f64;
    let seconds = |pid: &u32| {
        let one = all[pid];
        own_seconds(*pid).unwrap_or_else(|| ticks(one.ticks)) + ticks(one.of_children)
    };
    tree(root, &all).iter().map(seconds).sum()
}

/// Seconds on a CPU of a process, without its children. None: the process has ended.
fn own_seconds(pid: u32) -> Option<f64> {
    let (mut clock, mut time) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: clock_getcpuclockid(3) writes the clock's identifier if it returns 0. clock_gettime(2) gets that identifier,
    // and writes the time if it returns 0; it fails if the process has ended.
    let time = unsafe {
        let found = libc::clock_getcpuclockid(pid.try_into().ok()?, clock.as_mut_ptr()) == 0;
        let is_read = found && libc::clock_gettime(clock.assume_init(), time.as_mut_ptr()) == 0;
        is_read.then(|| time.assume_init())?
    };
    Some(time.tv_sec as f64 + time.tv_nsec as f64 / 1e9)
}

/// A process, and those below it.
pub(crate) fn below(root: u32) -> HashSet<u32> {
    tree(root, &look())
}

/// Those below a process that run a program of that name.
pub(crate) fn named(root: u32, name: &str) -> Vec<u32> {
    let is_called = |pid: &u32| {
        let called = fs::read_to_string(format!("/proc/{pid}/comm"));
        called.is_ok_and(|called| called.trim_end() == name)
    };
    below(root).into_iter().filter(is_called).collect()
}

/// All processes of this machine.
fn look() -> HashMap<u32, Stat> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let stats = numbers.filter_map(|pid: u32| {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        Some((pid, parse(&text)?))
    });
    stats.collect()
}

/// What is used of proc_pid_stat(5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stat {
    parent: u32,
    /// Ticks on a CPU of the process itself.
    ticks: u64,
    /// Ticks of its children that it has waited for.
    of_children: u64,
}

/// `358 (a name) S 356 ...`: the name may have anything in it, parentheses too.
fn parse(text: &str) -> Option<Stat> {
    let (_, rest) = text.rsplit_once(')')?;
    // From the third field, which is the state.
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    Some(Stat {
        parent: u32::try_from(number(4)?).ok()?,
        ticks: number(14)? + number(15)?,
        of_children: number(16)? + number(17)?,
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
        let one = |pid, parent| {
            let (ticks, of_children) = (1, 0);
            let stat = Stat {
                parent,
                ticks,
                of_children,
            };
            (pid, stat)
        };
        let all = HashMap::from([one(1, 0), one(7, 1), one(8, 7), one(9, 8), one(10, 1)]);
        assert_eq!(tree(7, &all), HashSet::from([7, 8, 9]));
        assert!(tree(77, &all).is_empty());
        let text = "8 (a) b) S 7 8 8 0 -1 4 1 2 3 4 10 20 300 4000 20 0 1 0";
        let stat = Stat {
            parent: 7,
            ticks: 30,
            of_children: 4300,
        };
        assert_eq!(parse(text), Some(stat));
        assert_eq!(parse("8 (a"), None);
    }

    #[test]
    fn time_of_children_that_have_ended_is_counted() {
        let me = std::process::id();
        let before = cpu_seconds(me);
        let spin = "i=0; while [ $i -lt 300000 ]; do i=$((i + 1)); done";
        // In a child of a child.
        let script = format!("sh -c '{spin}'; true");
        let done = Command::new("sh").args(["-c", &script]).status().unwrap();
        assert!(done.success());
        assert!(cpu_seconds(me) > before + 0.02);
    }

    #[test]
    fn time_shorter_than_a_tick_is_counted() {
        let me = std::process::id();
        let before = own_seconds(me).unwrap();
        assert!(own_seconds(me).unwrap() > before);
        assert_eq!(own_seconds(u32::MAX), None);
    }
}
