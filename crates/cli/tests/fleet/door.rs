//! Tests which remote clients may query a server, and what they may query.

use super::{address, fleet, host};
use crate::support::certificates::Certificates;
use crate::support::{as_arg, refused, run};
use std::fs;
use std::process::{Command, Output};

const DISK: &str = "[[disk]]\nname = 'd'\nimage = 'memory:1M'\nnbd = true\n";

fn curl(certificates: &Certificates, who: &str, address: &str, args: &[&str]) -> Output {
    let dir = certificates.dir(who);
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--show-error", "--cacert"])
        .arg(dir.join("ca-cert.pem"));
    if dir.join("client-cert.pem").exists() {
        curl.arg("--cert").arg(dir.join("client-cert.pem"));
        curl.arg("--key").arg(dir.join("client-key.pem"));
    }
    curl.args(&args[1..])
        .arg(format!("https://{address}{}", args[0]));
    curl.output().expect("curl is installed by `make setup`")
}

#[test]
fn those_who_are_known_look_and_nobody_changes_anything() {
    let certificates = Certificates::new();
    let (_served, address) = host(&certificates, DISK);
    for place in [
        "/v1/disks",
        "/v1/disks/d/stats",
        "/metrics",
        "/openapi.json",
        "/v1/server",
    ] {
        let looked = curl(&certificates, "client", &address, &[place, "--fail"]);
        assert!(looked.status.success(), "{place}: {looked:?}");
    }
    let of_disk = "/v1/disks/d";
    for (place, method) in [
        ("/v1/server/quit", "POST"),
        (of_disk, "DELETE"),
        (of_disk, "PUT"),
        ("/v1/disks/d/filters/0", "PATCH"),
    ] {
        let tried = curl(
            &certificates,
            "client",
            &address,
            &[place, "--request", method],
        );
        let said = String::from_utf8_lossy(&tried.stdout).into_owned();
        assert!(
            said.contains("you may look, and change nothing"),
            "{method} {place}: {said}"
        );
    }
    for who in ["stranger", "anonymous"] {
        let tried = curl(&certificates, who, &address, &["/v1/disks"]);
        assert!(
            !tried.status.success() && tried.stdout.is_empty(),
            "{who}: {tried:?}"
        );
    }
    // `fathom` itself reports the rejection with the name of the host.
    let stranger = certificates.path("stranger");
    let list = [
        "fleet",
        "list",
        "--hosts",
        &address,
        "--certificates",
        &stranger,
    ];
    refused(1, &list, &[&address]);
    // The server's certificate is for another name.
    let other = ["--tls-hostname", "other.example"];
    let client = certificates.path("client");
    let list = [
        "fleet",
        "list",
        "--hosts",
        &address,
        "--certificates",
        &client,
    ];
    refused(
        1,
        &[&list[..], &other].concat(),
        &[&address, "other.example"],
    );
    // The host can be reached nevertheless.
    let listed = fleet(&certificates, "list", &address, &[]);
    assert_eq!(listed["hosts"][0]["disks"][0]["name"], "d");
}

#[test]
fn successor_answers_at_the_same_address_with_its_own_key() {
    let certificates = Certificates::new();
    let (served, address) = host(&certificates, DISK);
    // The renewed certificates are invalid, so the server keeps the old ones.
    let cert = certificates.dir("server").join("server-cert.pem");
    let good = fs::read(&cert).unwrap();
    fs::write(&cert, "nothing").unwrap();
    let api = served.api();
    refused(1, &["upgrade", &api], &["server-cert.pem"]);
    fleet(&certificates, "list", &address, &[]);
    // The new certificates are valid. Another authority has signed them, so the change is visible.
    fs::write(&cert, good).unwrap();
    let renewed = Certificates::new();
    for name in ["server-cert.pem", "server-key.pem", "ca-cert.pem"] {
        fs::copy(
            renewed.dir("server").join(name),
            certificates.dir("server").join(name),
        )
        .unwrap();
    }
    served.upgrade();
    let listed = fleet(&renewed, "list", &address, &[]);
    assert_eq!(listed["hosts"][0]["disks"][0]["name"], "d");
    // Clients with the old certificates are rejected, even if they do not verify the server.
    let before = curl(
        &certificates,
        "client",
        &address,
        &["/v1/disks", "--insecure"],
    );
    assert!(
        !before.status.success() && before.stdout.is_empty(),
        "{before:?}"
    );
    let now = curl(
        &renewed,
        "client",
        &address,
        &["/v1/disks", "--insecure", "--fail"],
    );
    assert!(now.status.success(), "{now:?}");
}

