//! Checks that NBD clients do not notice upgrades, at any point of their requests.

use super::{Chain, fails_late, image};
use crate::kinds::qemu_img;
use crate::support::certificates::Certificates;
use crate::support::{Served, as_arg, disk_dir, fathom, short_dir};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A client in Python.
pub struct Client {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Client {
    pub fn start(script: &str, args: &[&str]) -> Client {
        // The interpreter of the operating system, which has libnbd.
        let mut child = Command::new("/usr/bin/python3")
            .args(["-c", script])
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Client {
            input: child.stdin.take(),
            output: BufReader::new(child.stdout.take().unwrap()),
            child,
        }
    }

    /// Returns the next line, or `None` if the client has ended.
    pub fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        (!line.is_empty()).then(|| line.trim().to_owned())
    }

    pub fn go_on(&mut self) {
        self.say("go");
    }

    fn say(&mut self, word: &str) {
        writeln!(self.input.as_ref().unwrap(), "{word}").unwrap();
    }

    pub fn end(mut self) {
        self.input.take();
        while self.line().is_some() {}
        assert!(self.child.wait().unwrap().success());
    }
}

/// Starts a server without a vhost-user socket. Returns the server and its NBD socket.
pub fn serve(image: &str, args: &[&str]) -> (Chain, String) {
    let dir = short_dir();
    let socket = as_arg(&dir.path().join("n"));
    let mut command = fathom();
    command
        .args(["serve", image, "--iothreads", "2"])
        .args(args);
    command.args(["--nbd", &format!("unix:{socket}"), "--api"]);
    command.arg(dir.path().join("c"));
    let mut server = Served::spawn(command, dir);
    server.wait_for("NBD clients connect to");
    let pid = server.child.id().into();
    (Chain { server, pid }, socket)
}

#[test]
fn loaded_clients_see_nothing_of_twenty_upgrades() {
    for (format, args, replies) in [
        ("raw", &["--aio", "io_uring"][..], "structured"),
        ("raw", &["--aio", "native", "--cache", "none"], "simple"),
        ("qcow2", &["--aio", "threads"], "structured"),
    ] {
        let dir = disk_dir();
        let image = image(dir.path(), format);
        let (mut chain, socket) = serve(&image, &[&["--format", format], args].concat());
        let mut client = Client::start(include_str!("load.py"), &[&socket, replies, "7"]);
        let mut pauses = Vec::new();
        for _ in 0..20 {
            assert!(client.line().is_some(), "{format}, {args:?}");
            pauses.push(chain.upgrade(&[])["pause_ms"].as_f64().unwrap());
        }
        eprintln!("{format}, {args:?}: {pauses:.1?} ms");
        let info: Value = chain.ask(&["info"]);
        let clients = info["nbd"]["connections"].as_array().unwrap();
        assert_eq!(clients.len(), 1, "{info}");
        client.end();
        let log = chain.server.log();
        assert!(!log.contains("ERROR") && !log.contains("WARN"), "{log}");
        chain.quit();
        if format == "qcow2" {
            qemu_img(dir.path(), &["check", "-f", format, "i"]);
        }
    }
}

/// The successor completes what a client has begun.
#[test]
fn a_client_may_be_in_the_middle_of_anything() {
    let dir = disk_dir();
    let (mut chain, socket) = serve(&image(dir.path(), "raw"), &["--format", "raw"]);
    let mut client = Client::start(include_str!("half.py"), &[&socket]);
    let mut upgrades = 0;
    loop {
        match client.line().as_deref() {
            Some("ready") => {}
            Some("done") => break,
            other => panic!("after {upgrades} upgrades: {other:?}"),
        }
        chain.upgrade(&[]);
        upgrades += 1;
        client.go_on();
    }
    assert_eq!(upgrades, 15);
    client.end();
    chain.quit();
}

/// If a successor fails late, the clients stay connected to the server.
#[test]
fn clients_of_a_server_whose_successor_fails_go_on() {
    let dir = disk_dir();
    let (chain, socket) = serve(&image(dir.path(), "raw"), &["--format", "raw"]);
    let late = fails_late(dir.path());
    let mut client = Client::start(include_str!("half.py"), &[&socket]);
    while client.line().as_deref() == Some("ready") {
        chain.refused(&["--binary", &late], "locked");
        client.go_on();
    }
    client.end();
    chain.quit();
}

/// TLS clients prevent an upgrade, or are disconnected if the command allows that. An upgrade that
/// fails disconnects no client.
#[test]
fn clients_by_tls_stand_in_the_way_or_end() {
    let (dir, certificates) = (disk_dir(), Certificates::new());
    let server = certificates.path("server");
    let tls = ["--tls", "on", "--tls-certificates", &server];
    let raw = image(dir.path(), "raw");
    let (mut chain, socket) = serve(&raw, &[&["--format", "raw"][..], &tls].concat());
    let start = |args: &[&str]| {
        let args = [&[&*socket], args].concat();
        Client::start(include_str!("one_by_one.py"), &args)
    };
    let mut encrypted = start(&["0", &certificates.path("client")]);
    let mut plain = start(&["4096"]);
    let ask = |client: &mut Client, said: &str| {
        client.say(said);
        client.line().unwrap()
    };
    assert_eq!(ask(&mut encrypted, "go"), "done");
    chain.refused(&[], "TLS");
    let late = fails_late(dir.path());
    chain.refused(&["--disconnect", "--binary", &late], "locked");
    assert_eq!(ask(&mut encrypted, "go"), "done");
    // The permission applies to one upgrade only.
    chain.refused(&[], "TLS");
    assert_eq!(ask(&mut plain, "go"), "done");
    chain.upgrade(&["--disconnect"]);
    assert_eq!(ask(&mut encrypted, "go"), "ended");
    assert_eq!(ask(&mut encrypted, "again"), "done");
    assert_eq!(ask(&mut plain, "go"), "done");
    plain.end();
    encrypted.end();
    chain.quit();
}
