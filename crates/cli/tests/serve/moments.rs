//! Checks backups of several disks at one instant, and guest agents that freeze the guest
//! meanwhile.

use crate::driver::{Request, with_disk};
use crate::keep;
use crate::kinds::qemu_img;
use crate::mirror::uri_of;
use crate::support::{Kept, Served, as_arg, disk_dir, eventually, refused, short_dir, stdout_of};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Writes a number to each of the disks in turn, then the next number, and so on. Pauses on
/// request.
const WRITER: &str = "\
import nbd, os, select, sys
disks = [nbd.NBD() for _ in sys.argv[1:]]
for disk, uri in zip(disks, sys.argv[1:]):
    disk.connect_uri(uri)
n = 0
while True:
    if select.select([0], [], [], 0)[0]:
        if not os.read(0, 1):
            break
        os.write(1, b'p')
        os.read(0, 1)
        os.write(1, b'g')
    n += 1
    for disk in disks:
        disk.pwrite(n.to_bytes(8, 'little') * 64, 4096)
";

fn write_to(uris: &[String], from: Stdio, to: Stdio) -> Kept {
    let mut writer = Command::new("/usr/bin/python3");
    writer.args(["-c", WRITER]).args(uris);
    Kept(writer.stdin(from).stdout(to).spawn().unwrap())
}

/// Returns the number that was written last.
fn number(copy: &Path) -> u64 {
    let copy = fs::read(copy).unwrap();
    u64::from_le_bytes(copy[4096..4104].try_into().unwrap())
}

fn add(served: &Served, name: &str, dir: &Path) {
    let image = as_arg(&dir.join(name));
    qemu_img(dir, &["create", "-q", "-f", "raw", &image, "4M"]);
    stdout_of(&["disk", "add", "--server", &served.api(), name, &image]);
}

#[test]
fn several_disks_are_kept_as_of_one_instant() {
    let dir = disk_dir();
    let dir = dir.path();
    let served = keep::start(short_dir(), "");
    let other = keep::start(short_dir(), "");
    add(&served, "one", dir);
    add(&served, "two", dir);
    add(&other, "three", dir);
    let uris = [
        uri_of(&served, "one"),
        uri_of(&other, "three"),
        uri_of(&served, "two"),
    ];
    let _writer = write_to(&uris, Stdio::piped(), Stdio::null());
    let (api, there) = (served.api(), other.api());
    let path = |name: &str| dir.join(name);
    let sockets = format!("unix:{}", as_arg(served.dir.path()));
    let copy = |disk: &str, name: &str| format!("{disk}={}", as_arg(&path(name)));
    // (The third disk is named by the socket of its server.)
    let (two, three) = (copy("two", "two.copy"), copy(&there, "three.copy"));
    let mut last = 0;
    for round in 0..12 {
        let first = as_arg(&path("one.copy"));
        let full = ["backup", "full", &api, &first, "--disk", "one"];
        let how = ["-O", "raw", "--verify", "--quiet", "--nbd", &sockets];
        let with = ["--with", &two, "--with", &three];
        stdout_of(&[&full[..], &how, &with].concat());
        let [one, three, two] =
            ["one", "three", "two"].map(|name| number(&path(&format!("{name}.copy"))));
        assert!(
            one >= three && three >= two && two + 1 >= one,
            "{one} {three} {two}"
        );
        assert!(one > last || round == 0, "{one} {last}");
        last = one;
    }
    // The backups leave nothing behind, and neither do backups that fail.
    fs::create_dir(path("in-the-way")).unwrap();
    let in_the_way = format!("two={}", as_arg(&path("in-the-way")));
    let new = as_arg(&path("new"));
    let full = [
        "backup", "full", &api, &new, "--disk", "one", "--quiet", "--nbd", &sockets,
    ];
    refused(
        1,
        &[&full[..], &["--with", &in_the_way]].concat(),
        &["not a regular file"],
    );
    let twice = format!("two={new}");
    refused(
        1,
        &[&full[..], &["--with", &twice]].concat(),
        &["of two disks"],
    );
    refused(1, &[&full[..], &["--with", "none=x"]].concat(), &["'none'"]);
    let start = [
        "backup", "start", &api, "--disk", "one", "--nbd", &sockets, "--with",
    ];
    stdout_of(&["backup", "start", &api, "--disk", "two", "--nbd", &sockets]);
    refused(1, &[&start[..], &["two"]].concat(), &["a backup"]);
    stdout_of(&["backup", "stop", &api, "--disk", "two"]);
    let uris = stdout_of(&[&start[..], &["two"]].concat());
    assert_eq!(uris.lines().count(), 2, "{uris}");
    stdout_of(&["backup", "stop", &api, "--disk", "one", "--with", "two"]);
    assert!(!path("new").exists());
    let copied = number(&path("one"));
    eventually("more", || (number(&path("one")) > copied).then_some(()));
}

