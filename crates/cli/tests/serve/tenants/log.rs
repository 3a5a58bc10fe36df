//! Checks how the server passes on what tenants write to their standard error, even if an attacker
//! controls them.

use super::{pid, start, state};
use crate::support::{Served, eventually, send, short_dir, stdout_of};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::Instant;

/// A line of the flood.
const LINE: &str = "flood\n";
/// Number of lines per write, all of which a pipe accepts at once.
const AT_ONCE: usize = 600;

/// Opens a tenant's standard error.
fn stderr(served: &Served, disk: &str) -> File {
    let path = format!("/proc/{}/fd/2", pid(served, disk));
    OpenOptions::new().write(true).open(path).unwrap()
}

/// Ends a flood when dropped, even if the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

fn passed_on(log: &str) -> usize {
    let lines = log.lines();
    lines.filter(|line| *line == "[a] flood").count()
}

fn left_out(log: &str) -> usize {
    let counts = log.lines().filter_map(|line| {
        let (count, rest) = line.strip_prefix('(')?.split_once(' ')?;
        let is_it = rest.ends_with("of tenant 'a' were dropped)");
        is_it.then(|| count.parse::<usize>().unwrap())
    });
    counts.sum()
}

#[test]
fn who_says_too_much_is_not_heard_and_all_is_counted() {
    let served = start(short_dir(), &[("a", "null:1M", ""), ("b", "null:1M", "")]);
    let (mut flood, mut other) = (stderr(&served, "a"), stderr(&served, "b"));
    let enough = AtomicBool::new(false);
    let begun = Instant::now();
    let written = thread::scope(|scope| {
        let flooding = scope.spawn(|| {
            let lines = LINE.repeat(AT_ONCE);
            let mut written = 0;
            while !enough.load(SeqCst) {
                flood.write_all(lines.as_bytes()).unwrap();
                written += AT_ONCE;
            }
            written
        });
        let stop = Stop(&enough);
        for n in 0..40 {
            writeln!(other, "said {n}").unwrap();
            state(&served, "a");
        }
        eventually("the other is heard", || {
            served.log().contains("[b] said 39\n").then_some(())
        });
        eventually("something is left out", || {
            (left_out(&served.log()) > 0).then_some(())
        });
        drop(stop);
        flooding.join().unwrap()
    });
    flood.write_all(b"thread 'worker' panicked\nalas").unwrap();
    send("KILL", pid(&served, "a"));
    let own = "tenant 'a': its process was ended by signal 9";
    eventually("the last words, and the supervisor's", || {
        let log = served.log();
        let has = |line: &str| log.lines().any(|other| other == line);
        let mut others = log.lines().filter(|line| !line.starts_with('['));
        let is_told = others.any(|line| line.contains(own));
        (is_told && has("[a] thread 'worker' panicked") && has("[a] alas")).then_some(())
    });
    let seconds = begun.elapsed().as_secs() as usize;
    eventually("all is counted", || {
        let log = served.log();
        let there = passed_on(&log) + left_out(&log);
        (there == written).then_some(())
    });
    let log = served.log();
    let passed_on = passed_on(&log);
    let most = 256 + 20 * (seconds + 1) + 32;
    assert!(
        (256..=most).contains(&passed_on),
        "{passed_on} of {written}"
    );
    assert!(written > 4 * most, "{written}");
    (0..40).for_each(|n| assert!(log.contains(&format!("[b] said {n}\n"))));
}

#[test]
fn log_lines_of_tenants_are_escaped_and_marked() {
    let served = start(short_dir(), &[("a", "null:1M", "")]);
    let forged = "\x1b]0;x\x07\x1b[2J\x1b[1A1970-01-01T00:00:00Z ERROR forged\r1970 ERROR too\n";
    stderr(&served, "a").write_all(forged.as_bytes()).unwrap();
    let line = eventually("it is passed on", || {
        let log = served.log();
        log.lines()
            .find(|line| line.contains("forged"))
            .map(str::to_owned)
    });
    assert!(
        line.starts_with("[a] \\u{1b}]0;x\\u{7}\\u{1b}[2J"),
        "{line}"
    );
    assert!(line.ends_with("forged\\r1970 ERROR too"), "{line}");
    assert!(!line.contains(|c: char| c.is_control()), "{line:?}");
    // The tenant still replies.
    stdout_of(&["stats", &served.api(), "--disk", "a"]);
}
