//! A tenant's control group by its files: what is written there, and what they say.

use super::hierarchy::{Controller, Version};
use fathom_host::allowance::Allowance;
use fathom_metrics::TenantLimits;
use fathom_units::cause;
use std::fs;
use std::io;
use std::path::Path;

/// µs in which a group has its share of CPU time.
const PERIOD: u64 = 100_000;
/// Above this, version 1 means that there is no limit.
const ENDLESS: u64 = 1 << 60;

/// Have a limit hold for the group `dir`, or none. The error says which file is meant.
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
            // What does not fit is not to go to others' swap.
            set_if_there(dir, "memory.swap.max", &or_max(bytes.map(|_| 0)))
        }
        (Version::One, Controller::Memory) => {
            let bytes = allowance
                .memory
                .map_or("-1".into(), |memory| memory.0.to_string());
            let (memory, both) = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes");
            // The second is never less than the first.
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

/// Put a process there, with all of its threads.
pub fn put(dir: &Path, pid: u32) -> io::Result<()> {
    fs::write(dir.join("cgroup.procs"), pid.to_string())
}

/// What the kernel says of the group's limits, and of what it uses.
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

/// µs in each period.
fn cpu_limit(version: Version, dir: &Path) -> Option<u64> {
    let file = match version {
        Version::Two => "cpu.max",
        Version::One => "cpu.cfs_quota_us",
    };
    let text = fs::read_to_string(dir.join(file)).ok()?;
    // (Or a word, or -1.)
    text.split_whitespace().next()?.parse().ok()
}

/// How often the kernel has ended somebody there for want of memory.
pub fn memory_kills(version: Version, dir: &Path) -> u64 {
    let file = match version {
        Version::Two => "memory.events",
        Version::One => "memory.oom_control",
    };
    entry(dir, file, "oom_kill").unwrap_or_default()
}

/// A number by its name.
fn entry(dir: &Path, file: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(dir.join(file)).ok()?;
    let mut entries = text.lines().filter_map(|line| line.split_once(' '));
    let (_, value) = entries.find(|(other, _)| *other == name)?;
    value.trim().parse().ok()
}
