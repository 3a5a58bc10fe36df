//! Checks `fathom disk` and `fathom list`: disks are added and removed while the server runs.

use crate::support::nbd::{make_image, prints};
use crate::support::{
    Kept, Served, check_refusal, disk_dir, eventually, fathom, listens, refused, run, stdout_of,
};
use serde_json::Value;
use std::fs;
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};

/// Starts a server without disks, with NBD on the socket `n` and the API on the socket `c`.
fn server(more: &str) -> Served {
    Served::waiting("", more)
}

fn add<'a>(served: &Served, name: &'a str, disk: &'a str, more: &[&str]) -> String {
    let control = served.api();
    let add = ["disk", "add", "--server", &control, name, disk];
    stdout_of(&[&add, more].concat())
}

fn remove(served: &Served, name: &str, more: &[&str]) -> String {
    let remove = ["disk", "remove", &served.api(), "--disk", name].map(str::to_owned);
    let words: Vec<_> = remove.iter().map(String::as_str).collect();
    stdout_of(&[&words, more].concat())
}

fn uri(served: &Served, export: &str) -> String {
    format!("nbd+unix:///{export}?socket={}", served.arg("n"))
}

/// Starts a load with this number of requests.
fn start_load(target: &[&str], ios: &str) -> Kept {
    let mut command = fathom();
    command.arg("bench").args(target);
    Kept::spawn(command.args(["--number-ios", ios, "--ramp-time", "0"]))
}

#[test]
fn disks_come_and_go_while_another_is_served() {
    let (images, served) = (disk_dir(), server(""));
    assert!(stdout_of(&["info", &served.api()]).is_empty());
    let image = make_image(images.path(), "qcow2", 64 << 20);
    let first = served.arg("first");
    add(&served, "first", "memory:64M", &["--vhost-user", &first]);
    let mut load = fathom();
    load.args(["bench", "--vhost-user", &first, "--rw", "randrw"]);
    let mut load = Kept::spawn(load.args(["--verify", "--runtime", "600s", "--ramp-time", "0"]));
    eventually("the front-end's queue runs", || {
        let info = stdout_of(&["info", &served.api(), "--json"]);
        let info: Value = serde_json::from_str(&info).unwrap();
        (info["queues_running"] == 1).then_some(())
    });
    let pid = served.child.id();
    let count = |what| fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count();
    let has = || [count("fd"), count("task")];
    let before = has();
    for round in 0..20 {
        let socket = served.arg("second");
        let is_for_clients = round % 2 == 1;
        let way = ["--vhost-user", &socket];
        let way = if is_for_clients { &[][..] } else { &way };
        let said = add(
            &served,
            "second",
            &image,
            &[&["--format", "qcow2"], way].concat(),
        );
        assert_eq!(said, format!("second: {image} (64 MiB)\n"));
        let verify = ["--rw", "randrw", "--verify", "--number-ios", "50"];
        let load = |target: [&str; 2]| {
            stdout_of(&[&["bench"], &target[..], &verify].concat());
        };
        match is_for_clients {
            false => load(["--vhost-user", &socket]),
            true => load(["--nbd", &uri(&served, "second")]),
        }
        let summary = remove(&served, "second", &["--json"]);
        assert!(summary.contains("\"write\""), "{summary}");
        assert!(!served.path("second").exists());
        // The image is no longer locked, and it has no errors.
        prints(images.path(), "qemu-img", &["check", &image]);
        prints(
            images.path(),
            "qemu-io",
            &["-f", "qcow2", "-c", "write 0 4k", &image],
        );
        let listed = prints(images.path(), "nbdinfo", &["--list", &uri(&served, "")]);
        assert!(
            listed.contains("first") && !listed.contains("second"),
            "{listed}"
        );
    }
    // The server has released all resources of the removed disks. (`before` may include a client of
    // the API.)
    eventually("all is given back", || {
        let is_back = has().iter().zip(before).all(|(now, before)| *now <= before);
        is_back.then_some(())
    });
    load.signal("INT");
    // `wait` returns the failure of a load that has already ended.
    let status = load.0.wait().unwrap();
    assert!(status.success(), "{}", served.log());
    let summary = remove(&served, "first", &[]);
    assert!(summary.contains("total"), "{summary}");
    assert_eq!(served.log().matches(": removed").count(), 21);
}

