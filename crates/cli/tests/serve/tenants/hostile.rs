//! Checks a tenant's process that an attacker controls, and that sends arbitrary replies to the
//! supervisor.

use super::{Served, contents, eventually, pid, short_dir, start, state};
use crate::support::{refused, run, stdout_of};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

/// Size of the largest packet in bytes.
const PACKET: usize = 192 << 10;

/// A tenant whose process is stopped. The attacker has its two sockets to the supervisor: `link`
/// for the supervisor's commands, and `gate` for the process's requests of files, and for its
/// events.
struct Attacker {
    link: OwnedFd,
    gate: OwnedFd,
}

fn call(result: libc::c_long) -> libc::c_long {
    assert!(result >= 0, "{}", std::io::Error::last_os_error());
    result
}

/// Returns copies of the process's sockets that preserve packets. The process has only the two that
/// lead to the supervisor.
fn sockets(pid: u64) -> Vec<OwnedFd> {
    // SAFETY: the calls take no pointers, and nothing else owns the descriptors that they return.
    let process = unsafe {
        let fd = call(libc::syscall(libc::SYS_pidfd_open, pid, 0));
        OwnedFd::from_raw_fd(fd as i32)
    };
    let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let numbers = open.map(|entry| entry.file_name().into_string().unwrap());
    let mut numbers: Vec<i32> = numbers.map(|name| name.parse().unwrap()).collect();
    numbers.sort_unstable();
    let copies = numbers.into_iter().filter_map(|number| {
        // SAFETY: see above; the pointers are to values that live until the calls return.
        unsafe {
            let fd = libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0);
            let fd = OwnedFd::from_raw_fd(call(fd) as i32);
            let (mut kind, mut len) = (0i32, size_of::<i32>() as u32);
            let to = (&raw mut kind).cast();
            let (level, name) = (libc::SOL_SOCKET, libc::SO_TYPE);
            let result = libc::getsockopt(fd.as_raw_fd(), level, name, to, &raw mut len);
            (result == 0 && kind == libc::SOCK_SEQPACKET).then_some(fd)
        }
    });
    copies.collect()
}

fn send(socket: &OwnedFd, message: &Value) {
    let text = message.to_string();
    // SAFETY: the buffer has this many bytes.
    let sent = unsafe { libc::send(socket.as_raw_fd(), text.as_ptr().cast(), text.len(), 0) };
    call(sent as libc::c_long);
}

/// Receives a message. `None` means that the supervisor is gone.
fn receive(socket: &OwnedFd) -> Option<Value> {
    let mut bytes = vec![0; PACKET];
    // SAFETY: the buffer has room for this many bytes.
    let len = unsafe { libc::recv(socket.as_raw_fd(), bytes.as_mut_ptr().cast(), PACKET, 0) };
    let bytes = bytes.get(..usize::try_from(len).ok()?)?;
    serde_json::from_slice(bytes).ok()
}

impl Attacker {
    /// Takes over the process of this disk, and replies to each command with what `lie` returns.
    /// Null means no reply.
    fn take_over(
        served: &Served,
        disk: &str,
        lie: impl Fn(&Value) -> Value + Send + 'static,
    ) -> Attacker {
        let process = pid(served, disk);
        crate::support::send("STOP", process);
        let mut sockets = sockets(process).into_iter();
        let (link, gate) = (sockets.next().unwrap(), sockets.next().unwrap());
        assert!(sockets.next().is_none());
        let answers = link.try_clone().unwrap();
        thread::spawn(move || {
            while let Some(message) = receive(&answers) {
                let Some(ask) = message.get("Ask") else {
                    continue;
                };
                let content = lie(&ask["ask"]["command"]);
                if !content.is_null() {
                    let answer = json!({"number": ask["number"], "answer": {"Ok": content}});
                    send(&answers, &json!({ "Answer": answer }));
                }
            }
        });
        Attacker { link, gate }
    }

    fn tell(&self, happened: &Value) {
        send(&self.gate, &json!({ "Happened": happened }));
    }
}

