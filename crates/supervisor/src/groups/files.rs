//! Reads and writes the files of a control group.

use super::hierarchy::{Controller, Version};
use fathom_host::allowance::Allowance;
use fathom_metrics::TenantLimits;
use fathom_units::cause;
use std::fs;
use std::io;
use std::path::Path;

/// Period for which a group's share of CPU time applies, in µs.
const PERIOD: u64 = 100_000;
/// In version 1, values from this one on mean that there is no limit.
const ENDLESS: u64 = 1 << 60;

/// Sets a limit of the group `dir`, or removes it. The error names the file.
pub fn limit(
    version: Version,
    dir: &Path,
    controller: Controller,
    allowance: &Allowance,
) -> Result<(), String> {
    match (version, controller) {
        (Version::Two, Controller::Memory) => {
            let bytes = allowance.memory.map(|memory| memory.0);
            set(dir, "memory.max", &or_max(bytes))?;
            // Memory beyond the limit must not fill the swap space that others use.
            set_if_there(dir, "memory.swap.max", &or_max(bytes.map(|_| 0)))
        }
        (Version::One, Controller::Memory) => {
            let bytes = allowance
                .memory
                .map_or("-1".into(), |memory| memory.0.to_string());
            let (memory, both) = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes");
            // The second value is never less than the first, so the order of the writes depends on
            // the old limit.
            if set(dir, memory, &bytes).is_err() {
                set_if_there(dir, both, &bytes)?;
                set(dir, memory, &bytes)?;
            }
            set_if_there(dir, both, &bytes)
        }
        (Version::Two, Controller::Cpu) => {
            let time = or_max(allowance.cpu.map(|cpu| u64::from(cpu.0) * PERIOD / 100));
            set(dir, "cpu.max", &format!("{time} {PERIOD}"))
        }
        (Version::One, Controller::Cpu) => {
            let time = allowance.cpu.map(|cpu| u64::from(cpu.0) * PERIOD / 100);
            set(dir, "cpu.cfs_period_us", &PERIOD.to_string())?;
            let time = time.map_or("-1".into(), |time| time.to_string());
            set(dir, "cpu.cfs_quota_us", &time)
        }
        (_, Controller::Tasks) => {
            let tasks = allowance.tasks.map(|tasks| u64::from(tasks.0));
            set(dir, "pids.max", &or_max(tasks))
        }
    }
}

fn or_max(limit: Option<u64>) -> String {
    limit.map_or("max".into(), |limit| limit.to_string())
}

fn set(dir: &Path, file: &str, value: &str) -> Result<(), String> {
    let path = dir.join(file);
    fs::write(&path, value)
        .map_err(|error| format!("{value} in {}: {}", path.display(), cause(error)))
}

fn set_if_there(dir: &Path, file: &str, value: &str) -> Result<(), String> {
    match dir.join(file).exists() {
        true => set(dir, file, value),
        false => Ok(()),
    }
}

/// Moves a process with all its threads into a group.
pub fn put(dir: &Path, pid: u32) -> io::Result<()> {
    fs::write(dir.join("cgroup.procs"), pid.to_string())
}

/// Reads the group's limits, and what the group uses.
pub fn read(version: Version, dir: &Path, controller: Controller, into: &mut TenantLimits) {
    let number = |file: &str| fs::read_to_string(dir.join(file)).ok()?.trim().parse().ok();
    let limit = |file: &str| number(file).filter(|limit: &u64| *limit < ENDLESS);
    match (version, controller) {
        (Version::Two, Controller::Memory) => {
            into.memory_max = limit("memory.max");
            into.memory = number("memory.current");
        }
        (Version::One, Controller::Memory) => {
            into.memory_max = limit("memory.limit_in_bytes");
            into.memory = number("memory.usage_in_bytes");
        }
        (_, Controller::Cpu) => {
            into.cpu_max_percent = cpu_limit(version, dir).map(|time| time * 100 / PERIOD);
            let held_back = match version {
                Version::Two => entry(dir, "cpu.stat", "throttled_usec"),
                Version::One => entry(dir, "cpu.stat", "throttled_time").map(|ns| ns / 1000),
            };
            into.cpu_held_back_ms = held_back.map(|us| us / 1000);
        }
        (_, Controller::Tasks) => {
            into.tasks_max = limit("pids.max");
            into.tasks = number("pids.current");
        }
    }
}

/// Returns the CPU time in each period, in µs. None: there is no limit.
fn cpu_limit(version: Version, dir: &Path) -> Option<u64> {
    let file = match version {
        Version::Two => "cpu.max",
        Version::One => "cpu.cfs_quota_us",
    };
    let text = fs::read_to_string(dir.join(file)).ok()?;
    // (Without a limit, the value is `max` or -1, which is not a `u64`.)
    text.split_whitespace().next()?.parse().ok()
}

/// Number of processes in the group that the kernel has killed because of the memory limit.
pub fn memory_kills(version: Version, dir: &Path) -> u64 {
    let file = match version {
        Version::Two => "memory.events",
        Version::One => "memory.oom_control",
    };
    entry(dir, file, "oom_kill").unwrap_or_default()
}

/// Returns a number of a file by its name.
fn entry(dir: &Path, file: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(dir.join(file)).ok()?;
    let mut entries = text.lines().filter_map(|line| line.split_once(' '));
    let (_, value) = entries.find(|(other, _)| *other == name)?;
    value.trim().parse().ok()
}
