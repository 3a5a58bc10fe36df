//! Checks the API with other HTTP clients: curl, and schemathesis, which generates requests from
//! the API's description.

use crate::exercise::variable;
use crate::support::{Kept, Served, disk_dir, eventually, fathom, stdout_of};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

/// Starts a server without disks, with NBD on the socket `n` and the API on the socket `c`.
fn server() -> Served {
    server_with("")
}

fn server_with(of_api: &str) -> Served {
    Served::waiting(of_api, "")
}

/// A reply of the API.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    head: String,
    pub body: Value,
}

impl Answer {
    fn header(&self, name: &str) -> &str {
        let lines = self.head.lines();
        let mut fields = lines.filter_map(|line| line.split_once(": "));
        let found = fields.find(|(field, _)| field.eq_ignore_ascii_case(name));
        found
            .unwrap_or_else(|| panic!("no {name}: {}", self.head))
            .1
    }

    /// Checks that the reply is an error in the format of RFC 9457.
    pub fn is_problem(&self, status: u16, word: &str) {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.header("content-type"), "application/problem+json");
        assert_eq!(self.body["status"], status);
        let kind = format!("urn:fathom:problem:{word}");
        assert_eq!(self.body["type"], kind, "{self:?}");
        let detail = self.body["detail"].as_str().unwrap();
        assert!(!detail.is_empty() && !detail.contains('\n'), "{detail}");
    }
}

pub fn curl(served: &Served, method: &str, place: &str, more: &[&str]) -> Answer {
    let output = Command::new("curl")
        .args([
            "--silent",
            "--show-error",
            "--include",
            "--max-time",
            "60",
            "--unix-socket",
        ])
        .arg(served.path("c"))
        .args(["--request", method, &format!("http://fathom{place}")])
        .args(more)
        .stdin(Stdio::null())
        .output()
        .expect("curl is installed by `make setup`");
    let said = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let (head, body) = said.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap();
    Answer {
        status: status.parse().unwrap(),
        head: head.to_owned(),
        body: serde_json::from_str(body).unwrap_or(Value::Null),
    }
}

fn put(served: &Served, place: &str, body: &Value, more: &[&str]) -> Answer {
    let body = body.to_string();
    curl(served, "PUT", place, &[&["--data", &*body], more].concat())
}