#[test]
fn options_that_make_no_sense_are_refused() {
    let certificates = Certificates::new();
    let (server, empty) = (certificates.path("server"), certificates.path("empty"));
    let serve = [
        "serve",
        "memory:1M",
        "--vhost-user",
        "/tmp/fathom-no-such/s",
    ];
    for (args, words) in [
        (vec!["--api-listen", "127.0.0.1:0"], "--api-certificates"),
        (vec!["--api-certificates", &server], "--api-listen"),
    ] {
        let output = run(&[&serve[..], &args].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(words), "{said}");
    }
    let dir = crate::support::short_dir();
    let socket = as_arg(&dir.path().join("s"));
    let serve = [
        "serve",
        "memory:1M",
        "--vhost-user",
        &socket,
        "--api-listen",
    ];
    for (listen, certificates, words) in [
        ("127.0.0.1:0", &empty, "ca-cert.pem: cannot read the file"),
        ("nowhere", &server, "--api-listen nowhere"),
    ] {
        refused(
            1,
            &[&serve[..], &[listen, "--api-certificates", certificates]].concat(),
            &[words],
        );
    }
    let config = dir.path().join("conf");
    fs::write(&config, "api = { listen = '127.0.0.1:0' }\n").unwrap();
    refused(
        1,
        &["serve", "--config", &as_arg(&config)],
        &["[api]", "needs certificates"],
    );
    // The options of the client.
    let client = certificates.path("client");
    for (args, words) in [
        (
            vec!["--hosts", "a.example,b", "--certificates", &empty],
            "client-cert.pem: cannot read the file",
        ),
        (
            vec!["--hosts", "/no/such", "--certificates", &client],
            "there is no file /no/such",
        ),
        (
            vec!["--hosts", "a:b,c", "--certificates", &client],
            "'a:b' is not HOST or HOST:PORT",
        ),
        (vec!["--hosts", "", "--certificates", &client], "--hosts"),
    ] {
        refused(1, &[&["fleet", "list"], &args[..]].concat(), &[words]);
    }
}

/// Silent connections delay no other client and do not replace an authenticated one.
#[test]
fn those_who_hang_keep_nobody_out() {
    let certificates = Certificates::new();
    let (mut served, at) = host(&certificates, DISK);
    assert_eq!(address(&mut served), at);
    let live = ["--no-buffer", "--max-time", "6", "--output"];
    let dir = crate::support::short_dir();
    let lines = as_arg(&dir.path().join("lines"));
    let args = [&["/v1/live?interval=500ms"], &live[..], &[&lines]].concat();
    let known: Vec<_> = std::thread::scope(|scope| {
        let known = scope.spawn(|| curl(&certificates, "client", &at, &args));
        // Until its handshake is complete, a client counts as a stranger and may be disconnected.
        crate::support::eventually("it is told", || {
            fs::read(&lines).ok().filter(|lines| !lines.is_empty())
        });
        let connect = |_| std::net::TcpStream::connect(&at).unwrap();
        let mut silent: Vec<_> = (0..200).map(connect).collect();
        let listed = fleet(&certificates, "list", &at, &[]);
        assert_eq!(listed["hosts"][0]["disks"][0]["name"], "d");
        silent.extend((0..200).map(connect));
        vec![known.join().unwrap()]
    });
    // The client stayed connected until its own time limit (status 28 of curl).
    assert_eq!(known[0].status.code(), Some(28), "{known:?}");
    assert!(fs::read_to_string(&lines).unwrap().lines().count() >= 3);
}