#[test]
fn who_else_has_the_image_is_told_when_it_is_added() {
    let (images, served) = (disk_dir(), server(""));
    let image = make_image(images.path(), "qcow2", 64 << 20);
    let mut other = Command::new("qemu-io");
    other.args(["-f", "qcow2", &image]);
    let other = other.stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
    let mut other = Kept(other.unwrap());
    let pid = other.0.id().to_string();
    let control = served.api();
    let add = [
        "disk", "add", "--server", &control, "a", &image, "--format", "qcow2",
    ];
    let name = "a";
    let said = eventually("it has the image", || {
        let output = run(&add);
        assert!(output.status.success());
        let said = String::from_utf8(output.stderr).unwrap();
        if !said.contains(&pid) {
            remove(&served, name, &[]);
        }
        said.contains(&pid).then_some(said)
    });
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(stdout_of(&["info", &control]).contains("held by:"));
    refused(1, &["bench", "--nbd", &uri(&served, "a")], &["in use by"]);
    other.0.stdin.take();
    other.0.wait().unwrap();
    assert!(!stdout_of(&["info", &control]).contains("held by:"));
    stdout_of(&["bench", "--nbd", &uri(&served, "a"), "--number-ios", "10"]);
}

#[test]
fn a_disk_that_is_in_use_stays_unless_it_is_forced() {
    let served = server("");
    let socket = served.arg("s");
    add(&served, "busy", "null:1G", &["--vhost-user", &socket]);
    let nbd = uri(&served, "busy");
    let control = served.api();
    let remove = ["disk", "remove", &control, "--disk", "busy"];
    for target in [["--vhost-user", &*socket], ["--nbd", &nbd]] {
        let load = start_load(&target, "1000000000");
        let info = || stdout_of(&["info", &control]);
        eventually("it is connected", || {
            let text = info();
            (text.contains("connection:") || text.contains("front-end:  process")).then_some(())
        });
        refused(1, &remove, &["'busy': in use by", "force"]);
        drop(load);
        eventually("it is gone", || {
            let text = info();
            (!text.contains("connection:") && text.contains("front-end:  none")).then_some(())
        });
    }
    let mut loads = [["--vhost-user", &*socket], ["--nbd", &nbd]]
        .map(|target| start_load(&target, "1000000000"));
    eventually("both are connected", || {
        let text = stdout_of(&["info", &control]);
        (text.contains("connection:") && text.contains("front-end:  process")).then_some(())
    });
    refused(1, &remove, &["process", "and an NBD client"]);
    stdout_of(&[&remove[..], &["--force"]].concat());
    for load in &mut loads {
        assert!(!load.0.wait().unwrap().success());
    }
    refused(1, &remove, &["no disk 'busy'"]);
}

