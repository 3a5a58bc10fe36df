//! Tests `fathom serve nbd://...`: Fathom serves a disk of another NBD server.

use crate::support::nbd::{Nbd, make_image, prints, tool};
use crate::support::{Served, as_arg, eventually, fathom, listens, refused, short_dir};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// An NBD server of another program; killed when dropped.
struct Origin(Child);

impl Origin {
    /// Runs `program ARGS`, which creates this socket.
    fn start(program: &str, args: &[&str], socket: &Path) -> Origin {
        let mut command = Command::new(program);
        command
            .args(args)
            .stdin(Stdio::null())
            .stderr(Stdio::null());
        let child = command.spawn().expect("it is installed by `make setup`");
        let origin = Origin(child);
        eventually(program, || listens(socket).then_some(()));
        origin
    }

    /// Starts qemu-nbd for several clients, with an image of this format.
    fn of_image(format: &str, image: &str, socket: &Path) -> Origin {
        let path = as_arg(socket);
        let args = [
            "-f",
            format,
            "-t",
            "-e",
            "8",
            "--discard=unmap",
            "-k",
            &path,
            image,
        ];
        Origin::start("qemu-nbd", &args, socket)
    }

    /// Stops the server, which closes its image.
    fn end(mut self) {
        let pid = self.0.id().to_string();
        prints(Path::new("/"), "kill", &[&pid]);
        assert!(self.0.wait().expect("a child").success());
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn uri_of(socket: &Path) -> String {
    format!("nbd+unix:///?socket={}", as_arg(socket))
}

/// QEMU's tools write through Fathom, and the data arrives at the origin.
#[test]
fn what_is_written_through_fathom_is_in_the_origin() {
    let dir = short_dir();
    for (format, engine) in [("qcow2", "io_uring"), ("raw", "native"), ("raw", "threads")] {
        let image = make_image(dir.path(), format, 64 << 20);
        let socket = dir.path().join(format!("{format}-{engine}"));
        let origin = Origin::of_image(format, &image, &socket);
        let args = ["--aio", engine, "--iothreads", "2"];
        let fathom = Nbd::start(&uri_of(&socket), &args);
        let uri = fathom.uri();
        let script = [
            "write -P 1 0 1M",
            "write -P 2 3M 700k",
            "write -z 3500k 64k",
            "write -zu 512k 64k",
            "discard 1M 1M",
            "write -f -P 3 63M 1M",
            "flush",
        ];
        let commands: Vec<&str> = script.iter().flat_map(|step| ["-c", step]).collect();
        let open = ["-f", "raw", &uri];
        prints(dir.path(), "qemu-io", &[&open[..], &commands].concat());
        let there = ["-f", "raw", &uri_of(&socket)];
        for (pattern, range) in [
            (1, "0 512k"),
            (0, "512k 64k"),
            (1, "576k 448k"),
            (2, "3M 428k"),
            (0, "3500k 64k"),
            (3, "63M 1M"),
        ] {
            let read = format!("read -P {pattern} {range}");
            for place in [open, there] {
                let said = prints(
                    dir.path(),
                    "qemu-io",
                    &[&place[..], &["-c", &read]].concat(),
                );
                assert!(!said.contains("verification failed"), "{read}: {said}");
            }
        }
        let here = uri.as_str();
        prints(dir.path(), "qemu-img", &["compare", here, &uri_of(&socket)]);
        fathom.verify(2000, &["--rw", "randrw", "--bs", "64k", "--iodepth", "32"]);
        drop(fathom);
        origin.end();
        if format == "qcow2" {
            prints(
                dir.path(),
                "qemu-img",
                &["check", "-q", "-f", format, &image],
            );
        }
    }
}

/// Two Fathom servers in a row.
#[test]
fn fathom_serves_what_fathom_serves() {
    let first = Nbd::start("memory:64M", &["--iothreads", "2"]);
    let second = Nbd::start(&first.uri(), &["--iothreads", "2"]);
    second.verify(
        20_000,
        &["--rw", "randrw", "--iodepth", "32", "--queues", "2"],
    );
    let script = r#"
import nbd, os
h = nbd.NBD()
h.add_meta_context("base:allocation")
h.connect_uri(os.environ["URI"])
h.trim(1 << 20, 0)
h.pwrite(b"x" * 65536, 65536)
told = []
h.block_status(1 << 20, 0, lambda c, o, e, err: told.extend(e))
print(told)
o = nbd.NBD()
o.connect_uri(os.environ["ORIGIN"])
assert o.pread(65536, 65536) == b"x" * 65536
"#;
    let told = second.python(script, &[("ORIGIN", &first.uri())]);
    assert!(told.starts_with("[65536, 3, 65536, 0, "), "{told}");
}

#[test]
fn a_virtual_machine_can_have_it() {
    let dir = short_dir();
    let socket = dir.path().join("origin");
    let image = make_image(dir.path(), "qcow2", 64 << 20);
    let _origin = Origin::of_image("qcow2", &image, &socket);
    let served = Served::start(&uri_of(&socket), &["--iothreads", "2"]);
    let load = [
        "--rw",
        "randrw",
        "--bs",
        "4k",
        "--iodepth",
        "32",
        "--verify",
    ];
    served.load(5000, &load);
}

#[test]
fn a_server_that_is_gone_costs_a_pause_or_what_the_user_says() {
    let dir = short_dir();
    let socket = dir.path().join("origin");
    let image = make_image(dir.path(), "raw", 16 << 20);
    for (patience, fails) in [("off", true), ("1s", true), ("60s", false)] {
        let origin = Origin::of_image("raw", &image, &socket);
        let args = ["--server-reconnect", patience];
        let mut fathom = Nbd::start(&uri_of(&socket), &args);
        let uri = fathom.uri();
        let write = ["-f", "raw", &uri, "-c", "write -P 7 0 64k"];
        prints(dir.path(), "qemu-io", &write);
        drop(origin);
        std::fs::remove_file(&socket).expect("it was left behind");
        fathom.wait_for("connecting again");
        let read = ["-f", "raw", "-r", &uri, "-c", "read -P 7 0 64k"];
        let _origin = std::thread::scope(|scope| {
            let reads = scope.spawn(|| tool(dir.path(), "qemu-io", &read));
            let output = |ended: std::process::Output| {
                String::from_utf8_lossy(&[ended.stdout, ended.stderr].concat()).into_owned()
            };
            if fails {
                let said = output(reads.join().expect("it ends"));
                assert!(said.contains("Input/output error"), "{said}");
                return Origin::of_image("raw", &image, &socket);
            }
            std::thread::sleep(Duration::from_millis(500));
            assert!(!reads.is_finished());
            let origin = Origin::of_image("raw", &image, &socket);
            let said = output(reads.join().expect("it ends"));
            assert!(said.contains("read 65536/65536"), "{said}");
            origin
        });
        eventually("connected again", || {
            let again = tool(dir.path(), "qemu-io", &read);
            again.status.success().then_some(())
        });
        fathom.wait_for("connected again");
        assert_eq!(fathom.terminate().0, Some(0));
        std::fs::remove_file(&socket).expect("it was left behind");
    }
}

#[test]
fn servers_that_cannot_be_used_are_told_in_one_line() {
    let dir = short_dir();
    let here = as_arg(&dir.path().join("s"));
    let nbd = format!("unix:{here}");
    let serve = |disk: &str, more: &[&str], words: &[&str]| {
        let args = [&["serve", disk, "--nbd", &nbd][..], more].concat();
        refused(1, &args, words);
    };
    let missing = uri_of(&dir.path().join("missing"));
    serve(
        &missing,
        &[],
        &["missing", "cannot connect", "no such file"],
    );
    let socket = dir.path().join("one");
    let path = as_arg(&socket);
    let one = [
        "-f",
        "-U",
        &path,
        "-r",
        "--filter=multi-conn",
        "memory",
        "1M",
    ];
    let _origin = Origin::start(
        "nbdkit",
        &[&one[..], &["multi-conn-mode=disable"]].concat(),
        &socket,
    );
    serve(&uri_of(&socket), &[], &["--readonly"]);
    let two = ["--readonly", "--iothreads", "2"];
    serve(&uri_of(&socket), &two, &["CAN_MULTI_CONN", "--iothreads 1"]);
    for (disk, more, words) in [
        ("nbds://host?tls-psk-file=/x", &[][..], "tls-certificates"),
        ("nbd+unix:///", &[], "socket"),
        ("memory:1M", &["--server-timeout", "1s"], "--server-timeout"),
        ("nbd://host", &["--server-timeout", "soon"], "30s"),
        ("nbd://host", &["--offset", "512"], "images in files"),
    ] {
        let output = fathom()
            .args(["serve", disk, "--nbd", &nbd])
            .args(more)
            .output()
            .expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(words), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}
