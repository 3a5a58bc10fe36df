//! Checks the identities of backups: a client never reads another backup than its own, and never
//! ends a backup that another client started.

use crate::api::curl;
use crate::driver::{MAX_LEN, Request, with_disk};
use crate::kinds::{SIZE, tool};
use crate::support::{
    Kept, Served, as_arg, disk_dir, eventually, fathom, refused, short_dir, stdout_of,
};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Stdio;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

const ONE: &str = "0123456789abcdef0123456789abcdef";
const OTHER: &str = "fedcba9876543210fedcba9876543210";

fn image(dir: &Path) -> String {
    let image = dir.join("image");
    fs::write(&image, vec![1; SIZE as usize]).unwrap();
    as_arg(&image)
}

/// Returns the identity of the disk's backup.
fn identity(served: &Served) -> Option<String> {
    let info = stdout_of(&["info", &served.api(), "--json"]);
    let info: Value = serde_json::from_str(&info).expect("JSON");
    info["backup"]["id"].as_str().map(str::to_owned)
}

#[test]
fn copy_fails_if_its_backup_is_replaced_by_another_one() {
    let dir = disk_dir();
    let served = Served::start(&image(dir.path()), &[]);
    let (api, copy) = (served.api(), as_arg(&dir.path().join("copy")));
    let socket = format!("unix:{}", as_arg(&dir.path().join("b")));
    let how = ["-O", "raw", "--rate", "512k", "--nbd", &socket, "--quiet"];
    with_disk(&served.arg("s"), 1, |disk| {
        let mut full = fathom();
        full.args(["backup", "full", &api, &copy]).args(how);
        let mut full = Kept(full.stderr(Stdio::piped()).spawn().unwrap());
        let first = eventually("its backup has begun", || identity(&served));
        // Long enough to read a part of the disk, but not all of it.
        thread::sleep(Duration::from_secs(2));
        for offset in (0..SIZE).step_by(MAX_LEN) {
            let data = vec![2; MAX_LEN];
            assert!(disk.all(&[Request::Write { offset, data }])[0].is_ok());
        }
        stdout_of(&["backup", "stop", &api]);
        stdout_of(&["backup", "start", &api, "--nbd", &socket]);
        let second = identity(&served).expect("a backup");
        assert_ne!(first, second);
        let status = full.0.wait().unwrap();
        let mut said = String::new();
        let mut errors = full.0.stderr.take().unwrap();
        errors.read_to_string(&mut said).unwrap();
        assert_eq!(status.code(), Some(1), "{said}");
        assert!(said.contains("has begun since"), "{said}");
        assert!(!Path::new(&copy).exists());
        // The command has not ended the other backup.
        assert_eq!(identity(&served), Some(second));
        stdout_of(&["backup", "stop", &api]);
    });
}

#[test]
fn uri_of_a_backup_leads_to_no_other_backup() {
    let dir = disk_dir();
    let served = Served::start(&image(dir.path()), &[]);
    let api = served.api();
    let start = || stdout_of(&["backup", "start", &api]).trim_end().to_owned();
    let read = |uri: &str| {
        let args = ["convert", "-f", "raw", "-O", "raw", uri, "copy"];
        tool(dir.path(), "qemu-img", &args).status.success()
    };
    let (first, id) = (start(), identity(&served).unwrap());
    assert!(first.contains(&id) && read(&first));
    stdout_of(&["backup", "stop", &api, "--id", &id]);
    let second = start();
    assert!(read(&second) && !read(&first));
    // The disk's name and the empty name refer to the current backup.
    let name = disk_name(&served);
    for export in ["", &name] {
        let socket = served.arg("s.backup");
        assert!(
            read(&format!("nbd+unix:///{export}?socket={socket}")),
            "{export}"
        );
    }
    refused(
        1,
        &["backup", "stop", &api, "--id", &id],
        &["has begun since"],
    );
    assert!(read(&second));
    stdout_of(&["backup", "stop", &api]);
    refused(
        1,
        &["backup", "stop", &api, "--id", &id],
        &["no backup with the identity"],
    );
}

#[test]
fn whoever_ends_a_backup_names_it() {
    let dir = disk_dir();
    let served = Served::start(&image(dir.path()), &[]);
    let place = format!("/v1/disks/{}/backup", disk_name(&served));
    let named = |id: &str| format!("{place}?id={id}");
    let begun = curl(&served, "PUT", &named(ONE), &["--data", ""]);
    assert_eq!(
        (begun.status, &begun.body["id"]),
        (200, &ONE.into()),
        "{begun:?}"
    );
    for method in ["DELETE", "POST"] {
        let of = |query: &str| match method {
            "POST" => format!("{place}/go{query}"),
            _ => format!("{place}{query}"),
        };
        curl(&served, method, &of(""), &[]).is_problem(400, "invalid");
        curl(&served, method, &of("?id=short"), &[]).is_problem(400, "invalid");
        curl(&served, method, &of("?name=x"), &[]).is_problem(400, "invalid");
        curl(&served, method, &of(&format!("?id={OTHER}")), &[]).is_problem(409, "conflict");
    }
    assert_eq!(identity(&served).as_deref(), Some(ONE));
    assert_eq!(curl(&served, "DELETE", &named(ONE), &[]).status, 200);
    curl(&served, "DELETE", &named(ONE), &[]).is_problem(404, "unknown");
    // A backup never begins if its identity has ended before, even if it had not begun then.
    for ended in [ONE, OTHER] {
        curl(&served, "PUT", &named(ended), &["--data", ""]).is_problem(409, "conflict");
    }
    assert_eq!(identity(&served), None);
}