#[test]
fn a_disk_is_a_resource() {
    let served = server();
    let a = "/v1/disks/a";
    assert_eq!(
        curl(&served, "GET", "/v1/disks", &[]).body,
        json!({ "disks": [], "failed": [] })
    );
    curl(&served, "GET", a, &[]).is_problem(404, "unknown");
    let options = json!({ "image": "memory:1M", "filters": ["delay:read=1us"], "iothreads": 2 });
    put(&served, a, &options, &["--header", "If-Match: *"]).is_problem(412, "changed");
    let made = put(&served, a, &options, &["--header", "If-None-Match: *"]);
    assert_eq!(made.status, 201, "{made:?}");
    assert_eq!(made.body["options"]["filters"], json!(["delay:read=1us"]));
    assert_eq!(made.body["state"]["size"], 1 << 20);
    assert_eq!(made.body["state"]["workers"].as_array().unwrap().len(), 2);
    // The same options again change nothing. Another image is a conflict.
    let again = put(&served, a, &options, &[]);
    assert_eq!(
        (again.status, &again.body["options"]),
        (200, &made.body["options"])
    );
    assert_eq!(again.header("etag"), made.header("etag"));
    put(&served, a, &options, &["--header", "If-None-Match: *"]).is_problem(412, "exists");
    put(&served, a, &json!({ "image": "memory:2M" }), &[]).is_problem(409, "conflict");
    let shown = curl(&served, "GET", a, &[]);
    assert_eq!(shown.header("etag"), made.header("etag"));
    let uri = format!("nbd+unix:///a?socket={}", served.arg("n"));
    stdout_of(&["bench", "--nbd", &uri, "--number-ios", "100"]);
    let stats = curl(&served, "GET", "/v1/disks/a/stats", &[]);
    assert!(
        stats.body["operations"]
            .as_array()
            .is_some_and(|all| !all.is_empty())
    );
    let changed = curl(
        &served,
        "PATCH",
        "/v1/disks/a/filters/delay",
        &["--data", r#"{"read":"2us"}"#],
    );
    assert_eq!(
        changed.body,
        json!({ "name": "delay", "options": { "read": "2us" } })
    );
    let then = curl(&served, "GET", a, &[]);
    assert_ne!(then.header("etag"), shown.header("etag"), "it is another");
    curl(
        &served,
        "PATCH",
        "/v1/disks/a/filters/pause",
        &["--data", "{}"],
    )
    .is_problem(400, "invalid");
    let resize = |body: &str| curl(&served, "POST", "/v1/disks/a/resize", &["--data", body]);
    curl(&served, "POST", "/v1/disks/a/resize", &[]).is_problem(422, "failed");
    assert_eq!(resize(r#"{"size":"4M"}"#).body, json!({ "size": 4 << 20 }));
    resize(r#"{"size":"2M"}"#).is_problem(422, "failed");
    let smaller = resize(r#"{"size":2097152,"shrink":true}"#);
    assert_eq!(smaller.body, json!({ "size": 2 << 20 }));
    resize(r#"{"size":"2M","more":1}"#).is_problem(400, "invalid");
    put(&served, "/v1/disks/a/trace", &json!({ "file": "t" }), &[]).is_problem(400, "invalid");
    let trace = json!({ "file": served.arg("trace") });
    assert_eq!(put(&served, "/v1/disks/a/trace", &trace, &[]).body, trace);
    assert_eq!(
        curl(&served, "DELETE", "/v1/disks/a/trace", &[]).status,
        204
    );
    let now = curl(&served, "GET", a, &[]);
    assert_eq!(now.body["options"]["image"], "memory:2097152");
    let etag = format!("If-Match: {}", now.header("etag"));
    curl(&served, "DELETE", a, &["--header", "If-Match: \"x\""]).is_problem(412, "changed");
    let gone = curl(&served, "DELETE", a, &["--header", &etag]);
    assert_eq!((gone.status, &gone.body["refused"]), (200, &json!(0)));
    curl(&served, "DELETE", a, &[]).is_problem(404, "unknown");
    // The command line sees the same disks.
    stdout_of(&["disk", "add", "--server", &served.api(), "b", "null:1M"]);
    let all = curl(&served, "GET", "/v1/disks", &[]).body;
    assert_eq!(all["disks"][0]["options"]["name"], "b");
}

/// Sends the last byte of both requests at nearly the same time.
#[test]
fn one_of_two_changes_of_the_same_version_succeeds() {
    let served = server();
    let a = "/v1/disks/a";
    put(&served, a, &json!({ "image": "null:1M" }), &[]);
    for round in 0..24u32 {
        let version = curl(&served, "GET", a, &[]).header("etag").to_owned();
        // The server changes filters in place. For other options it replaces the disk by a new one.
        let changes = [0, 1].map(|which| match round % 2 {
            0 => json!({ "image": "null:1M", "filters": [format!("delay:read={}us", 2 * round + which)] }),
            _ => json!({ "image": "null:1M", "iothreads": 2 + (2 * round + which) % 4 }),
        });
        let mut sent = changes.map(|change| {
            let body = change.to_string();
            let (begin, end) = body.split_at(body.len() - 1);
            let mut client = UnixStream::connect(served.path("c")).unwrap();
            let head = format!(
                "PUT {a} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nIf-Match: {version}\r\n\
                 Content-Length: {}\r\n\r\n{begin}",
                body.len()
            );
            client.write_all(head.as_bytes()).unwrap();
            (client, end.to_owned())
        });
        for (client, end) in &mut sent {
            client.write_all(end.as_bytes()).unwrap();
        }
        let mut statuses = sent.map(|(mut client, _)| {
            let mut answer = String::new();
            client.read_to_string(&mut answer).unwrap();
            answer.split(' ').nth(1).unwrap().to_owned()
        });
        statuses.sort();
        assert_eq!(statuses, ["200", "412"], "round {round}");
    }
}

#[test]
fn what_cannot_be_done_is_told_as_a_problem() {
    let served = server();
    for (method, place, more, status, word) in [
        ("GET", "/", &[][..], 404, "unknown"),
        ("GET", "/v1/disks/", &[], 404, "unknown"),
        ("POST", "/v1/disks", &[], 405, "method"),
        ("GET", "/v1/disks/%ff", &[], 400, "invalid"),
        (
            "PUT",
            "/v1/disks/a%2fb",
            &["--data", r#"{"image":"null:1G"}"#],
            400,
            "invalid",
        ),
        ("PUT", "/v1/disks/a", &[], 400, "invalid"),
        ("PUT", "/v1/disks/a", &["--data", "{}"], 400, "invalid"),
        ("PUT", "/v1/disks/a", &["--data", "[1]"], 400, "invalid"),
        (
            "PUT",
            "/v1/disks/a",
            &["--data", r#"{"image":"null:x"}"#],
            400,
            "invalid",
        ),
        (
            "PUT",
            "/v1/disks/a",
            &["--data", r#"{"image":"null:1G","quues":1}"#],
            400,
            "invalid",
        ),
        (
            "PUT",
            "/v1/disks/a",
            &["--data", r#"{"image":"null:1G","name":"b"}"#],
            400,
            "invalid",
        ),
        (
            "PUT",
            "/v1/disks/a",
            &["--data", r#"{"image":"/nonexistent"}"#],
            422,
            "failed",
        ),
        (
            "PUT",
            "/v1/disks/a",
            &["--data", r#"{"image":"disk.img"}"#],
            400,
            "invalid",
        ),
        ("DELETE", "/v1/disks/a?force=perhaps", &[], 400, "invalid"),
    ] {
        curl(&served, method, place, more).is_problem(status, word);
    }
    let large = format!("{{\"image\":\"{}\"}}", "x".repeat(100_000));
    fs::write(served.path("large"), large).unwrap();
    let large = format!("@{}", served.arg("large"));
    curl(&served, "PUT", "/v1/disks/a", &["--data", &large]).is_problem(413, "too-large");
}

#[test]
fn the_end_is_not_kept_waiting_by_clients_of_the_api() {
    let mut served = server();
    let mut client = UnixStream::connect(served.path("c")).unwrap();
    client
        .write_all(b"GET /v1/server HTTP/1.1\r\nHost: x\r\n\r\n")
        .unwrap();
    let mut begin = [0; 12];
    client.read_exact(&mut begin).unwrap();
    assert_eq!(&begin, b"HTTP/1.1 200");
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    assert!(!served.path("c").exists());
}

#[test]
fn what_happens_is_told_line_by_line() {
    let dir = disk_dir();
    let image = dir.path().join("image");
    fs::write(&image, vec![0; 1 << 20]).unwrap();
    let mut served = server();
    let listen = Command::new("curl")
        .args(["--silent", "--no-buffer", "--unix-socket", &served.api()])
        .arg("http://fathom/v1/events")
        .stdout(Stdio::piped())
        .spawn();
    let mut listener = Kept(listen.expect("curl is installed by `make setup`"));
    let mut lines = BufReader::new(listener.0.stdout.take().unwrap()).lines();
    let mut next = || -> Value {
        let line = lines.next().expect("it goes on").unwrap();
        let mut line: Value = serde_json::from_str(&line).unwrap();
        let members = line.as_object_mut().unwrap();
        assert!(members.remove("time_ms").unwrap().is_u64());
        line
    };
    // curl gets events only after it has connected. Adds disks until it reports one of them.
    let mut n = 0;
    let mut heard = std::thread::scope(|scope| {
        let first = scope.spawn(&mut next);
        eventually("an event", || {
            n += 1;
            let place = format!("/v1/disks/first{n}");
            assert_eq!(
                put(&served, &place, &json!({ "image": "null:1M" }), &[]).status,
                201
            );
            first.is_finished().then_some(())
        });
        first.join().unwrap()
    });
    while heard["disk"] != format!("first{n}") {
        heard = next();
    }
    assert_eq!(heard["event"], "added");
    let disk = json!({ "image": image, "filters": ["delay"], "vhost-user": served.arg("s") });
    assert_eq!(put(&served, "/v1/disks/a", &disk, &[]).status, 201);
    assert_eq!(next(), json!({ "event": "added", "disk": "a" }));
    let uri = format!("nbd+unix:///a?socket={}", served.arg("n"));
    let bench = |target: &[&str]| {
        let child = fathom()
            .arg("bench")
            .args(target)
            .args(["--number-ios", "10"])
            .spawn();
        let mut child = child.unwrap();
        assert!(child.wait().unwrap().success());
        format!("process {}", child.id())
    };
    for (by, client) in [
        ("nbd", bench(&["--nbd", &uri])),
        ("vhost-user", bench(&["--vhost-user", &served.arg("s")])),
    ] {
        for event in ["attached", "detached"] {
            let wanted = json!({ "event": event, "disk": "a", "by": by, "client": client });
            assert_eq!(next(), wanted);
        }
    }
    let filter = "/v1/disks/a/filters/delay";
    curl(&served, "PATCH", filter, &["--data", r#"{"read":"1us"}"#]);
    assert_eq!(next(), json!({ "event": "changed", "disk": "a" }));
    fs::write(&image, vec![0; 2 << 20]).unwrap();
    curl(&served, "POST", "/v1/disks/a/resize", &[]);
    assert_eq!(
        next(),
        json!({ "event": "resized", "disk": "a", "size": 2 << 20 })
    );
    curl(&served, "DELETE", "/v1/disks/a", &[]);
    assert_eq!(next(), json!({ "event": "removed", "disk": "a" }));
    served.signal("HUP");
    assert_eq!(next(), json!({ "event": "reloaded" }));
    let conf = fs::read_to_string(served.path("conf")).unwrap();
    fs::write(served.path("conf"), format!("sandbox = 'log'\n{conf}")).unwrap();
    served.signal("HUP");
    assert_eq!(next(), json!({ "event": "reloaded" }));
    served.wait_for("disks-dir and sandbox take effect only after a restart");
    // A reload fails if the configuration file is missing.
    fs::remove_file(served.path("conf")).unwrap();
    served.signal("HUP");
    let error = next();
    assert_eq!(error["event"], "error");
    assert!(
        error["text"]
            .as_str()
            .unwrap()
            .contains("no disk was changed"),
        "{error}"
    );
    assert_eq!(served.terminate().0, Some(0));
    assert!(
        lines.next().is_none_or(|line| line.is_err()),
        "it ends with the server"
    );
}

/// Needs root, to run clients as other users.
#[test]
fn groups_may_do_all_or_look() {
    let served = server_with(", group = '64002', read-group = '64003'");
    let open = fs::Permissions::from_mode(0o755);
    fs::set_permissions(served.dir.path(), open).unwrap();
    let status = |group: &[&str], method: &str| {
        let output = Command::new("setpriv")
            .args(["--reuid", "64001"])
            .args(group)
            .args([
                "curl",
                "--silent",
                "--output",
                "/dev/null",
                "--write-out",
                "%{http_code}",
            ])
            .arg("--unix-socket")
            .arg(served.path("c"))
            .args(["--request", method, "http://fathom/v1/disks/a"])
            .args(["--data", r#"{"image":"null:1M"}"#])
            .stdin(Stdio::null())
            .output()
            .expect("setpriv is part of util-linux");
        String::from_utf8(output.stdout).unwrap()
    };
    let none = ["--regid", "64001", "--clear-groups"];
    let main = ["--regid", "64002", "--clear-groups"];
    let more = ["--regid", "64001", "--groups", "64000,64002"];
    let reads = ["--regid", "64001", "--groups", "64003"];
    for (group, got, put) in [
        (&none[..], "403", "403"),
        (&reads, "404", "403"),
        (&main, "404", "201"),
        (&more, "200", "200"),
        (&reads, "200", "403"),
    ] {
        assert_eq!(status(group, "GET"), got, "{group:?}");
        assert_eq!(status(group, "PUT"), put, "{group:?}");
    }
    // Without these groups, other users cannot even connect.
    let private = server();
    let mode = fs::metadata(private.path("c"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
}

/// Sends the head of a request, and its body once a reply has arrived or 2 s have passed. Prints
/// the status of the reply.
const BODY_AFTER_THE_HEAD: &str = r#"
import select, socket, sys
client = socket.socket(socket.AF_UNIX)
client.connect(sys.argv[1])
head = f"{sys.argv[2]} {sys.argv[3]} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 20000\r\n\r\n"
client.sendall(head.encode())
select.select([client], [], [], 2)
for _ in range(20):
    client.sendall(b" " * 1000)
answer = b""
while data := client.recv(65536):
    answer += data
print(answer.split()[1].decode())
"#;

#[test]
fn error_reaches_a_client_that_sends_its_body_after_the_head() {
    let served = server_with(", read-group = '64003'");
    let open = fs::Permissions::from_mode(0o755);
    fs::set_permissions(served.dir.path(), open).unwrap();
    let (nobody, reads) = (["--regid", "64001"], ["--regid", "64003"]);
    for (who, method, place, status) in [
        (Some(nobody), "PUT", "/v1/disks/a", "403"),
        (Some(reads), "PUT", "/v1/disks/a", "403"),
        (None, "PUT", "/v1/nowhere", "404"),
        (None, "DELETE", "/v1/disks/a", "404"),
        (None, "POST", "/v1/disks/a", "405"),
    ] {
        let mut command = match who {
            Some(group) => {
                let mut command = Command::new("setpriv");
                command
                    .args(["--reuid", "64001", "--clear-groups"])
                    .args(group);
                command.arg("/usr/bin/python3");
                command
            }
            None => Command::new("/usr/bin/python3"),
        };
        command.args(["-c", BODY_AFTER_THE_HEAD, &served.arg("c"), method, place]);
        let output = command.stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(said.trim(), status, "{method} {place}: {errors}");
    }
}

/// Forwards connections from a TCP port, which it prints, to a Unix socket: schemathesis needs TCP.
const BRIDGE: &str = r#"
import socket, sys, threading
def pump(source, sink):
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        pass
    try:
        # Also of a side that was reset: the other one waits for it.
        sink.shutdown(socket.SHUT_RDWR if source.family == socket.AF_UNIX else socket.SHUT_WR)
    except OSError:
        pass
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    client, _ = server.accept()
    daemon = socket.socket(socket.AF_UNIX)
    daemon.connect(sys.argv[1])
    for ends in (client, daemon), (daemon, client):
        threading.Thread(target=pump, args=ends, daemon=True).start()
"#;

#[test]
fn a_client_that_makes_up_requests_finds_what_is_described() {
    let served = server();
    let bridge = Command::new("python3")
        .args(["-c", BRIDGE, &served.arg("c")])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn();
    let mut bridge = Kept(bridge.expect("python3 is installed by `make setup`"));
    let mut port = String::new();
    let said = bridge.0.stdout.as_mut().unwrap();
    eventually("a port", || {
        let mut byte = [0];
        said.read_exact(&mut byte).unwrap();
        port.push(byte[0].into());
        port.ends_with('\n').then_some(())
    });
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../venv/bin/schemathesis");
    let examples = 15 * variable("FATHOM_ROUNDS").unwrap_or(1);
    let seed = variable("FATHOM_SEED").unwrap_or(1);
    let run = |more: &[&str]| {
        let output = Command::new(&program)
            .arg("--config-file")
            .arg(tests.join("tests/serve/schemathesis.toml"))
            .args(["run", "--checks", "all", "--no-color"])
            .args(["--max-examples", &examples.to_string()])
            .args(["--seed", &seed.to_string()])
            .arg(format!("http://127.0.0.1:{}/openapi.json", port.trim()))
            .args(more)
            .current_dir(served.dir.path())
            .stdin(Stdio::null())
            .output()
            .expect("schemathesis is installed by `make setup`");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{said}{}", served.log());
        assert!(said.contains("Selected: "), "{said}");
    };
    run(&[]);
    // Tests again with a disk that exists and is not removed.
    let options = json!({ "image": "null:1M", "filters": ["delay"] });
    assert_eq!(put(&served, "/v1/disks/there", &options, &[]).status, 201);
    fs::write(
        served.path("schemathesis.toml"),
        fs::read_to_string(tests.join("tests/serve/schemathesis.toml")).unwrap()
            + "[parameters]\n\"path.name\" = \"there\"\n\"path.filter\" = \"delay\"\n",
    )
    .unwrap();
    // Starts no traces either, because they would be written to generated paths.
    let others = [
        "--exclude-operation-id",
        "removeDisk",
        "--exclude-operation-id",
        "startTrace",
    ];
    run(&others);
    assert_eq!(curl(&served, "GET", "/v1/disks/there", &[]).status, 200);
}
