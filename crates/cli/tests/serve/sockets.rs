//! Checks sockets for other users: their directories, modes and groups.

use crate::support::{
    Served, as_arg, check_refusal, eventually, fathom, pass, refused, run, short_dir, stdout_of,
};
use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};

/// Starts a server in an empty /run of its own, and connects clients with two groups to its
/// sockets.
const SCRIPT: &str = r#"
set -e
mount -t tmpfs none /run
umask 077
"$FATHOM" serve "$@" >/run/log 2>&1 &
server=$!
trap 'kill $server; cat /run/log >&2' EXIT
for i in $(seq 600); do
    grep -q ' serving ' /run/log && break
    kill -0 $server
    sleep 0.1
done
stat -c '%n %a %g' /run/fathom /run/fathom/*.sock /run/fathom/control
connect() {
    for socket in /run/fathom/disk.sock /run/fathom/nbd.sock /run/fathom/control/$server.sock; do
        setpriv --reuid 64001 --regid $1 --clear-groups /usr/bin/python3 -c '
import socket, sys
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
    print(sys.argv[2], "connects")
except PermissionError:
    print(sys.argv[2], "is denied")
' $socket $1
    done
}
connect 64002
connect 64003
"#;

/// Runs `SCRIPT`, and returns the lines that it prints. Needs root, to mount file systems.
fn in_a_fresh_run(args: &[&str]) -> Vec<String> {
    let output = Command::new("unshare")
        .args(["-m", "bash", "-c", SCRIPT, "bash"])
        .args(args)
        .env("FATHOM", env!("CARGO_BIN_EXE_fathom"))
        .env_remove("FATHOM_LOG")
        .stdin(Stdio::null())
        .output()
        .expect("unshare is part of util-linux");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let said = String::from_utf8(output.stdout).expect("UTF-8");
    said.lines().map(str::to_owned).collect()
}

const SOCKETS: [&str; 5] = [
    "memory:1M",
    "--vhost-user",
    "/run/fathom/disk.sock",
    "--nbd",
    "unix:/run/fathom/nbd.sock",
];

/// Checks the conventions for back-end programs in QEMU's docs/interop/vhost-user.rst.
#[test]
fn it_is_a_back_end_by_qemus_conventions() {
    let dir = short_dir();
    let json = include_str!("../../../../packaging/qemu/50-fathom.json");
    let described: serde_json::Value = serde_json::from_str(json).unwrap();
    let name = Path::new(described["binary"].as_str().unwrap())
        .file_name()
        .unwrap();
    let binary = dir.path().join(name);
    symlink(env!("CARGO_BIN_EXE_fathom"), &binary).unwrap();
    let said = Command::new(&binary)
        .args(["--no-such-option", "--print-capabilities"])
        .output()
        .unwrap();
    assert!(said.status.success());
    let said: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap();
    assert_eq!(said["type"], described["type"]);
    assert_eq!(
        said["features"],
        serde_json::json!(["read-only", "blk-file"])
    );
    let image = dir.path().join("image");
    fs::write(&image, vec![7; 1 << 20]).unwrap();
    let mut command = Command::new(&binary);
    command.arg("--socket-path").arg(dir.path().join("s"));
    command.arg("--blk-file").arg(&image).arg("--read-only");
    command.args(["--", "--cache", "writeback"]);
    let mut served = Served::spawn(command, dir);
    served.wait_for("serving");
    let socket = served.arg("s");
    stdout_of(&["bench", "--vhost-user", &socket, "--number-ios", "10"]);
    let write = [
        "bench",
        "--vhost-user",
        &socket,
        "--number-ios",
        "1",
        "--rw",
        "write",
    ];
    assert!(!run(&write).status.success(), "it can be written to");
    assert!(served.log().contains("cache=writeback"), "{}", served.log());
    assert_eq!(served.terminate().0, Some(0));
    let refused = Command::new(&binary).arg("--blk-file=/x").output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
}

#[test]
fn a_virtual_machine_of_another_user_gets_in_by_its_group() {
    let group = ["--socket-group", "64002"];
    assert_eq!(
        in_a_fresh_run(&[&SOCKETS[..], &group].concat()),
        [
            "/run/fathom 755 0",
            "/run/fathom/disk.sock 660 64002",
            "/run/fathom/nbd.sock 660 64002",
            "/run/fathom/control 700 0",
            "64002 connects",
            "64002 connects",
            "64002 is denied",
            "64003 is denied",
            "64003 is denied",
            "64003 is denied",
        ]
    );
}

#[test]
fn a_configuration_says_it_for_each_socket() {
    let dir = short_dir();
    let file = dir.path().join("disks.toml");
    let text = r#"
        [nbd]
        listen = ["unix:/run/fathom/nbd.sock"]
        socket-mode = "600"
        [[disk]]
        name = "disk"
        image = "memory:1M"
        vhost-user = "/run/fathom/disk.sock"
        socket-mode = "606"
    "#;
    std::fs::write(&file, text).unwrap();
    let said = in_a_fresh_run(&["--config", &as_arg(&file)]);
    assert_eq!(said[1], "/run/fathom/disk.sock 606 0");
    assert_eq!(said[2], "/run/fathom/nbd.sock 600 0");
    assert_eq!(said[4..6], ["64002 connects", "64002 is denied"]);
}

/// The server creates only its own directory. Another missing directory is more likely misspelt.
#[test]
fn other_directories_are_not_made() {
    let dir = short_dir();
    let socket = dir.path().join("not-made/s");
    let words = ["not-made/s", "directory", "create it"];
    refused(
        1,
        &["serve", "null:1M", "--vhost-user", &as_arg(&socket)],
        &words,
    );
    let nbd = format!("unix:{}", as_arg(&socket));
    refused(1, &["serve", "null:1M", "--nbd", &nbd], &words);
    assert!(!dir.path().join("not-made").exists());
}

#[test]
fn modes_and_groups_are_checked() {
    let dir = short_dir();
    let socket = as_arg(&dir.path().join("s"));
    let serve = |args: &[&str], status, words: &[&str]| {
        refused(status, &[&["serve", "null:1M"], args].concat(), words);
    };
    for (option, value, word) in [
        ("--socket-mode", "rw", "660"),
        ("--socket-mode", "1777", "660"),
        ("--socket-group", "no-such-group", "no group"),
    ] {
        serve(
            &["--vhost-user", &socket, option, value],
            2,
            &[option, word],
        );
    }
    let of_none = ["--nbd", "tcp:127.0.0.1:0", "--socket-mode", "660"];
    serve(&of_none, 1, &["--socket-mode", "Unix sockets"]);
    // A group may have a name.
    let mode = ["--socket-mode", "640", "--socket-group", "daemon"];
    let mut served = crate::support::Served::start("null:1M", &mode);
    let metadata = std::fs::metadata(served.path("s")).unwrap();
    assert_eq!(metadata.permissions().mode() & 0o777, 0o640);
    assert_eq!(served.terminate().0, Some(0));
}

/// A service manager may pass the socket, for example. The process that has created the socket
/// removes it.
#[test]
fn the_apis_socket_can_be_inherited() {
    let dir = short_dir();
    let api = dir.path().join("given");
    let listener = UnixListener::bind(&api).unwrap();
    for args in [&["--api", "fd:3"][..], &["--config", "conf"]] {
        let conf = dir.path().join("conf");
        let disk = "[[disk]]\nname = 'd'\nimage = 'null:1M'\nvhost-user = 'v'\n";
        fs::write(&conf, format!("api = {{ socket = 'fd:3' }}\n{disk}")).unwrap();
        let mut command = fathom();
        pass(&mut command, listener.as_raw_fd());
        command.current_dir(&dir).arg("serve").args(args);
        if args[0] == "--api" {
            command.args(["null:1M", "--vhost-user", "v"]);
        }
        let mut served = Served::spawn(command, short_dir());
        served.wait_for(&format!("the API is at {}", api.display()));
        let pid = served.child.id().to_string();
        let (by_path, by_pid) = (as_arg(&api), pid.as_str());
        for server in [&by_path, by_pid] {
            assert!(stdout_of(&["info", server]).contains("null:1"));
        }
        stdout_of(&["upgrade", by_pid]);
        assert!(stdout_of(&["info", &by_path]).contains("null:1"));
        stdout_of(&["quit", &by_path]);
        eventually("its end", || (!dir.path().join("v").exists()).then_some(()));
        assert!(api.exists(), "it is somebody else's");
    }
    let mut command = fathom();
    let (left, _right) = UnixStream::pair().unwrap();
    pass(&mut command, left.as_raw_fd());
    command.args(["serve", "null:1M", "--vhost-user", "v", "--api", "fd:3"]);
    let output = command.current_dir(&dir).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    check_refusal(
        output.status,
        &said,
        1,
        &["--api", "not a listening Unix stream socket"],
    );
}

/// A front-end that is disconnected and connects again at once is refused: the server that has
/// ended would lose it.
#[test]
fn nobody_gets_in_when_a_server_has_ended() {
    let tenants = "api = { socket = 'c' }\ntenants = true\n";
    for (signal, config) in [("-KILL", ""), ("-TERM", ""), ("-TERM", tenants)] {
        let dir = short_dir();
        let path = dir.path().join("s");
        let at = path.display();
        let disk = format!("[[disk]]\nname = 'd'\nimage = 'null:1M'\nvhost-user = '{at}'\n");
        fs::write(dir.path().join("conf"), format!("{config}{disk}")).unwrap();
        for _ in 0..8 {
            let mut command = fathom();
            command
                .current_dir(&dir)
                .args(["serve", "--config", "conf"]);
            let mut server = command.stderr(Stdio::null()).spawn().unwrap();
            let mut first = eventually("the server", || UnixStream::connect(&path).ok());
            // The server has accepted the front-end.
            first.write_all(&GET_FEATURES).unwrap();
            first.read_exact(&mut [0; 20]).unwrap();
            Command::new("kill")
                .args([signal, &server.id().to_string()])
                .status()
                .unwrap();
            // The connection may end in any way.
            let _ = first.read(&mut [0]);
            let again = UnixStream::connect(&path);
            server.wait().unwrap();
            assert!(again.is_err(), "{signal} {config}");
        }
    }
}

/// The request GET_FEATURES of vhost-user: number 1, version 1, no payload. The reply has eight
/// bytes of payload.
const GET_FEATURES: [u8; 12] = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