#[test]
fn what_cannot_be_added_is_told_and_leaves_nothing() {
    let (images, served) = (disk_dir(), server(""));
    let image = make_image(images.path(), "qcow2", 1 << 20);
    let (control, taken, free) = (served.api(), served.arg("taken"), served.arg("free"));
    add(&served, "a", "null:1G", &["--vhost-user", &taken]);
    let long = "x".repeat(65);
    for (name, disk, more, word) in [
        ("a", "null:1G", &[][..], "already"),
        ("", "null:1G", &[], "letters"),
        ("a/b", "null:1G", &[], "letters"),
        (&long, "null:1G", &[], "letters"),
        ("b", "null:1G", &["--vhost-user", &taken], "in use by"),
        ("b", "/nonexistent", &["--vhost-user", &free], "no such"),
        ("b", &image, &["--vhost-user", &free], "--format qcow2"),
        (
            "b",
            &image,
            &["--vhost-user", &free, "--format", "qed"],
            "not a qed image",
        ),
        ("b", "null:1G", &["--vhost-user", "fd:3"], "inherited"),
        ("b", "null:1G", &["--export-name", "a"], "two exports"),
        ("b", "null:1G", &["--no-nbd"], "no client could connect"),
        ("b", "null:1G", &["--cpus", "1023"], "CPU"),
    ] {
        let add = ["disk", "add", "--server", &control, name, disk];
        refused(1, &[&add, more].concat(), &[word]);
        assert!(!served.path("free").exists(), "{word}");
    }
    add(
        &served,
        "b",
        &image,
        &["--vhost-user", &free, "--format", "qcow2"],
    );
    let listed = stdout_of(&["info", &control, "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(
        listed.as_object().unwrap().keys().collect::<Vec<_>>(),
        ["a", "b"]
    );
}

/// Storage that does not reply while its disk is removed delays only this removal.
#[test]
fn a_disk_that_does_not_drain_is_late_and_goes_in_the_end() {
    let (images, mut served) = (disk_dir(), server("stop-timeout = '500ms'"));
    let image = make_image(images.path(), "raw", 1 << 20);
    let at = served.arg("q");
    let backend = Command::new("qemu-nbd")
        .args(["-t", "-f", "raw", "-k", &at, &image])
        .stdin(Stdio::null())
        .spawn();
    let backend = Kept(backend.unwrap());
    eventually("qemu-nbd listens", || {
        listens(&served.path("q")).then_some(())
    });
    let storage = format!("nbd+unix:///?socket={at}");
    add(&served, "silent", &storage, &["--server-timeout", "off"]);
    add(&served, "other", "null:1G", &[]);
    let silent = uri(&served, "silent");
    let load = start_load(&["--nbd", &silent], "1000000000");
    eventually("it has been served", || {
        let stats = stdout_of(&["stats", &served.api(), "--disk", "silent"]);
        stats.contains("read").then_some(())
    });
    backend.signal("STOP");
    let control = served.api();
    let remove_it = ["disk", "remove", &control, "--disk", "silent", "--force"];
    refused(1, &remove_it, &["requests are still in flight after 500ms"]);
    refused(1, &remove_it, &["being removed"]);
    let again = ["disk", "add", "--server", &control, "silent", "null:1G"];
    refused(1, &again, &["being removed"]);
    stdout_of(&[
        "bench",
        "--nbd",
        &uri(&served, "other"),
        "--number-ios",
        "100",
    ]);
    backend.signal("CONT");
    served.wait_for("disk 'silent': removed");
    drop(load);
    add(&served, "silent", "null:1G", &[]);
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
}

/// Storage that takes long to open delays no other request.
#[test]
fn a_disk_that_does_not_open_holds_up_nobody() {
    let mut served = server("");
    let _nobody_accepts = UnixListener::bind(served.path("q")).unwrap();
    let storage = format!("nbd+unix:///?socket={}", served.arg("q"));
    let control = served.api();
    let words = ["disk", "add", "--server", &control, "slow", &storage];
    let mut command = fathom();
    command
        .args(words)
        .stdin(Stdio::null())
        .stderr(Stdio::piped());
    let waits = command.spawn().unwrap();
    eventually("it is begun", || {
        let said = run(&["info", &control, "--disk", "slow"]).stderr;
        String::from_utf8_lossy(&said)
            .contains("being added")
            .then_some(())
    });
    refused(1, &words, &["being added"]);
    add(&served, "other", "null:1G", &[]);
    stdout_of(&[
        "bench",
        "--nbd",
        &uri(&served, "other"),
        "--number-ios",
        "100",
    ]);
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    let output = waits.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    check_refusal(output.status, &said, 1, &["the server "]);
}

#[test]
fn what_is_shown_for_qemu_attaches_the_disk() {
    let (served, mut socket) = (server(""), String::new());
    for name in ["a,b", "d"] {
        socket = served.arg(name);
        let name = if name == "d" { "d" } else { "a.b" };
        add(&served, name, "null:1G", &["--vhost-user", &socket]);
    }
    let control = served.api();
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-S", "-display", "none", "-nodefaults", "-m", "128M"]);
    command.args(["-object", "memory-backend-memfd,id=mem,size=128M,share=on"]);
    command.args(["-machine", "q35,accel=tcg,memory-backend=mem"]);
    for name in ["a.b", "d"] {
        let said = stdout_of(&["show", &control, "--disk", name, "--qemu"]);
        command.args(said.split_whitespace());
    }
    let _qemu = Kept(command.stdin(Stdio::null()).spawn().unwrap());
    for name in ["a.b", "d"] {
        eventually("QEMU has it", || {
            let info = stdout_of(&["show", &control, "--disk", name]);
            info.contains("front-end:  process").then_some(())
        });
    }
    let show = ["show", &control, "--disk", "d"];
    let said = |form| stdout_of(&[&show[..], &[form]].concat());
    assert!(said("--libvirt").contains(&format!("path='{socket}'")));
    assert!(said("--cloud-hypervisor").contains(&format!("vhost_user=true,socket={socket}")));
    let sent = said("--firecracker");
    let json = sent.split('\'').nth(1).unwrap();
    let drive: serde_json::Value = serde_json::from_str(json).unwrap();
    assert_eq!(drive["socket"], socket);
    refused(
        2,
        &[&show[..], &["--qemu", "--libvirt"]].concat(),
        &["--libvirt"],
    );
}

/// Starts two servers with an empty /run, and runs commands that find them by name.
const BY_NAME: &str = r#"
set -e
mount -t tmpfs none /run
cd /run
fathom="$FATHOM"
printf "[nbd]\nlisten = ['unix:/run/n']\n[[disk]]\nname = 'root'\nimage = 'memory:1M'\n" >conf
"$fathom" serve --config conf >out 2>one & one=$!
"$fathom" serve null:1G --vhost-user two.sock >out 2>two & two=$!
trap 'kill $one $two; cat /run/one /run/two >&2' EXIT
for log in one two; do
    for i in $(seq 600); do grep -q ' serving ' /run/$log && break; sleep 0.1; done
done
name() { sed "s/$one/ONE/g; s/$two/TWO/g" | tr -s ' '; }
"$fathom" list | name
"$fathom" info root | name | head -1
"$fathom" resize root 2>&1 | name || true
"$fathom" trace --pid root --on /run/trace
"$fathom" info null:1073741824 | grep disk: | name
"$fathom" stats nosuch 2>&1 | name || true
"$fathom" disk add more null:1M --no-nbd 2>&1 | name || true
"$fathom" disk add root null:1M --server $two --vhost-user three.sock
"$fathom" stats root 2>&1 | name || true
"$fathom" disk remove $two --disk root
"$fathom" quit $two
wait $two
"$fathom" disk add more null:1M --filter delay:read=1us
"$fathom" disk set more delay read=2us
"$fathom" disk show more | grep filter: | name
"$fathom" disk remove more
"$fathom" disk list | name
trap - EXIT
kill $one
wait $one
"#;

#[test]
fn servers_and_disks_are_found_by_name() {
    let output = Command::new("unshare")
        .args(["-m", "bash", "-c", BY_NAME])
        .env("FATHOM", env!("CARGO_BIN_EXE_fathom"))
        .env_remove("FATHOM_LOG")
        .stdin(Stdio::null())
        .output()
        .expect("unshare is part of util-linux");
    let errors = String::from_utf8_lossy(&output.stderr);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}{errors}");
    let head = "SERVER DISK SIZE FORMAT IN USE BY IMAGE REACHED BY";
    let root = r#"ONE root 1 MiB raw nobody memory:1048576 NBD as "root""#;
    let lines: Vec<_> = said.lines().collect();
    assert_eq!(
        lines,
        [
            head,
            root,
            "TWO null:1073741824 1 GiB raw nobody null:1073741824 vhost-user two.sock",
            "disk: memory:1048576 (1 MiB, raw)",
            "fathom: no size given, which only disks in files can do without",
            "disk: null:1073741824 (1 GiB, raw)",
            "fathom: no disk or server 'nosuch'; disks are null:1073741824, root; servers are ONE, TWO ('fathom list' shows all)",
            "fathom: several servers are running; name one with --server: ONE, TWO",
            "root: null:1048576 (1 MiB)",
            "fathom: several servers have a disk 'root'; name the server by its process id: ONE, TWO",
            "root: removed (null:1048576, 1 MiB)",
            "no requests yet",
            "more: null:1048576 (1 MiB)",
            "delay:read=2us",
            "filter: delay:read=2us",
            "more: removed (null:1048576, 1 MiB)",
            "no requests yet",
            head,
            root,
        ]
    );
}
