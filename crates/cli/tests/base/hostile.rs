//! Tests clients of a keeper that send false messages or never read its replies.

use crate::place::{Host, Source, qemu_io, same};
use crate::support::eventually;
use std::process::Command;

/// Connects to the keeper's socket and runs the script, in which `s` is the socket.
fn user(host: &Host, script: &str) -> String {
    let place = host.listed()["directory"].as_str().unwrap().to_owned();
    let prelude = "
import json, os, socket, sys
def connect():
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.settimeout(30)
    s.connect('socket')
    welcome, fds, _, _ = socket.recv_fds(s, 65536, 4)
    assert 'Welcome' in json.loads(welcome) and len(fds) == 2
    return s, fds
def is_closed(s):
    try:
        while s.recv(65536):
            pass
        return True
    except ConnectionError:
        return True
s, fds = connect()
";
    let python = Command::new("python3")
        .args(["-c", &format!("{prelude}{script}")])
        .current_dir(place)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&python.stderr).into_owned();
    assert!(python.status.success(), "{script}: {said}");
    String::from_utf8(python.stdout).unwrap()
}

#[test]
fn who_lies_to_the_keeper_harms_nobody_else() {
    let host = Host::new();
    let source = Source::start(&host, &host.path("base.raw"), 1);
    let uri = source.uri();
    let disk = host.serve(
        &host.overlay("disk", &uri, "raw"),
        &uri,
        &["--base-fetch", "off"],
    );
    assert!(qemu_io(&disk.uri(), "read 0 1M"));
    let keepers = host.keepers();
    for lie in [
        "b'x'",
        "b'{}'",
        "b'{\"Want\":[4294967295,4294967295]}'",
        "b'{\"Want\":[0,0]}'",
        "b'{\"Want\":[191,2]}'",
        "b'{\"Welcome\":{}}'",
        "b'[' * 60000",
        "b' ' * 200000",
    ] {
        user(&host, &format!("s.send({lie})\nassert is_closed(s)"));
    }
    // A client may report any number of stripes as used.
    user(
        &host,
        "s.send(b'{\"Used\":[[0,4294967295],[4294967295,4294967295],[7,0]]}')",
    );
    // The file descriptors that a client receives are read-only.
    user(
        &host,
        "
for fd in fds:
    try:
        os.pwrite(fd, b'x', 5000)
        sys.exit('written')
    except OSError:
        pass
    try:
        os.ftruncate(fd, 0)
        sys.exit('cut')
    except OSError:
        pass
",
    );
    // A client that sends request after request and reads no reply.
    user(
        &host,
        "
try:
    for n in range(200000):
        s.send(b'{\"Want\":[0,4]}')
    sys.exit('it goes on')
except (ConnectionError, TimeoutError):
    pass
",
    );
    // A client that connects again and again, requests everything at once, and disconnects.
    user(
        &host,
        "for n in range(300):\n    s, _ = connect()\n    s.send(b'{\"Want\":[0,192]}')",
    );
    same(&disk.uri(), &host.arg("base.raw"));
    assert_eq!(host.keepers(), keepers);
    drop(disk);
    eventually("the keeper's end", || {
        host.keepers().is_empty().then_some(())
    });
}