/// The server also holds writes of a virtual machine, but only for a limited time.
#[test]
fn guests_wait_for_an_instant_and_not_for_ever() {
    let dir = disk_dir();
    let dir = dir.path();
    let other = keep::start(short_dir(), "");
    add(&other, "two", dir);
    let image = as_arg(&dir.join("one"));
    qemu_img(dir, &["create", "-q", "-f", "qcow2", &image, "4M"]);
    let served = Served::start(&image, &["--format", "qcow2"]);
    let (api, there) = (served.api(), other.api());
    let path = |name: &str| as_arg(&dir.join(name));
    with_disk(&served.arg("s"), 1, |disk| {
        let data = vec![7; 4096];
        let write = |offset| Request::Write {
            offset,
            data: data.clone(),
        };
        assert_eq!(disk.all(&[write(0)]), [Ok(Vec::new())]);
        let with = format!("{there}={}", path("two.copy"));
        let sockets = format!("unix:{}", path(""));
        let full = [
            "backup",
            "full",
            &api,
            &path("copy"),
            "-O",
            "raw",
            "--quiet",
        ];
        stdout_of(&[&full[..], &["--nbd", &sockets, "--with", &with]].concat());
        assert!(fs::read(path("copy")).unwrap() == disk.contents());
        // The client that has begun the backup does not end the hold in time.
        let client = fathom_client::Client::connect(Path::new(&api)).unwrap();
        let name = client.get(&["v1", "disks"]).send::<Value>().unwrap();
        let name = name["disks"][0]["state"]["name"]
            .as_str()
            .unwrap()
            .to_owned();
        let place = ["v1", "disks", &name, "backup"];
        let held = json!({ "held": true });
        let begin = || {
            let begun = client.put(&place).json(&held).send::<Value>().unwrap();
            begun["id"].as_str().unwrap().to_owned()
        };
        let id = begin();
        assert_eq!(disk.all(&[write(8192)]), [Ok(Vec::new())]);
        let go = ["v1", "disks", &name, "backup", "go"];
        let ended = client.post(&go).parameter("id", &id);
        let ended = ended.send::<Value>().unwrap();
        assert!(ended["problem"].is_string(), "{ended}");
        let end = |id: &str| {
            let delete = client.delete(&place).parameter("id", id);
            delete.send::<Value>().unwrap()
        };
        end(&id);
        // A write that comes after that time does not wait either.
        let id = begin();
        thread::sleep(Duration::from_secs(6));
        let since = Instant::now();
        assert_eq!(disk.all(&[write(12288)]), [Ok(Vec::new())]);
        assert!(since.elapsed() < Duration::from_secs(3));
        end(&id);
        let id = begin();
        let gone_on = client.post(&go).parameter("id", &id);
        let gone_on = gone_on.send::<Value>().unwrap();
        assert!(gone_on["problem"].is_null(), "{gone_on}");
        assert_eq!(disk.all(&[write(16384)]), [Ok(Vec::new())]);
        end(&id);
    });
}