/// Returns the disk's name, escaped for a URI.
fn disk_name(served: &Served) -> String {
    let info = stdout_of(&["info", &served.api(), "--json"]);
    let info: Value = serde_json::from_str(&info).expect("JSON");
    let name = info["name"].as_str().expect("a name");
    name.replace('/', "%2F")
}

/// A backup begins slowly, because another server uses the image. A client ends the backup
/// meanwhile.
#[test]
fn backup_that_is_ended_while_it_begins_is_not_left_behind() {
    let dir = disk_dir();
    let image = image(dir.path());
    let served = Served::start(&image, &[]);
    let place = format!("/v1/disks/{}/backup", disk_name(&served));
    // The server waits for the image only for a limited time. If that was too short, the test tries
    // again.
    let other = Served::start(&image, &[]);
    let mut attempt = 0u128;
    eventually("it is ended while it begins", || {
        attempt += 1;
        let named = format!("{place}?id={attempt:032x}");
        let holder = Kept(other.start_load(1_000_000_000, &["--rw", "read"]));
        eventually("another server has it", || {
            let args = ["-f", "raw", "-c", "write 0 512", &image];
            let used = tool(dir.path(), "qemu-io", &args);
            let said = String::from_utf8_lossy(&used.stderr).into_owned();
            said.contains("lock").then_some(())
        });
        thread::scope(|scope| {
            let begin = scope.spawn(|| curl(&served, "PUT", &named, &["--data", ""]));
            eventually("it is beginning", || {
                (begin.is_finished() || is_busy(&served, &place)).then_some(())
            });
            let end = scope.spawn(|| curl(&served, "DELETE", &named, &[]));
            // The other server releases the image after this server has accepted the end of the
            // backup.
            eventually("its end is asked for", || {
                let again = curl(&served, "DELETE", &named, &[]);
                let text = again.body["detail"].as_str().unwrap_or_default();
                (text.contains("is already ending") || begin.is_finished()).then_some(())
            });
            drop(holder);
            let (begun, ended) = (begin.join().unwrap(), end.join().unwrap());
            assert_eq!(identity(&served), None, "{begun:?} {ended:?}");
            let was_ended = begun.status == 409 && ended.status == 200;
            was_ended.then_some(())
        })
    });
}

/// Returns whether an operation on the disk is in progress.
fn is_busy(served: &Served, place: &str) -> bool {
    let refused = curl(served, "DELETE", &format!("{place}?id={OTHER}"), &[]);
    let text = refused.body["detail"].as_str().unwrap_or_default();
    text.contains("being changed")
}

/// Replies to one request like a server whose backups do not begin in time. Returns the first line
/// of the request.
fn answer_late(client: &UnixStream) -> String {
    let mut reader = BufReader::new(client);
    let mut line = || {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        line.trim().to_lowercase()
    };
    let (first, mut len) = (line(), 0);
    loop {
        let header = line();
        if header.is_empty() {
            break;
        }
        if let Some(value) = header.strip_prefix("content-length:") {
            len = value.trim().parse().unwrap();
        }
    }
    reader.read_exact(&mut vec![0; len]).unwrap();
    let body = r#"{"detail": "it takes long, and goes on"}"#;
    let status = if first.starts_with("put") { 504 } else { 404 };
    let answer = format!(
        "HTTP/1.1 {status} x\r\ncontent-type: application/problem+json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    (&mut &*client).write_all(answer.as_bytes()).unwrap();
    first
}

#[test]
fn backup_whose_beginning_is_not_waited_for_is_ended() {
    let dir = short_dir();
    let (api, socket) = (dir.path().join("c"), dir.path().join("b"));
    let listener = UnixListener::bind(&api).unwrap();
    let (send, requests) = channel();
    thread::spawn(move || {
        for client in listener.incoming() {
            let client = client.unwrap();
            if send.send(answer_late(&client)).is_err() {
                return;
            }
        }
    });
    let (api, socket) = (as_arg(&api), format!("unix:{}", as_arg(&socket)));
    let start = ["backup", "start", &api, "--disk", "d", "--nbd", &socket];
    refused(1, &start, &["takes long"]);
    let requests: Vec<_> = requests.try_iter().collect();
    let [put, delete] = &requests[..] else {
        panic!("{requests:?}");
    };
    let put = put.strip_prefix("put ").expect("it begins");
    assert!(put.starts_with("/v1/disks/d/backup?id="), "{put}");
    assert_eq!(delete.strip_prefix("delete "), Some(put));
}
