//! Checks disks with several users: locks, and loads that would overwrite the data of others.

use crate::support::nbd::{Nbd, make_image};
use crate::support::{Served, disk_dir, eventually, fathom, refused, run, short_dir};
use std::process::{Child, Command, Stdio};

/// An NBD client that has written, and stays connected until it is dropped.
struct Client(Child);

impl Client {
    fn of(uri: &str) -> Client {
        let script = "import nbd, sys\n\
                      h = nbd.NBD()\n\
                      h.connect_uri(sys.argv[1])\n\
                      h.pwrite(b'x' * 512, 0)\n\
                      print('written', flush=True)\n\
                      sys.stdin.read()\n";
        let mut child = Command::new("/usr/bin/python3")
            .args(["-c", script, uri])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 is installed by `make setup`");
        let mut said = [0; 7];
        let out = child.stdout.as_mut().expect("a pipe");
        std::io::Read::read_exact(out, &mut said).expect("it writes");
        Client(child)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// This happens at the end of a live migration: the target's server starts before the source
/// releases the image.
#[test]
fn a_locked_image_is_told_at_the_start_and_taken_over_later() {
    for format in ["raw", "qcow2"] {
        let dir = disk_dir();
        let image = make_image(dir.path(), format, 1 << 20);
        let first = Nbd::start(&image, &["--format", format]);
        let client = Client::of(&first.uri());
        let mut second = Nbd::start(&image, &["--format", format]);
        second.wait_for("serving");
        let log = second.log();
        let holder = format!("{image}: in use by fathom (process {})", first.child.id());
        assert!(log.contains(&holder), "{log}");
        drop(client);
        eventually("the second one has it", || {
            let read = run(&["bench", "--nbd", &second.uri(), "--number-ios", "10"]);
            read.status.success().then_some(())
        });
        // A tool does not wait for the lock, but fails.
        let client = Client::of(&second.uri());
        let copy = dir.path().join("copy");
        let convert = ["img", "convert", "-f", format, "-O", "raw", &image];
        let args = [&convert[..], &[copy.to_str().unwrap()]].concat();
        refused(1, &args, &["in use by fathom (process"]);
        drop(client);
        assert!(!second.log().contains("error"), "{}", second.log());
    }
}

#[test]
fn a_load_does_not_write_over_others_data() {
    let dir = short_dir();
    let (socket, address) = (dir.path().join("s"), dir.path().join("n"));
    let mut command = fathom();
    command
        .args(["serve", "memory:1M", "--vhost-user"])
        .arg(&socket);
    command.args(["--nbd", &format!("unix:{}", address.display())]);
    // The API's socket is in the default directory, where `fathom bench` finds it.
    command.env("XDG_RUNTIME_DIR", dir.path());
    let mut server = Served::spawn(command, dir);
    server.wait_for("NBD clients connect");
    let uri = format!("nbd+unix:///?socket={}", address.display());
    let run_dir = server.dir.path().to_owned();
    let bench = |more: &[&str]| {
        let args = ["bench", "--nbd", &uri, "--number-ios", "10", "--rw"];
        let output = fathom()
            .args([&args, more].concat())
            .env("XDG_RUNTIME_DIR", &run_dir)
            .output()
            .unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        match output.status.success() {
            true => Ok(()),
            false => Err(errors),
        }
    };
    bench(&["write"]).unwrap();
    let client = Client::of(&uri);
    let error = bench(&["write"]).unwrap_err();
    let user = format!("an NBD client (process {})", client.0.id());
    assert!(
        error.contains(&user) && error.contains("--overwrite"),
        "{error}"
    );
    bench(&["read"]).unwrap();
    bench(&["write", "--overwrite"]).unwrap();
    drop(client);
    eventually("it has gone", || bench(&["write"]).ok());
    // A vhost-user disk has only one front-end.
    let mut machine = fathom()
        .args([
            "bench",
            "--runtime",
            "10m",
            "--vhost-user",
            socket.to_str().unwrap(),
        ])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    server.wait_for("front-end connected");
    let error = bench(&["write"]).unwrap_err();
    assert!(error.contains("a virtual machine"), "{error}");
    let second = [
        "bench",
        "--number-ios",
        "1",
        "--vhost-user",
        socket.to_str().unwrap(),
    ];
    refused(1, &second, &["another front-end"]);
    machine.kill().unwrap();
    machine.wait().unwrap();
}
