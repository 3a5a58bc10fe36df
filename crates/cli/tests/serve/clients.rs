//! Checks the API's socket with clients that misbehave.

use crate::support::{PATIENCE, Served, eventually, stdout_of};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

const REQUEST: &str = "GET /v1/disks HTTP/1.1\r\nHost: x\r\n\r\n";

fn connect(served: &Served) -> UnixStream {
    let socket = UnixStream::connect(served.path("c")).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket.set_write_timeout(Some(PATIENCE)).unwrap();
    socket
}

fn is_well(served: &Served) {
    assert_eq!(stdout_of(&["stats", &served.api()]), "no requests yet\n");
}

#[test]
fn only_its_owner_may_use_it() {
    let served = Served::start("null:1G", &[]);
    let mode = std::fs::symlink_metadata(served.path("c")).unwrap().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn what_is_not_http_is_cut_off() {
    let served = Served::start("null:1G", &[]);
    for garbage in [
        "garbage\n\n",
        "{\"command\":\"quit\"}\n",
        "\0\0\0\0\r\n\r\n",
    ] {
        let mut socket = connect(&served);
        socket.write_all(garbage.as_bytes()).unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        assert!(
            answer.is_empty() || answer.starts_with("HTTP/1.1 400"),
            "{answer}"
        );
    }
    // A head without end. The server must not read all of it.
    let mut socket = connect(&served);
    socket.write_all(b"GET / HTTP/1.1\r\nHost: ").unwrap();
    let sent = (0..10_000).map(|_| socket.write_all(&[b'x'; 4096]));
    let failed = sent.into_iter().any(|result| result.is_err());
    assert!(failed, "it took 40 MB");
    is_well(&served);
}

#[test]
fn a_client_that_never_reads_is_not_waited_for() {
    let served = Served::start("null:1G", &[]);
    let mut socket = connect(&served);
    socket.set_nonblocking(true).unwrap();
    // Sends requests until neither side accepts more.
    let requests = REQUEST.repeat(1000);
    let (mut sent, mut stuck) = (0, 0);
    while stuck < 20 {
        match socket.write(&requests.as_bytes()[sent % REQUEST.len()..]) {
            Ok(n @ 1..) => (sent, stuck) = (sent + n, 0),
            _ => {
                stuck += 1;
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
    is_well(&served);
    // When the client reads again, the server sends the remaining replies.
    socket.set_nonblocking(false).unwrap();
    let (mut got, mut answers) = (Vec::new(), 0);
    let mut buffer = [0; 65536];
    while answers < 100 {
        let n = socket.read(&mut buffer).unwrap();
        assert!(n > 0, "it is closed after {answers} answers");
        got.extend_from_slice(&buffer[..n]);
        answers = String::from_utf8_lossy(&got)
            .matches("HTTP/1.1 200")
            .count();
    }
}

#[test]
fn clients_that_hang_keep_nobody_out() {
    let mut served = Served::start("null:1G", &[]);
    let hanging: Vec<_> = (0..200)
        .map(|number| {
            let mut socket = connect(&served);
            // The server may have disconnected this client already.
            match number % 3 {
                0 => {}
                1 => drop(socket.write_all(b"GET /v1/di")),
                _ => {
                    // Sends requests and never reads the replies.
                    let timeout = Some(Duration::from_millis(10));
                    socket.set_write_timeout(timeout).unwrap();
                    let requests = REQUEST.replace("/v1/disks", "/openapi.json").repeat(100);
                    while socket.write_all(requests.as_bytes()).is_ok() {}
                }
            }
            socket
        })
        .collect();
    let begun = std::time::Instant::now();
    is_well(&served);
    // Sooner than the server's timeouts for these clients.
    let waited = begun.elapsed();
    assert!(waited < Duration::from_secs(8), "{waited:?}");
    let fds = std::fs::read_dir(format!("/proc/{}/fd", served.child.id())).unwrap();
    assert!(fds.count() < 100, "it keeps them all");
    let status = std::fs::read_to_string(format!("/proc/{}/status", served.child.id())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let peak: u64 = peak
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap();
    assert!(peak < 100 << 10, "{peak} KiB");
    drop(hanging);
    is_well(&served);
    assert_eq!(served.terminate().0, Some(0));
}

#[test]
fn an_idle_daemon_uses_no_processor() {
    let served = Served::start("null:1G", &[]);
    // A client stays connected; another has disconnected in the middle of a request.
    let _connected = connect(&served);
    connect(&served).write_all(b"GE").unwrap();
    served.load(1000, &[]);
    let switches = || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", served.child.id())).unwrap();
        // A thread that ends meanwhile has no status.
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
    // Once all work is done, no thread wakes up.
    eventually("quiet", || {
        let before = switches();
        std::thread::sleep(Duration::from_millis(500));
        (switches() == before).then_some(())
    });
}