/// Returns what the disk's own process shows, for an attacker to modify.
fn shown(served: &Served, disk: &str) -> Value {
    json!({"options": {}, "state": state(served, disk)})
}

fn get(served: &Served, path: &str) -> UnixStream {
    let mut stream = UnixStream::connect(served.api()).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\nHost: x\r\n\r\n").unwrap();
    stream
}

fn metrics(served: &Served) -> String {
    let mut page = String::new();
    get(served, "/metrics").read_to_string(&mut page).unwrap();
    page
}

fn add(served: &Served, name: &str, more: &[&str]) {
    let (api, socket) = (served.api(), served.arg(&format!("{name}.s")));
    let disk = ["disk", "add", "--server", &api, name, "memory:12M"];
    stdout_of(&[&disk[..], &["--vhost-user", &socket], more].concat());
}

#[test]
fn hostile_answers_change_nothing_of_others_and_no_file() {
    let served = start(short_dir(), &[]);
    add(
        &served,
        "good",
        &["--filter", "throttle:iops-total=100,group=g"],
    );
    add(&served, "evil", &[]);
    let kept = |disk: &str| fs::read_to_string(served.path(&format!("disks/{disk}.toml"))).unwrap();
    let before = ["good", "evil"].map(kept);
    let mut lies = shown(&served, "evil");
    lies["state"]["name"] = "good".into();
    lies["state"]["filters"] = json!([{"name": "throttle", "options": {"group": "mine"}}]);
    lies["state"]["disk"] = "\u{1b}[2J/etc/shadow".into();
    lies["options"] = json!({"name": "good", "image": "/etc/shadow", "allow-dirs": ["/"]});
    let switched = json!({"name": "evil", "image": "/etc/shadow", "allow-dirs": ["/"]});
    let answers = lies.clone();
    let attacker = Attacker::take_over(&served, "evil", move |command| {
        let name = command.as_object().and_then(|it| it.keys().next().cloned());
        match name.as_deref().or(command.as_str()) {
            Some("BeginSwitch") => switched.clone(),
            Some("Measure") => json!({"info": 7}),
            Some("Resize") => json!({"size": 1u64 << 60}),
            _ => answers.clone(),
        }
    });
    let api = served.api();
    // The attacker cannot give the disk another image.
    let overlay = served.arg("overlay");
    let snapshot = ["snapshot", &api, "--disk", "evil", &overlay];
    refused(1, &snapshot, &["disk 'evil'", "snapshots"]);
    refused(
        1,
        &["mirror", "complete", &api, "--disk", "evil"],
        &["disk 'evil'"],
    );
    // The attacker cannot give the disk another size.
    refused(
        1,
        &["resize", &api, "--disk", "evil", "24M"],
        &["disk 'evil'", "malformed reply"],
    );
    // The attacker cannot change the limits of another disk by pretending to be in a group.
    let _ = run(&["group", "set", "mine", "iops-total=1", "--server", &api]);
    let listed = stdout_of(&["group", "list", "--server", &api]);
    let of_good: Vec<_> = listed
        .lines()
        .filter(|line| line.contains("good"))
        .collect();
    assert_eq!(of_good, ["g (tenant good): throttle:iops-total=100: good"]);
    // The attacker cannot change what is shown of other disks.
    let client = fathom_client::Client::connect(std::path::Path::new(&api)).unwrap();
    let all: Value = client.get(&["v1", "disks"]).send().unwrap();
    let mut names: Vec<_> = { all["disks"].as_array().unwrap().iter() }
        .map(|disk| {
            (
                disk["options"]["name"].clone(),
                disk["state"]["name"].clone(),
            )
        })
        .collect();
    names.sort_by_key(|(name, _)| name.to_string());
    let same = |name: &str| (json!(name), json!(name));
    assert_eq!(names, [same("evil"), same("good")]);
    assert!(!all.to_string().contains("shadow"), "{all}");
    // The attacker cannot change the metrics of other disks.
    let page = metrics(&served);
    assert!(
        page.contains(" 200 OK") && page.contains("disk=\"good\""),
        "{page}"
    );
    assert!(!page.contains("disk=\"evil\""), "{page}");
    assert_eq!(["good", "evil"].map(kept), before);
    drop(attacker);
}

