//! Checks `fathom quit` with names of disks and of servers.

use crate::driver::with_disk;
use crate::support::{Served, refused, run, stdout_of};

/// Returns a name that no disk of another test has.
fn name_of(what: &str) -> String {
    format!("{what}-{}", std::process::id())
}

fn serve(disks: &[&str]) -> Served {
    let served = Served::waiting("", "");
    for name in disks {
        let (api, socket) = (served.api(), served.arg(name));
        let args = ["disk", "add", "--server", &*api, name, "null:1M"];
        stdout_of(&[&args[..], &["--vhost-user", &*socket]].concat());
    }
    served
}

fn is_alive(served: &Served) -> bool {
    run(&["info", &served.api()]).status.success()
}

#[test]
fn name_of_one_disk_of_several_does_not_end_their_server() {
    let (one, other) = (name_of("one"), name_of("other"));
    let mut served = serve(&[&one, &other]);
    refused(
        1,
        &["quit", &one],
        &[&one, &other, "fathom disk remove", "--force"],
    );
    assert!(is_alive(&served));
    stdout_of(&["disk", "remove", &other]);
    stdout_of(&["quit", &one]);
    assert_eq!(served.end().0, Some(0));
}

#[test]
fn name_of_a_disk_in_use_does_not_end_its_server() {
    let name = name_of("used");
    let mut served = serve(&[&name]);
    with_disk(&served.arg(&name), 1, |_| {
        let itself = format!("process {}", std::process::id());
        refused(1, &["quit", &name], &["in use by", &itself, "--force"]);
        assert!(is_alive(&served));
    });
    served.wait_for("front-end disconnected");
    stdout_of(&["quit", &name]);
    assert_eq!(served.end().0, Some(0));
}

#[test]
fn server_ends_by_force_or_by_its_own_name_whatever_it_serves() {
    let (one, other) = (name_of("first"), name_of("second"));
    for how in ["--force", "socket", "pid"] {
        let mut served = serve(&[&one, &other]);
        let (api, pid) = (served.api(), served.child.id().to_string());
        match how {
            "socket" => stdout_of(&["quit", &api]),
            "pid" => stdout_of(&["quit", &pid]),
            _ => stdout_of(&["quit", &one, how]),
        };
        assert_eq!(served.end().0, Some(0), "{how}");
    }
}
