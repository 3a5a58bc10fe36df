//! Checks `fathom upgrade`: guests do not notice upgrades, and an upgrade that fails changes
//! nothing.

mod changes;
mod clients;
mod freezing;
mod kills;
mod parts;
mod tenants;

use crate::driver::{Request, with_disk};
use crate::kinds::qemu_img;
use crate::support::{
    Served, as_arg, disk_dir, eventually, fathom, refused, run, short_dir, stdout_of,
};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread;

const SIZE: u64 = 8 << 20;
const BLOCK: usize = 4096;

/// A server that may have successors. The last one is killed when this is dropped.
struct Chain {
    server: Served,
    pid: u64,
}

impl Chain {
    fn start(disk: &str, args: &[&str]) -> Chain {
        let server = Served::start(disk, args);
        let pid = server.child.id().into();
        Chain { server, pid }
    }

    fn upgrade(&mut self, args: &[&str]) -> Value {
        let api = self.server.api();
        let answer = stdout_of(&[&["upgrade", &api, "--json"], args].concat());
        let answer: Value = serde_json::from_str(&answer).unwrap();
        let pid = answer["pid"].as_u64().unwrap();
        assert_ne!(pid, self.pid);
        self.pid = pid;
        answer
    }

    /// Checks that an upgrade is refused with one line that has these words.
    fn refused(&self, args: &[&str], words: &str) {
        let api = self.server.api();
        let output = run(&[&["upgrade", &api], args].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success());
        assert!(said.contains(words) && said.lines().count() == 1, "{said}");
    }

    fn ask(&self, what: &[&str]) -> Value {
        let api = self.server.api();
        let answer = stdout_of(&[&[what[0], &api, "--json"], &what[1..]].concat());
        serde_json::from_str(&answer).unwrap()
    }

    fn requests(&self) -> u64 {
        let stats = self.ask(&["stats"]);
        let operations = stats["operations"].as_array().unwrap().iter();
        let total = |op: &Value| op["stages"].as_array().unwrap().last().unwrap()["count"].as_u64();
        operations.map(|op| total(op).unwrap()).sum()
    }

    fn quit(mut self) {
        stdout_of(&["quit", &self.server.api()]);
        eventually("its end", || {
            // Reaps the first server, which is a child of this process.
            let _ = self.server.child.try_wait();
            (!Path::new(&format!("/proc/{}", self.pid)).exists()).then_some(())
        });
        assert!(!self.server.path("s").exists(), "its socket is left");
        assert!(!self.server.path("c").exists(), "its API's socket is left");
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        if self.pid != u64::from(self.server.child.id()) {
            self.server.succeeded_by(self.pid);
        }
    }
}

/// Returns a block that tells where and in which round it was written.
fn block(at: u64, round: u64) -> Vec<u8> {
    let words = (0..BLOCK as u64 / 8).map(|i| at ^ round << 32 ^ i << 56);
    words.flat_map(u64::to_le_bytes).collect()
}

/// Writes all of a disk and reads it again, until `stop` is set. `rounds` counts the complete
/// rounds, which determine the contents of the disk.
fn load(socket: &str, queues: usize, stop: &AtomicBool, rounds: &AtomicU64) {
    let places = || (0..SIZE).step_by(BLOCK * 4);
    with_disk(socket, queues, |disk| {
        while !stop.load(SeqCst) {
            let round = rounds.load(SeqCst) + 1;
            let write = |offset| Request::Write {
                offset,
                data: block(offset, round),
            };
            let read = |offset| Request::Read { offset, len: BLOCK };
            let written = disk.all(&places().map(write).collect::<Vec<_>>());
            assert!(written.iter().all(Result::is_ok), "round {round}");
            for (offset, found) in places().zip(disk.all(&places().map(read).collect::<Vec<_>>())) {
                assert!(
                    found.unwrap() == block(offset, round),
                    "{offset} in round {round}"
                );
            }
            rounds.store(round, SeqCst);
        }
    });
}

fn image(dir: &Path, format: &str) -> String {
    let size = SIZE.to_string();
    qemu_img(dir, &["create", "-f", format, "i", &size]);
    as_arg(&dir.join("i"))
}

#[test]
fn a_loaded_guest_sees_nothing_of_twenty_upgrades() {
    for (format, queues) in [("raw", 2), ("qcow2", 2), ("qed", 1)] {
        let dir = disk_dir();
        let image = image(dir.path(), format);
        let mut chain = Chain::start(&image, &["--format", format, "--iothreads", "2"]);
        let socket = chain.server.arg("s");
        let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            let _stop = StopAtEnd(&stop);
            let load = scope.spawn(|| load(&socket, queues, &stop, &rounds));
            let mut pauses = Vec::new();
            for _ in 0..20 {
                // Between two upgrades, the load completes at least one round.
                let before = rounds.load(SeqCst);
                eventually("progress", || {
                    assert!(!load.is_finished());
                    (rounds.load(SeqCst) > before).then_some(())
                });
                pauses.push(chain.upgrade(&[])["pause_ms"].as_f64().unwrap());
            }
            eprintln!("{format}: {pauses:.1?} ms");
        });
        let rounds = rounds.load(SeqCst);
        let blocks = SIZE / (BLOCK as u64 * 4);
        assert_eq!(chain.requests(), 2 * rounds * blocks, "requests counted");
        let log = chain.server.log();
        assert_eq!(log.matches("front-end connected").count(), 1, "{log}");
        assert!(!log.contains("ERROR") && !log.contains("WARN"), "{log}");
        // The disk has the data of the last round.
        with_disk(&socket, 1, |disk| {
            let contents = disk.contents();
            for at in (0..SIZE).step_by(BLOCK * 4) {
                let found = &contents[at as usize..at as usize + BLOCK];
                assert!(found == block(at, rounds), "{at}");
            }
        });
        chain.quit();
        if format != "raw" {
            qemu_img(dir.path(), &["check", "-f", format, "i"]);
        }
    }
}

