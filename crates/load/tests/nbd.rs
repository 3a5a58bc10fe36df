//! Tests of the NBD client against nbdkit and qemu-nbd, with verification, and against servers that
//! violate the protocol.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::mpsc::channel;
use std::time::Duration;

use fathom_load::{
    Error, File, Load, Nbd, Options, Replies, Report, Rw, Target, Wait, nbd_info, run,
};
use fathom_testing::{eventually, until};

#[path = "support/nbd_server.rs"]
mod nbd_server;

use nbd_server::{Fake, Form};

const LEN: u64 = 32 << 20;

/// A running server with one export of [`LEN`] bytes.
struct Server {
    child: Child,
    dir: tempfile::TempDir,
}

impl Server {
    fn nbdkit(args: &[&str]) -> Server {
        Server::start("nbdkit", |socket| {
            let mut all = vec!["-f".into(), "-U".into(), socket.display().to_string()];
            all.extend(args.iter().map(|arg| arg.to_string()));
            all
        })
    }

    fn memory() -> Server {
        Server::nbdkit(&["memory", "32M"])
    }

    /// Starts qemu-nbd with a raw file `image` in the server's directory.
    fn qemu(args: &[&str]) -> Server {
        Server::start("qemu-nbd", |socket| {
            let image = socket.with_file_name("image");
            std::fs::File::create(&image).unwrap().set_len(LEN).unwrap();
            let socket = socket.display().to_string();
            let mut all: Vec<String> = vec!["-t".into(), "-f".into(), "raw".into()];
            all.extend(["-e", "8", "--discard=unmap", "-k", &socket].map(String::from));
            all.extend(args.iter().map(|arg| arg.to_string()));
            all.push(image.display().to_string());
            all
        })
    }

    fn start(program: &str, args: impl FnOnce(&Path) -> Vec<String>) -> Server {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let child = Command::new(program)
            .args(args(&socket))
            .stderr(std::fs::File::create(dir.path().join("log")).unwrap())
            .spawn()
            .unwrap_or_else(|e| panic!("{program} is installed by `make setup`: {e}"));
        let server = Server { child, dir };
        until(&format!("a socket of {program}"), || {
            UnixStream::connect(&socket).is_ok()
        });
        server
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.path("s").display())
    }

    fn run(&self, load: Load, change: impl FnOnce(&mut Nbd)) -> Result<Report, Error> {
        load_on(&self.uri(""), load, change)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn load_on(uri: &str, load: Load, change: impl FnOnce(&mut Nbd)) -> Result<Report, Error> {
    let mut server = Nbd::new(uri.parse().unwrap());
    change(&mut server);
    let options = Options {
        target: Target::Nbd(server),
        load,
    };
    run(&options, &mut |_| {})
}

/// Returns a mixed load of all operations, with verification.
fn mixed() -> Load {
    Load {
        rw: Rw::RandRw,
        rwmixtrim: 5,
        rwmixzero: 5,
        fsync: 20,
        iodepth: 16,
        queues: 2,
        runtime: None,
        ramp: Duration::ZERO,
        number_ios: Some(3000),
        verify: true,
        ..Load::default()
    }
}

/// Returns a load that only reads, without verification.
fn reads() -> Load {
    Load {
        rw: Rw::RandRead,
        rwmixtrim: 0,
        rwmixzero: 0,
        fsync: 0,
        verify: false,
        ..mixed()
    }
}

fn one_by_one() -> Load {
    Load {
        iodepth: 1,
        queues: 1,
        ..reads()
    }
}

#[test]
fn every_form_of_replies_verifies() {
    let qemu = Server::qemu(&[]);
    let nbdkit = Server::memory();
    let (all, old) = (
        [Replies::Simple, Replies::Structured, Replies::Extended],
        [Replies::Simple, Replies::Structured],
    );
    for (server, forms) in [(&qemu, &all[..]), (&nbdkit, &old[..])] {
        for (replies, wait) in forms
            .iter()
            .zip([Wait::Interrupt, Wait::Poll].iter().cycle())
        {
            let change = |s: &mut Nbd| (s.replies, s.wait) = (Some(*replies), *wait);
            let report = server.run(mixed(), change).unwrap();
            assert!(report.verify.unwrap().checked > 2000, "{report}");
            assert_eq!(report.operations.len(), 5, "{report}");
            let backend = report.backend.expect("a Unix socket's peer is known");
            assert_eq!(backend.pid, server.child.id());
        }
    }
    let best = |server: &Server| nbd_info(&Nbd::new(server.uri("").parse().unwrap())).unwrap();
    assert_eq!(best(&qemu).replies, "extended headers");
    assert_eq!(best(&nbdkit).replies, "structured replies");
    assert_eq!(best(&nbdkit).size, LEN);
    let refused = nbdkit.run(mixed(), |s| s.replies = Some(Replies::Extended));
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("does not offer extended headers"), "{error}");
}

