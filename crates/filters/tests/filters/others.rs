//! Tests of readonly, pause and log.

use crate::support::{Ask, Bed};
use fathom_core::Clock;
use fathom_core::testing::SIZE;
use fathom_filters::wrap;
use std::time::Duration;

#[test]
fn a_readonly_disk_says_so_and_means_it() {
    let bed = Bed::new(&["readonly"], 1);
    let info = wrap(bed.disk.clone(), bed.filters[0].clone()).info();
    assert!(info.read_only && info.discard.is_none());
    let mut peer = bed.peer();
    assert_eq!(peer.do_it(Ask::write(0, vec![1; 512])).error, libc::EROFS);
    assert_eq!(peer.do_it(Ask::read(0, 512)).error, 0);
    assert_eq!(peer.do_it(Ask::flush()).error, 0);
}

#[test]
fn a_frozen_disk_is_thawed_and_nothing_is_lost() {
    let bed = Bed::new(&["pause", "delay:read=30ms"], 2);
    let mut peer = bed.peer();
    peer.ask(Ask::read(0, 512));
    peer.popped();
    bed.set(0, &[("frozen", "yes")]).unwrap();
    // Requests in flight are completed.
    assert_eq!(peer.answer().error, 0);
    peer.ask_all((0..100).map(|n| Ask::write(n * 512, vec![n as u8; 512])));
    std::thread::sleep(Duration::from_millis(50));
    assert!(peer.answer_now().is_none());
    bed.set(0, &[("frozen", "no")]).unwrap();
    assert!(peer.answers(100).iter().all(|answer| answer.error == 0));
    assert_eq!(bed.bytes()[99 * 512], 99);
}

#[test]
fn every_request_is_logged_with_its_stages() {
    let dir = tempfile::tempdir().unwrap();
    let (lines, json) = (dir.path().join("a"), dir.path().join("b"));
    let specs = [
        "delay:read=5ms".to_owned(),
        format!("log:file={}", lines.display()),
        format!("log:file={},format=json", json.display()),
        "fault:error=EIO,op=write".to_owned(),
    ];
    let specs: Vec<_> = specs.iter().map(String::as_str).collect();
    let bed = Bed::new(&specs, 1);
    let mut peer = bed.peer();
    peer.ask_all((0..100).map(|n| Ask::read(n * 4096, 4096)));
    peer.ask(Ask::write(0, vec![0; 512]));
    peer.answers(101);
    drop(bed); // writes the remaining lines
    let text = std::fs::read_to_string(lines).unwrap();
    assert_eq!(text.lines().count(), 101, "{text}");
    let write = text.lines().find(|line| line.contains(" write ")).unwrap();
    assert!(write.contains("offset 0 len 512") && write.contains("input/output error"));
    let text = std::fs::read_to_string(json).unwrap();
    let objects: Vec<serde_json::Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(objects.len(), 101);
    for object in objects.iter().filter(|object| object["op"] == "read") {
        let stages = object["stages"].as_object().unwrap();
        let sum: u64 = stages
            .iter()
            .filter(|(k, _)| *k != "total_ns")
            .map(|(_, v)| v.as_u64().unwrap())
            .sum();
        assert!(sum.abs_diff(stages["total_ns"].as_u64().unwrap()) < 100);
        assert!(stages["queue_ns"].as_u64().unwrap() >= 5_000_000);
        assert_eq!(object["errno"], 0);
    }
}

/// A log that cannot be written loses its lines and has no other effect.
#[test]
fn a_log_that_nobody_reads_blocks_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
    // Allows the filter to open the pipe; no process ever reads from it.
    let _reader = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&pipe)
        .unwrap();
    let bed = Bed::new(&[&format!("log:file={}", pipe.display())], 1);
    let mut peer = bed.peer();
    for _ in 0..20 {
        peer.ask_all((0..8000).map(|_| Ask::read(0, 512)));
        peer.answers(8000);
    }
    // The filter's thread is stuck in write(2).
    std::mem::forget(bed);
}

#[test]
fn the_disk_takes_long_to_open_and_to_connect_to() {
    let bed = Bed::new(&["delay:open=50ms,read=20ms,connect=70ms"], 1);
    let slow = wrap(bed.disk.clone(), bed.filters[0].clone());
    assert!(slow.connect_delay().abs_diff(Duration::from_millis(70)) < Duration::from_millis(1));
    let before = Clock::get().now();
    slow.activate().unwrap();
    assert!(bed.disk.is_active());
    let mut peer = bed.peer();
    let waited = |at: u64| Clock::get().duration(at - before);
    assert!(waited(peer.do_it(Ask::flush()).at) >= Duration::from_millis(50));
    assert!(waited(peer.do_it(Ask::read(0, 512)).at) >= Duration::from_millis(70));
    // Activation does not wait itself: see drain.rs.
    assert_eq!(slow.info().size, SIZE);
}