/// Stops a load when dropped, even if the test fails.
struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

fn program(dir: &Path, name: &str, text: &str) -> String {
    let path = dir.join(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    as_arg(&path)
}

/// Makes a program that speaks the protocol of a successor, as far as `body` says.
fn speaks(dir: &Path, name: &str, body: &str) -> String {
    let head = "#!/usr/bin/python3\n\
        import json, os, socket, struct, time\n\
        s = socket.socket(fileno=0)\n\
        def say(word):\n\
        \x20   text = json.dumps(word).encode()\n\
        \x20   s.sendall(b'fathom>1' + struct.pack('QQ', len(text), 0) + text)\n\
        def exactly(n):\n\
        \x20   got = b''\n\
        \x20   while len(got) < n:\n\
        \x20       part = s.recv(n - len(got))\n\
        \x20       if not part: os._exit(0)\n\
        \x20       got += part\n\
        \x20   return got\n\
        def hear():\n\
        \x20   text, files = struct.unpack('QQ', exactly(24)[8:])\n\
        \x20   exactly((files + 249) // 250)\n\
        \x20   return json.loads(exactly(text))\n";
    program(dir, name, &format!("{head}{body}\n"))
}

/// Accepts the server's versions, and receives its whole handover state.
const HELLO: &str = "say({'oldest': 1, 'newest': 2})\nhear()\n";

/// Makes a successor that fails when the disks already belong to it.
fn fails_late(dir: &Path) -> String {
    let body = "say('Prepared')\nhear()\nsay({'Refused': 'locked'})\ntime.sleep(60)";
    speaks(dir, "fails-late", &format!("{HELLO}{body}"))
}

/// Each of these programs fails to take over in another way.
#[test]
fn a_server_whose_successor_fails_goes_on() {
    let dir = disk_dir();
    let image = image(dir.path(), "raw");
    let mut chain = Chain::start(&image, &[]);
    let program = |name: &str, text: &str| program(dir.path(), name, text);
    let speak = |name: &str, body: &str| speaks(dir.path(), name, body);
    let hello = HELLO;
    let cases = [
        (
            program("gone", "#!/bin/sh\nexit 3\n"),
            "connection is closed",
        ),
        (
            program("strange", "#!/bin/sh\nhead -c 100 /dev/zero >&0\n"),
            "not a message",
        ),
        (
            speak("newer", "say({'oldest': 7, 'newest': 9})\nhear()"),
            "versions 7 to 9",
        ),
        (
            speak("older", "say({'oldest': 0, 'newest': 0})\nhear()"),
            "versions 0 to 0",
        ),
        (
            speak("dies", "say({'oldest': 1, 'newest': 1})"),
            "connection is closed",
        ),
        (speak("after", hello), "connection is closed"),
        (
            speak(
                "cannot",
                &format!("{hello}say({{'Refused': 'no room'}})\ntime.sleep(60)"),
            ),
            "no room",
        ),
        (
            speak("babbles", &format!("{hello}say('Bananas')\ntime.sleep(60)")),
            "malformed message",
        ),
        (
            speak("dies-late", &format!("{hello}say('Prepared')\nhear()")),
            "connection is closed",
        ),
        (fails_late(dir.path()), "locked"),
        (as_arg(&dir.path().join("missing")), "missing"),
    ];
    let socket = chain.server.arg("s");
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        let load = scope.spawn(|| load(&socket, 2, &stop, &rounds));
        for (binary, words) in &cases {
            let before = rounds.load(SeqCst);
            eventually("progress", || {
                assert!(!load.is_finished());
                (rounds.load(SeqCst) > before).then_some(())
            });
            eprintln!("{binary}");
            chain.refused(&["--binary", binary], words);
        }
        // The server can still be upgraded.
        chain.upgrade(&[]);
        let before = rounds.load(SeqCst);
        eventually("progress", || {
            (rounds.load(SeqCst) > before + 1).then_some(())
        });
    });
    let log = chain.server.log();
    assert_eq!(log.matches("front-end connected").count(), 1, "{log}");
    chain.quit();
}