#[test]
fn hostile_events_are_the_tenants_own() {
    let served = start(
        short_dir(),
        &[("good", "memory:12M", ""), ("evil", "memory:12M", "")],
    );
    let attacker = Attacker::take_over(&served, "evil", |_| Value::Null);
    let events = BufReader::new(get(&served, "/v1/events"));
    let mut lines = events
        .lines()
        .map(Result::unwrap)
        .filter(|line| line.starts_with('{'));
    // Sends events repeatedly, because the first ones may come before the client is connected.
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let gate = attacker.gate.try_clone().unwrap();
    let teller = thread::spawn(move || {
        while stopped.recv_timeout(Duration::from_millis(20)).is_err() {
            let forged = [
                json!({"event": "restarted", "tenant": "good"}),
                json!({"event": "reloaded"}),
                json!({"event": "removed", "disk": "good"}),
                json!({"event": "error", "text": "the server\n ends"}),
                json!({"event": "changed", "disk": "evil"}),
            ];
            for happened in forged {
                send(&gate, &json!({ "Happened": happened }));
            }
        }
    });
    for _ in 0..6 {
        let line: Value = serde_json::from_str(&lines.next().unwrap()).unwrap();
        match line["event"].as_str().unwrap() {
            "changed" => assert_eq!(line["disk"], "evil"),
            "error" => assert_eq!(line["text"], "tenant 'evil': the server\\n ends"),
            _ => panic!("{line}"),
        }
    }
    stop.send(()).unwrap();
    teller.join().unwrap();
    attacker.tell(&json!({"event": "changed", "disk": "evil"}));
}

/// After any malformed message, the server ends the tenant, and another process gets its disk.
#[test]
fn noise_ends_the_tenant_only() {
    let served = start(
        short_dir(),
        &[("good", "memory:12M", ""), ("evil", "memory:12M", "")],
    );
    let good = pid(&served, "good");
    let deep = "[".repeat(100_000);
    let pieces: [&[u8]; 5] = [
        b"\x01short",
        b"{",
        b"\xff\xff",
        deep.as_bytes(),
        b"{\"Answer\":7}",
    ];
    for noise in pieces {
        let before = pid(&served, "evil");
        let attacker = Attacker::take_over(&served, "evil", |_| Value::Null);
        let (at, len) = (noise.as_ptr().cast(), noise.len());
        // SAFETY: the buffer has this many bytes.
        let sent = unsafe { libc::send(attacker.link.as_raw_fd(), at, len, 0) };
        call(sent as libc::c_long);
        eventually("another process has the disk", || {
            let client =
                fathom_client::Client::connect(std::path::Path::new(&served.api())).ok()?;
            let shown: Value = client.get(&["v1", "disks", "evil"]).send().ok()?;
            let now = shown["state"]["pid"].as_u64()?;
            (now != before && now != 0).then_some(())
        });
    }
    assert_eq!(pid(&served, "good"), good);
    assert!(contents(&served, "good").iter().all(|byte| *byte == 0));
}

/// The description of the disk has several hundred KiB.
#[test]
fn large_reply_arrives_and_the_tenant_goes_on() {
    let alarms: Vec<_> = (1..4000).map(|n| format!("'older={n}s'")).collect();
    let alarms = format!("alarms = [{}]", alarms.join(", "));
    let served = start(short_dir(), &[("a", "memory:12M", &alarms)]);
    let before = pid(&served, "a");
    let client = fathom_client::Client::connect(std::path::Path::new(&served.api())).unwrap();
    let shown: Value = client.get(&["v1", "disks", "a"]).send().unwrap();
    assert_eq!(shown["state"]["alarms"].as_array().unwrap().len(), 3999);
    assert!(shown.to_string().len() > PACKET);
    let page = metrics(&served);
    let counted = page
        .lines()
        .filter(|line| line.starts_with("fathom_alarms_total{"));
    assert_eq!(counted.count(), 3999);
    assert_eq!(pid(&served, "a"), before);
    stdout_of(&["stats", &served.api(), "--disk", "a"]);
}