/// The data in both directions exceeds the socket's buffers. A client that sends without receiving
/// would wait forever.
#[test]
fn large_requests_in_both_directions_do_not_block_each_other() {
    for server in [Server::memory(), Server::qemu(&[])] {
        for wait in [Wait::Interrupt, Wait::Poll] {
            let load = Load {
                bs: 1 << 20,
                iodepth: 8,
                queues: 1,
                number_ios: Some(100),
                rwmixtrim: 0,
                rwmixzero: 0,
                ..mixed()
            };
            let report = server.run(load, |s| s.wait = wait).unwrap();
            assert!(report.verify.unwrap().checked > 20, "{report}");
        }
    }
}

#[test]
fn what_goes_in_by_the_socket_is_in_the_file() {
    let server = Server::qemu(&[]);
    let load = Load {
        rw: Rw::Write,
        rwmixtrim: 0,
        rwmixzero: 0,
        fsync: 0,
        verify_state: Some(server.path("state")),
        ..mixed()
    };
    let written = server.run(load.clone(), |_| {}).unwrap().verify.unwrap();
    assert_eq!(written.written, 6000);
    let check = Load {
        verify_only: true,
        queues: 1,
        ..load
    };
    let file = Target::File(File {
        buffered: true,
        ..File::new(server.path("image"))
    });
    let options = Options {
        target: file,
        load: check.clone(),
    };
    let read = run(&options, &mut |_| {}).unwrap();
    assert_eq!(read.verify.unwrap().checked, 6000);

    // A change of the file behind the server's back is detected.
    use std::os::unix::fs::FileExt;
    let mut image = std::fs::File::options();
    let image = image.read(true).write(true).open(server.path("image"));
    let (image, at) = (image.unwrap(), 4096 * 77 + 99);
    let mut byte = [0];
    image.read_exact_at(&mut byte, at).unwrap();
    image.write_all_at(&[!byte[0]], at).unwrap();
    let error = server.run(check, |_| {}).unwrap_err().to_string();
    assert!(error.contains("verify: block 77"), "{error}");
}