#[test]
fn what_cannot_be_handed_over_is_refused() {
    let writable = disk_dir();
    let open_to_all = writable.path().join("p");
    fs::write(&open_to_all, "#!/bin/sh\n").unwrap();
    fs::set_permissions(&open_to_all, fs::Permissions::from_mode(0o777)).unwrap();
    for (disk, args, words) in [
        (
            "null:1M",
            &["--filter", "fault:hang=yes,op=flush"][..],
            "hang",
        ),
        ("memory:1M", &["--inject", "storage=1us"], "--inject"),
    ] {
        let chain = Chain::start(disk, args);
        chain.refused(&[], words);
        chain.refused(&["--binary", &as_arg(&open_to_all)], words);
        chain.server.load(100, &[]);
        assert_eq!(chain.requests(), 100);
        chain.quit();
    }
    let chain = Chain::start("null:1M", &[]);
    chain.refused(&["--binary", &as_arg(&open_to_all)], "chmod go-w");
    chain.quit();
}

/// No client is connected during the upgrades. Front-ends connect to each of the processes.
#[test]
fn a_server_without_clients_is_handed_over() {
    let filters = [
        "--filter",
        "throttle:iops-total=100000",
        "--filter",
        "delay:read=1us",
    ];
    let mut chain = Chain::start("null:1M", &filters);
    for i in 1..=3 {
        chain.server.load(100, &[]);
        let set = ["set", &chain.server.api(), "delay", &format!("read={i}us")];
        stdout_of(&set);
        let shown = chain.ask(&["info"]);
        chain.upgrade(&[]);
        let now = chain.ask(&["info"]);
        assert_eq!(now["pid"].as_u64(), Some(chain.pid));
        assert_eq!(chain.requests(), i * 100);
        for same in ["name", "disk", "size", "filters", "vhost_user"] {
            assert_eq!(now[same], shown[same], "{same}");
        }
        let answered = &now["workers"][0]["requests"];
        assert_eq!(answered.as_u64(), Some(i * 100));
        assert!(now["uptime_seconds"].as_u64() >= shown["uptime_seconds"].as_u64());
    }
    assert_eq!(chain.server.end().0, Some(0));
    chain.quit();
}

/// Starts a server with these lines in its configuration, and with a disks-dir. In the lines, `NBD`
/// stands for an NBD socket, and `DIR` for the server's directory.
fn configured(lines: &str) -> Chain {
    let dir = short_dir();
    let conf = as_arg(&dir.path().join("conf"));
    let api = as_arg(&dir.path().join("c"));
    let nbd = as_arg(&dir.path().join("n"));
    let text = format!("disks-dir = 'disks'\napi = {{ socket = '{api}' }}\n{lines}");
    let text = text.replace("NBD", &format!("unix:{nbd}"));
    let text = text.replace("DIR", &as_arg(dir.path()));
    fs::write(&conf, text).unwrap();
    let mut command = fathom();
    command.args(["serve", "--config", &conf]);
    let mut server = Served::spawn(command, dir);
    server.wait_for("the API is at");
    let pid = server.child.id().into();
    Chain { server, pid }
}

/// The owners of disks are handed over, and so is the lock of their definitions.
#[test]
fn what_is_kept_is_kept_by_successors() {
    let mut chain =
        configured("[nbd]\nlisten = ['NBD']\n[[disk]]\nname = 'listed'\nimage = 'null:1M'\n");
    let api = chain.server.api();
    let add = |name: &str, more: &[&str]| {
        let args = ["disk", "add", "--server", &api, name, "null:1M"];
        stdout_of(&[&args, more].concat());
    };
    let kept = || {
        let client = fathom_client::Client::connect(Path::new(&api)).unwrap();
        let all: Value = client.get(&["v1", "disks"]).send().unwrap();
        let one = |disk: &Value| (disk["options"]["name"].to_string(), disk["kept"] == true);
        let mut all: Vec<_> = all["disks"].as_array().unwrap().iter().map(one).collect();
        all.sort();
        all
    };
    add("a", &["--filter", "delay:read=1ms"]);
    add("now", &["--transient"]);
    let before = kept();
    for _ in 0..2 {
        chain.upgrade(&[]);
        assert_eq!(kept(), before);
    }
    let one = |(name, is): (&str, bool)| (format!("\"{name}\""), is);
    let expected = [("a", true), ("listed", true), ("now", false)];
    assert_eq!(before, expected.map(one));
    // No other server can use the directory. The successor writes to it.
    let other = chain.server.arg("other");
    let text = fs::read_to_string(chain.server.path("conf")).unwrap();
    fs::write(&other, text.replace("/c'", "/c2'").replace("/n'", "/n2'")).unwrap();
    refused(1, &["serve", "--config", &other], &["another server keeps"]);
    let file = |name: &str| chain.server.path(&format!("disks/{name}.toml"));
    stdout_of(&["disk", "set", &api, "--disk", "a", "delay", "read=7us"]);
    assert!(fs::read_to_string(file("a")).unwrap().contains("read=7us"));
    add("b", &[]);
    assert!(file("b").exists());
    stdout_of(&["disk", "remove", &api, "--disk", "a"]);
    assert!(!file("a").exists());
    chain.quit();
}
