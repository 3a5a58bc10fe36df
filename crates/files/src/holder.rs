//! Finds the process that has locked a file.
//!
//! The kernel does not report the owner of an OFD lock, because several processes may share an open
//! file. But /proc shows the locks of each open file.

use std::fmt;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A process that holds a lock.
pub(crate) struct Holder {
    name: String,
    pid: u32,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (process {})", self.name, self.pid)
    }
}

/// Returns another process that holds a lock on this byte of the file.
///
/// Returns `None` if no such process is visible: only root can inspect other users' processes.
pub(crate) fn find(file: &File, byte: i64) -> Option<Holder> {
    let this = file.metadata().ok()?;
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| *pid != std::process::id())
        .find(|pid| has_locked(*pid, (this.dev(), this.ino()), byte))
        .map(|pid| Holder {
            name: name_of(pid),
            pid,
        })
}

/// Returns whether this process holds a lock on this byte of the file through another open file.
pub(crate) fn is_this_process(file: &File, byte: i64) -> bool {
    let Ok(this) = file.metadata() else {
        return false;
    };
    has_locked(std::process::id(), (this.dev(), this.ino()), byte)
}

fn has_locked(pid: u32, file: (u64, u64), byte: i64) -> bool {
    let process = Path::new("/proc").join(pid.to_string());
    let Ok(open) = fs::read_dir(process.join("fd")) else {
        return false;
    };
    open.flatten().any(|entry| {
        let same = fs::metadata(entry.path()).is_ok_and(|m| (m.dev(), m.ino()) == file);
        let info = || fs::read_to_string(process.join("fdinfo").join(entry.file_name()));
        same && info().is_ok_and(|info| info.lines().any(|line| locks(line, byte)))
    })
}

/// Returns whether a line of fdinfo describes a lock on this byte:
/// `lock:  1: OFDLCK ADVISORY READ -1 fe:01:1234 100 101`.
fn locks(line: &str, byte: i64) -> bool {
    let mut words = line.split_whitespace().rev();
    let mut next = || words.next();
    let (last, first) = (next(), next());
    let first = first.and_then(|first| first.parse::<i64>().ok());
    let last = last.and_then(|last| match last {
        "EOF" => Some(i64::MAX),
        last => last.parse().ok(),
    });
    match (first, last) {
        (Some(first), Some(last)) => line.starts_with("lock:") && (first..=last).contains(&byte),
        _ => false,
    }
}

/// Returns the name of the process; its threads may have other names.
fn name_of(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let name = name.trim_end();
    match name.is_empty() || name.contains(char::is_control) {
        true => "another program".to_owned(),
        false => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_fdinfo_are_understood() {
        let line = "lock:\t1: OFDLCK  ADVISORY  READ -1 fe:01:1234 100 101";
        assert!(locks(line, 100) && locks(line, 101));
        assert!(!locks(line, 99) && !locks(line, 102));
        assert!(locks(
            "lock:\t1: POSIX ADVISORY WRITE 7 fe:01:1 201 EOF",
            203
        ));
        for other in ["", "lock:", "pos:\t100 101", "flags:\t0100002"] {
            assert!(!locks(other, 100), "{other}");
        }
    }
}