#[test]
fn tcp_and_named_exports_are_reached() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::File::create(dir.path().join("a disk"))
        .unwrap()
        .set_len(LEN)
        .unwrap();
    let port = std::net::TcpListener::bind("[::1]:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let kill = Command::new("nbdkit")
        .args(["-f", "-i", "::1", "-p", &port.to_string(), "file"])
        .arg(format!("dir={}", dir.path().display()))
        .spawn();
    let mut child = kill.expect("nbdkit is installed by `make setup`");
    let uri = |name: &str| format!("nbd://[::1]:{port}/{name}");
    let report = eventually("nbdkit's port", || {
        match load_on(&uri("a%20disk"), mixed(), |_| {}) {
            Err(Error::Connect { .. }) => None,
            result => Some(result.unwrap()),
        }
    });
    assert_eq!(report.backend, None, "nobody knows who listens on a port");
    assert!(report.verify.unwrap().checked > 2000, "{report}");
    let with_pid = load_on(&uri("a%20disk"), mixed(), |s| {
        s.backend_pid = Some(child.id())
    });
    assert!(with_pid.unwrap().backend.is_some());
    assert!(load_on(&uri("none"), mixed(), |_| {}).is_err());
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn what_the_export_does_not_allow_is_refused() {
    let says = |server: &Server, load: Load, words: &str| {
        let error = server.run(load, |_| {}).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    says(&Server::qemu(&["-r"]), mixed(), "read-only");
    let server = Server::nbdkit(&[
        "--filter=blocksize-policy",
        "memory",
        "32M",
        "blocksize-minimum=4k",
        "blocksize-maximum=64k",
        "blocksize-preferred=4k",
    ]);
    says(
        &server,
        Load {
            bs: 128 << 10,
            ..mixed()
        },
        "more than the server takes",
    );
    says(&server, Load { bs: 512, ..mixed() }, "block size, 4096");
    let named = Server::qemu(&["-x", "name"]);
    says(&named, mixed(), "no export ''");
    let load = Load {
        offset: LEN,
        ..mixed()
    };
    says(&Server::memory(), load, "size");
}

#[test]
fn failed_request_is_an_error_with_text_or_counted() {
    let start = || {
        let error = ["error-pread=EIO", "error-pread-rate=50%"];
        Server::nbdkit(&[&["--filter=error", "memory", "32M"], &error[..]].concat())
    };
    // Use a server of its own: nbdkit may fail an assertion when a client disconnects with requests
    // in flight.
    let error = start().run(reads(), |_| {}).unwrap_err().to_string();
    assert!(
        error.starts_with("read of 4096 bytes at offset "),
        "{error}"
    );
    assert!(error.contains("input/output error"), "{error}");
    let server = start();
    for replies in [Replies::Simple, Replies::Structured] {
        let load = Load {
            continue_on_error: true,
            ..reads()
        };
        let report = server.run(load, |s| s.replies = Some(replies)).unwrap();
        let good: u64 = report.operations.iter().map(|d| d.ios).sum();
        assert_eq!(good + report.errors, 6000, "{report}");
        assert!(report.errors > 1000 && good > 1000, "{report}");
    }
}

#[test]
fn a_server_that_dies_or_hangs_is_missed() {
    let mut server = Server::memory();
    let uri = server.uri("");
    let load = Load {
        number_ios: Some(u64::MAX),
        verify: false,
        ..mixed()
    };
    let options = Options {
        target: Target::Nbd(Nbd::new(uri.parse().unwrap())),
        load,
    };
    let (sender, answers) = channel();
    let run = std::thread::spawn(move || {
        run(&options, &mut |progress| {
            if progress.completed > 0 {
                let _ = sender.send(());
            }
        })
    });
    answers.recv().expect("it is answered");
    server.child.kill().unwrap();
    let error = run.join().unwrap().unwrap_err().to_string();
    assert!(error.contains("closed it with"), "{error}");

    let server = Server::nbdkit(&["--filter=delay", "memory", "32M", "rdelay=60"]);
    let load = Load {
        timeout: Duration::from_secs(1),
        ..reads()
    };
    let error = server.run(load, |_| {}).unwrap_err().to_string();
    assert!(error.contains("no request completed for 1s"), "{error}");
}

/// Returns the client's error for a server with `fault`.
fn complaint(form: Form, fault: impl FnOnce(&mut Fake) + Send + 'static) -> String {
    let (uri, server) = Fake::start(LEN, form, fault);
    let load = Load {
        timeout: Duration::from_secs(60),
        ..one_by_one()
    };
    let error = load_on(&uri, load, |_| {}).unwrap_err().to_string();
    server.join().expect("the server's part of the test");
    assert_eq!(error.lines().count(), 1, "{error}");
    error
}

#[test]
fn servers_that_are_none_are_told() {
    for (greeting, words) in [
        (&b""[..], "closed the connection"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not an NBD server"),
        (b"NBDMAGIC\x00\x00\x42\x02\x81\x86\x12\x53", "oldstyle"),
        (b"NBDMAGICIHAVEOPT\x00\x00", "fixed newstyle"),
        (b"NBDMAGICIHAVE", "closed the connection"),
        (
            b"NBDMAGICIHAVEOPT\x00\x03garbage garbage garbage garbage",
            "magic number",
        ),
    ] {
        let error = complaint(Form::None, move |server| server.send(greeting));
        assert!(error.contains(words), "{greeting:?}: {error}");
    }
}

#[test]
fn replies_that_break_the_protocol_are_told() {
    use Form::{Extended, Simple, Structured};
    type Fault = fn(&mut Fake, u64, u64);
    let faults: &[(Form, Fault, &str)] = &[
        (
            Simple,
            |s, _, _| s.send(&[0xee; 64]),
            "0xeeeeeeee is no magic number",
        ),
        (
            Simple,
            |s, c, _| s.simple(0, c + 1, &[]),
            "no request in flight",
        ),
        (
            Simple,
            |s, c, o| s.chunk(1, 1, c, o, &[&o.to_be_bytes(), &[0; 4096]]),
            "magic",
        ),
        (
            Simple,
            |s, c, _| {
                s.simple(0, c, &[0; 4096]);
                s.simple(5, c, &[])
            },
            "in flight",
        ),
        (
            Simple,
            |s, c, _| s.simple(0, c, &[0; 100]),
            "closed it with 1 request",
        ),
        (
            Structured,
            |s, c, _| s.simple(0, c, &[0; 4096]),
            "simple reply",
        ),
        (
            Structured,
            |s, c, o| s.chunk(1, 0, c, o, &[]),
            "0 bytes of 4096",
        ),
        (
            Structured,
            |s, c, o| s.chunk(0, 0, c, o, &[]),
            "type 0x0 has a payload of 0",
        ),
        (
            Structured,
            |s, c, o| s.chunk(1, 1, c, o, &[&(o + 1).to_be_bytes(), &[0; 4096]]),
            "no part of the read",
        ),
        (
            Structured,
            |s, c, o| s.chunk(1, 1, c, o, &[&o.wrapping_sub(1).to_be_bytes(), &[0; 9]]),
            "no part of the read",
        ),
        (
            Structured,
            |s, c, o| {
                s.chunk(0, 1, c, o, &[&o.to_be_bytes(), &[0; 4096]]);
                s.chunk(1, 1, c, o, &[&o.to_be_bytes(), &[0; 1]]);
            },
            "twice",
        ),
        (
            Structured,
            |s, c, o| s.chunk(1, 1, c, o, &[&o.to_be_bytes()]),
            "payload of 8 bytes",
        ),
        (
            Structured,
            |s, c, o| s.chunk(1, 2, c, o, &[&o.to_be_bytes(), &[0xff; 4]]),
            "no part",
        ),
        (
            Structured,
            |s, c, o| s.chunk(1, 5, c, o, &[&[0; 12]]),
            "type 0x5",
        ),
        (
            Structured,
            |s, c, o| s.chunk(1, 0x8001, c, o, &[&[0; 6]]),
            "has no error",
        ),
        (
            Structured,
            |s, c, o| s.chunk(1, 0x8001, c, o, &[&[0, 0, 0, 5, 0, 9, 65]]),
            "longer",
        ),
        (
            Structured,
            |s, c, o| s.chunk(1, 0x8001, c, o, &[&[1; 9000]]),
            "payload of 9000",
        ),
        (
            Structured,
            |s, c, o| s.chunk(1, 0x8001, c, o, &[&[0, 0, 0, 28, 0, 3], b"f\x1bl"]),
            "no space left on device: fl",
        ),
        (
            Extended,
            |s, c, o| s.chunk(1, 1, c, o + 1, &[&o.to_be_bytes(), &[0; 4096]]),
            "another offset",
        ),
        (Extended, |s, c, _| s.simple(0, c, &[0; 4096]), "magic"),
        (
            Extended,
            |s, c, o| s.chunk(1, 1, c, o, &[&o.to_be_bytes(), &[0; 9000]]),
            "no part",
        ),
    ];
    for (i, (form, fault, words)) in faults.iter().enumerate() {
        let error = complaint(*form, move |server| {
            let (cookie, offset) = server.request();
            fault(server, cookie, offset);
        });
        assert!(error.contains(words), "{i}: no '{words}' in: {error}");
    }
}

/// A correct reply may consist of as many chunks as the protocol permits.
#[test]
fn a_reply_in_many_pieces_is_put_together() {
    let (uri, server) = Fake::start(LEN, Form::Extended, |server| {
        for _ in 0..10 {
            let (c, o) = server.request();
            let rest = (o + 1000).to_be_bytes();
            server.chunk(0, 1, c, o, &[&rest, &[7; 2096]]);
            server.chunk(
                0,
                2,
                c,
                o,
                &[&(o + 3096).to_be_bytes(), &1000u32.to_be_bytes()],
            );
            server.chunk(0, 1, c, o, &[&o.to_be_bytes(), &[7; 1000]]);
            server.chunk(1, 0, c, o, &[]);
        }
        server.goodbye();
    });
    let load = Load {
        number_ios: Some(10),
        ..one_by_one()
    };
    let report = load_on(&uri, load, |_| {}).unwrap();
    assert_eq!(report.operations[0].ios, 10);
    server.join().expect("the server's part of the test");
}
