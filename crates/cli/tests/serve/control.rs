//! The control socket, and clients that do not behave.

use crate::support::{PATIENCE, Served, stdout_of};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;

fn connect(served: &Served) -> UnixStream {
    let socket = UnixStream::connect(served.path("c")).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket.set_write_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// Send bytes and then nothing more; everything that is answered.
fn answers(served: &Served, sent: &[u8]) -> Vec<Value> {
    let mut socket = connect(served);
    socket.write_all(sent).unwrap();
    socket.shutdown(Shutdown::Write).unwrap();
    let lines = BufReader::new(socket).lines();
    lines
        .map(|line| serde_json::from_str(&line.unwrap()).unwrap())
        .collect()
}

fn is_well(served: &Served) {
    assert_eq!(
        stdout_of(&["stats", &served.control()]),
        "no requests yet\n"
    );
}

#[test]
fn only_its_owner_may_use_it() {
    let served = Served::start("null:1G", &[]);
    let mode = std::fs::symlink_metadata(served.path("c")).unwrap().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn requests_are_answered_line_by_line() {
    let mut served = Served::start("null:1G", &[]);
    let got = answers(
        &served,
        b"{\"command\":\"stats\"}\n\n  \r\n{\"command\":\"nonsense\"}\n{\"command\":\"resize\"}\n\
          garbage\n\xff\xfe\n{\"command\":\"trace\"}\n{\"command\":\"info\"}",
    );
    assert_eq!(got.len(), 7, "{got:?}");
    assert_eq!(
        got[0],
        serde_json::json!({ "operations": [], "refused": 0 })
    );
    assert!(got[1]["error"].as_str().unwrap().contains("nonsense"));
    assert!(got[2]["error"].as_str().unwrap().contains("files"));
    for answer in &got[3..6] {
        assert!(
            answer["error"].as_str().unwrap().contains("bad request"),
            "{answer}"
        );
    }
    assert_eq!(got[6]["pid"], served.child.id());
    assert_eq!(
        answers(&served, b"{\"command\":\"quit\"}\n"),
        [serde_json::json!({ "quitting": true })]
    );
    assert_eq!(served.end().0, Some(0));
}

#[test]
fn a_line_without_end_is_cut_off() {
    let served = Served::start("null:1G", &[]);
    let mut socket = connect(&served);
    // More than is buffered anywhere: the daemon must not take it all.
    let sent = (0..10_000).map(|_| socket.write_all(&[b'x'; 4096]));
    let failed = sent.into_iter().any(|result| result.is_err());
    assert!(failed, "it took 40 MB");
    let mut answer = String::new();
    // The connection may have been reset before the answer was read.
    let _ = socket.read_to_string(&mut answer);
    assert!(answer.is_empty() || answer.contains("too long"), "{answer}");
    is_well(&served);
}

#[test]
fn a_client_that_never_reads_is_not_waited_for() {
    let served = Served::start("null:1G", &[]);
    let mut socket = connect(&served);
    socket.set_nonblocking(true).unwrap();
    // Until neither side takes any more.
    let requests = b"{\"command\":\"info\"}\n".repeat(1000);
    let mut stuck = 0;
    while stuck < 20 {
        match socket.write(&requests) {
            Ok(1..) => stuck = 0,
            _ => {
                stuck += 1;
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        }
    }
    is_well(&served);
    // Whoever reads again is served again.
    socket.set_nonblocking(false).unwrap();
    let mut reader = BufReader::new(socket);
    let mut line = String::new();
    for _ in 0..100 {
        line.clear();
        reader.read_line(&mut line).unwrap();
        assert!(line.contains("null:"), "{line}");
    }
}

#[test]
fn clients_that_hang_keep_nobody_out() {
    let mut served = Served::start("null:1G", &[]);
    let hanging: Vec<_> = (0..200)
        .map(|i| {
            let mut socket = connect(&served);
            // Some say half a word, some nothing.
            if i % 2 == 0 {
                // It may have been thrown out already.
                let _ = socket.write_all(b"{\"comm");
            }
            socket
        })
        .collect();
    is_well(&served);
    let fds = std::fs::read_dir(format!("/proc/{}/fd", served.child.id())).unwrap();
    assert!(fds.count() < 100, "it keeps them all");
    drop(hanging);
    is_well(&served);
    assert_eq!(served.terminate().0, Some(0));
}

#[test]
fn an_idle_daemon_uses_no_processor() {
    let served = Served::start("null:1G", &[]);
    // A client that is connected and one that has gone in mid-sentence.
    let _connected = connect(&served);
    connect(&served).write_all(b"{").unwrap();
    served.load(1000, &[]);
    let switches = || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", served.child.id())).unwrap();
        // One that ends meanwhile has none.
        let status =
            tasks.flat_map(|t| std::fs::read_to_string(t.unwrap().path().join("status")).ok());
        let count = |status: String| -> u64 {
            let line = status
                .lines()
                .find(|l| l.starts_with("voluntary_ctxt_switches"));
            line.unwrap()
                .split_whitespace()
                .nth(1)
                .unwrap()
                .parse()
                .unwrap()
        };
        status.map(count).sum::<u64>()
    };
    // Once everything has settled, nothing wakes up.
    crate::support::eventually("quiet", || {
        let before = switches();
        std::thread::sleep(std::time::Duration::from_millis(500));
        (switches() == before).then_some(())
    });
}