/// Starts a guest agent. The agent sends the name of each command to `asked`, and replies with what
/// it receives from `answers`.
fn agent(socket: &Path, asked: Sender<String>, answers: Receiver<&'static str>) {
    let listener = UnixListener::bind(socket).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            // A reply for another client, which has not read it.
            stream.write_all(b"{\"return\": {}}\n").unwrap();
            let lines = BufReader::new(stream.try_clone().unwrap()).split(b'\n');
            for line in lines.map_while(Result::ok) {
                let from = line.iter().rposition(|byte| *byte == 0xff);
                let line = &line[from.map_or(0, |at| at + 1)..];
                let command: serde_json::Value = serde_json::from_slice(line).unwrap();
                let name = command["execute"].as_str().unwrap();
                if name == "guest-sync-delimited" {
                    let id = &command["arguments"]["id"];
                    stream.write_all(&[0xff]).unwrap();
                    writeln!(stream, "{{\"return\": {id}}}").unwrap();
                    continue;
                }
                asked.send(name.to_owned()).unwrap();
                match answers.recv() {
                    Ok("") | Err(_) => break,
                    Ok(answer) => writeln!(stream, "{answer}").unwrap(),
                }
            }
        }
    });
}

const FREEZE: &str = "guest-fsfreeze-freeze";
const THAW: &str = "guest-fsfreeze-thaw";

#[test]
fn a_guest_is_asked_to_write_nothing_meanwhile() {
    let dir = disk_dir();
    let dir = dir.path();
    let served = keep::start(short_dir(), "");
    add(&served, "one", dir);
    add(&served, "two", dir);
    let uris = ["two", "one"].map(|name| uri_of(&served, name));
    let (from, mut pause) = std::io::pipe().unwrap();
    let (mut paused, to) = std::io::pipe().unwrap();
    let _writer = write_to(&uris, Stdio::from(from), Stdio::from(to));
    let socket = short_dir();
    let socket = socket.path().join("agent");
    let (asked, was_asked) = channel();
    let (answer, answers) = channel();
    agent(&socket, asked, answers);
    let api = served.api();
    let path = |name: &str| dir.join(name);
    let at = format!("unix:{}", as_arg(&socket));
    let sockets = format!("unix:{}", as_arg(served.dir.path()));
    let (copy, with) = (as_arg(&path("a")), format!("two={}", as_arg(&path("b"))));
    let full = [
        "backup",
        "full",
        &api,
        &copy,
        "--disk",
        "one",
        "-O",
        "raw",
        "--quiet",
        "--with",
        &with,
        "--guest-agent",
        &at,
        "--nbd",
        &sockets,
    ];
    for _ in 0..5 {
        thread::scope(|scope| {
            let saved = scope.spawn(|| stdout_of(&full));
            assert_eq!(was_asked.recv().unwrap(), FREEZE);
            pause.write_all(b"p").unwrap();
            let mut said = [0];
            std::io::Read::read_exact(&mut paused, &mut said).unwrap();
            answer.send("{\"return\": 2}").unwrap();
            assert_eq!(was_asked.recv().unwrap(), THAW);
            pause.write_all(b"g").unwrap();
            std::io::Read::read_exact(&mut paused, &mut said).unwrap();
            answer.send("{\"return\": 2}").unwrap();
            saved.join().unwrap();
        });
        // Both copies have the same number.
        assert_eq!(number(&path("a")), number(&path("b")));
    }
    // A guest that cannot be frozen is thawed in any case, and there is no backup.
    let fails = |answered: &[(&str, &'static str)], why: &[&str]| {
        thread::scope(|scope| {
            let failed = scope.spawn(|| refused(1, &full, why));
            for (command, with) in answered {
                assert_eq!(was_asked.recv().unwrap(), *command);
                answer.send(*with).unwrap();
            }
            failed.join().unwrap();
        });
        let backups = stdout_of(&["info", &api, "--disk", "one", "--json"]);
        assert!(backups.contains("\"backup\":null"), "{backups}");
    };
    let error = "{\"error\": {\"class\": \"GenericError\", \"desc\": \"it is busy\"}}";
    let done = "{\"return\": 0}";
    fails(&[(FREEZE, error), (THAW, done)], &["it is busy"]);
    fails(
        &[(FREEZE, done), (THAW, error)],
        &["may still be frozen", "it is busy"],
    );
    fails(
        &[(FREEZE, done), (THAW, "")],
        &["may still be frozen", "the connection was closed"],
    );
    drop(File::create(path("no")).unwrap());
    let no = format!("unix:{}", as_arg(&path("no")));
    let start = ["backup", "start", &api, "--disk", "one"];
    let start = [&start[..], &["--guest-agent", &no]].concat();
    refused(1, &start, &[&*as_arg(&path("no")), "connection refused"]);
}
