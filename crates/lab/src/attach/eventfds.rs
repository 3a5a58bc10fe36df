//! Finds eventfds that processes share. The kernel gives each eventfd an id, which /proc/PID/fdinfo
//! shows.

use std::collections::BTreeSet;
use std::fs;

/// Returns the ids of a process's eventfds.
pub(super) fn of(pid: u32) -> BTreeSet<u64> {
    by_fd(pid).into_iter().map(|(_, id)| id).collect()
}

/// Returns pairs of (file descriptor, id) of a process's eventfds.
pub(super) fn by_fd(pid: u32) -> Vec<(u64, u64)> {
    let entries = fs::read_dir(format!("/proc/{pid}/fdinfo"))
        .into_iter()
        .flatten();
    let pair = |entry: fs::DirEntry| {
        let fd = entry.file_name().to_str()?.parse().ok()?;
        Some((fd, parse(&fs::read_to_string(entry.path()).ok()?)?))
    };
    entries.flatten().filter_map(pair).collect()
}

fn parse(fdinfo: &str) -> Option<u64> {
    let id = fdinfo
        .lines()
        .find_map(|line| line.strip_prefix("eventfd-id:"))?;
    id.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    #[test]
    fn an_id_is_the_same_in_whoever_has_it() {
        let before = of(std::process::id());
        let fd = eventfd(0, EventfdFlags::empty()).unwrap();
        let now = of(std::process::id());
        assert!(now.len() > before.len() || now != before);
        // A child process inherits it.
        let inherited = rustix::io::dup(&fd).unwrap();
        let mut child = std::process::Command::new("sh")
            .args(["-c", "read wait"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::from(inherited))
            .spawn()
            .unwrap();
        let theirs = of(child.id());
        let fdinfo = std::os::fd::AsRawFd::as_raw_fd(&fd);
        let text = fs::read_to_string(format!("/proc/self/fdinfo/{fdinfo}")).unwrap();
        assert!(theirs.contains(&parse(&text).unwrap()));
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    #[test]
    fn other_files_have_none() {
        assert_eq!(parse("pos:\t0\nflags:\t02\n"), None);
        assert_eq!(parse("eventfd-count: 0\neventfd-id: 17\n"), Some(17));
    }
}
