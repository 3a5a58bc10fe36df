//! Checks the addresses for NBD clients, the exports, and who can share a disk. The clients are
//! those of libnbd and QEMU.

use crate::support::{
    Served, as_arg, disk_dir, eventually, fathom, make_dead_socket, pass, refused, short_dir,
    stdout_of,
};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde_json::Value;
use std::fs;
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::process::{Child, Command, Output, Stdio};
use tempfile::TempDir;

mod limits;

fn output_of(program: &str, args: &[&str]) -> Output {
    let output = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .output();
    output.unwrap_or_else(|e| panic!("{program} is installed by `make setup`: {e}"))
}

/// Runs a client that must succeed. Returns what it prints.
fn client(program: &str, args: &[&str]) -> String {
    let output = output_of(program, args);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program} {args:?}: {errors}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Runs a client that must fail. Returns its errors.
fn client_fails(program: &str, args: &[&str]) -> String {
    let output = output_of(program, args);
    assert!(!output.status.success(), "{program} {args:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn size(uri: &str) -> u64 {
    let said = client("nbdinfo", &["--size", uri]);
    said.trim().parse().expect("a number")
}

/// Returns the URI of an export on the socket `n`.
fn uri(served: &Served, export: &str) -> String {
    format!("nbd+unix:///{export}?socket={}", served.arg("n"))
}

/// Runs `fathom serve ARGS` with its API on the socket `c`. `{dir}` in arguments stands for the
/// server's directory.
fn serve(args: &[&str]) -> Served {
    serve_by(fathom(), short_dir(), args)
}

fn serve_by(mut command: Command, dir: TempDir, args: &[&str]) -> Served {
    let path = as_arg(dir.path());
    command.arg("serve");
    command.args(args.iter().map(|arg| arg.replace("{dir}", &path)));
    if !args.contains(&"--config") {
        command.arg("--api").arg(dir.path().join("c"));
    }
    let mut served = Served::spawn(command, dir);
    served.wait_for("NBD clients connect to");
    served
}

/// Runs `fathom serve --config` with this configuration, and the sockets `n` and `c`.
fn serve_config(dir: TempDir, nbd: &str, disks: &str) -> Served {
    let path = as_arg(dir.path());
    let text = format!(
        "api = {{ socket = '{{dir}}/c' }}\n[nbd]\nlisten = ['unix:{{dir}}/n']\n{nbd}\n{disks}"
    );
    fs::write(dir.path().join("conf"), text.replace("{dir}", &path)).unwrap();
    serve_by(fathom(), dir, &["--config", "{dir}/conf"])
}

fn info(served: &Served, disk: &str) -> Value {
    let said = stdout_of(&["info", &served.api(), "--disk", disk, "--json"]);
    serde_json::from_str(&said).expect("JSON")
}

fn connections(served: &Served, disk: &str) -> usize {
    let info = info(served, disk);
    info["nbd"]["connections"].as_array().expect("a list").len()
}

/// A libnbd client that holds its connection until it is dropped.
struct Holder(Child);

impl Holder {
    fn new(uri: &str) -> Holder {
        // Reads until the connection ends. Prints the size after each read.
        let script = "import nbd, os, sys, time\n\
                      h = nbd.NBD()\n\
                      h.connect_uri(os.environ['URI'])\n\
                      while True:\n\
                      \x20   h.pread(4096, 0)\n\
                      \x20   print(h.get_size(), flush=True)\n\
                      \x20   time.sleep(0.02)\n";
        let python = Command::new("/usr/bin/python3")
            .args(["-c", script])
            .env("URI", uri)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        Holder(python.expect("python3 is installed by `make setup`"))
    }

    /// Returns the next size that the client prints.
    fn size(&mut self) -> u64 {
        use std::io::{BufRead, BufReader};
        let mut line = String::new();
        let stdout = self.0.stdout.as_mut().expect("a pipe");
        BufReader::with_capacity(1, stdout)
            .read_line(&mut line)
            .unwrap();
        line.trim().parse().expect("it is being served")
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn clients_come_by_unix_sockets_and_tcp() {
    let nbd = [
        "--nbd",
        "unix:{dir}/n",
        "--nbd",
        "tcp:127.0.0.1:0",
        "--nbd",
        "tcp:[::1]:0",
    ];
    let mut served = serve(&[&["memory:3M"][..], &nbd].concat());
    assert_eq!(size(&uri(&served, "")), 3 << 20);
    let info = info(&served, "memory:3145728");
    let addresses: Vec<_> = info["nbd"]["addresses"]
        .as_array()
        .unwrap()
        .iter()
        .collect();
    assert_eq!(addresses.len(), 3);
    assert_eq!(info["vhost_user"], Value::Null);
    for address in &addresses[1..] {
        let address = address.as_str().unwrap().replace("tcp:", "nbd://");
        assert_eq!(size(&address), 3 << 20);
        let said = client("qemu-img", &["info", "--output=json", &address]);
        let said: Value = serde_json::from_str(&said).unwrap();
        assert_eq!(said["virtual-size"], 3 << 20);
    }
    // The log has one line for each client.
    eventually("lines of the log", || {
        let lines = served.log().matches(": disconnected; ").count();
        (lines == 5).then_some(())
    });
    assert_eq!(served.terminate().0, Some(0));
    assert!(!served.path("n").exists());
}

#[test]
fn a_dead_socket_is_replaced_and_a_live_one_is_not() {
    let dir = short_dir();
    make_dead_socket(&dir.path().join("n"));
    let served = serve_by(fathom(), dir, &["null:1M", "--nbd", "unix:{dir}/n"]);
    let address = format!("unix:{}", served.arg("n"));
    let control = served.arg("c2");
    let args = ["serve", "null:1M", "--nbd", &address, "--api", &control];
    refused(1, &args, &["in use by fathom", &served.arg("n")]);
    assert_eq!(size(&uri(&served, "")), 1 << 20);
}

#[test]
fn sockets_can_be_inherited() {
    for address in ["fd:3", "systemd"] {
        let dir = short_dir();
        let listener = UnixListener::bind(dir.path().join("n")).unwrap();
        let mut command = fathom();
        pass(&mut command, listener.as_raw_fd());
        command.env("LISTEN_FDS", "1");
        let mut served = serve_by(command, dir, &["null:1M", "--nbd", address]);
        assert_eq!(size(&uri(&served, "")), 1 << 20);
        assert_eq!(served.terminate().0, Some(0));
        assert!(served.path("n").exists(), "it is somebody else's");
    }
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut command = fathom();
    pass(&mut command, tcp.as_raw_fd());
    let _served = serve_by(command, short_dir(), &["null:1M", "--nbd", "fd:3"]);
    let port = tcp.local_addr().unwrap().port();
    assert_eq!(size(&format!("nbd://127.0.0.1:{port}")), 1 << 20);
}

const TWO: &str = "[[disk]]\nname = 'a'\nimage = 'memory:1M'\nexport-description = 'one'\n\
                   [[disk]]\nname = 'b'\nimage = 'memory:2M'\nreadonly = true\n\
                   [[disk]]\nname = 'hidden'\nimage = 'null:3M'\nnbd = false\n\
                   vhost-user = '{dir}/s'\n";

#[test]
fn several_disks_are_served_by_name() {
    let mut served = serve_config(short_dir(), "", TWO);
    let list = client("nbdinfo", &["--list", "--json", &uri(&served, "")]);
    let list: Value = serde_json::from_str(&list).unwrap();
    let names: Vec<_> = list["exports"].as_array().unwrap().iter().collect();
    assert_eq!(names.len(), 2);
    assert_eq!(names[0]["export-name"], "a");
    assert_eq!(names[0]["description"], "one");
    assert_eq!(names[1]["export-name"], "b");
    for (name, mib) in [("a", 1), ("b", 2), ("", 1)] {
        assert_eq!(size(&uri(&served, name)), mib << 20, "{name}");
    }
    let said = client_fails("nbdinfo", &[&uri(&served, "hidden")]);
    assert!(said.contains("hidden"), "{said}");

    // A copy of one disk changes only the statistics of this disk.
    client("nbdcopy", &[&uri(&served, "a"), "null:"]);
    let control = served.api();
    let stats: Value = serde_json::from_str(&stdout_of(&["stats", &control, "--json"])).unwrap();
    assert_ne!(stats["a"]["operations"], serde_json::json!([]));
    assert_eq!(stats["hidden"]["operations"], serde_json::json!([]));
    let of_b = stdout_of(&["stats", &control, "--disk", "b"]);
    assert_eq!(of_b, "no requests yet\n");
    let text = stdout_of(&["info", &control]);
    assert!(
        text.contains("name:       a\n") && text.contains("name:       hidden\n"),
        "{text}"
    );
    refused(1, &["resize", &control], &["a, b, hidden"]);
    refused(
        1,
        &["stats", &control, "--disk", "c"],
        &["'c'", "a, b, hidden"],
    );
    let trace = served.arg("trace");
    stdout_of(&["trace", "--pid", &control, "--disk", "a", "--on", &trace]);
    client("nbdcopy", &[&uri(&served, "a"), "null:"]);
    let traced = stdout_of(&["trace", &trace, "--json"]);
    assert!(traced.lines().count() > 0);

    // The same server has a vhost-user disk.
    served.load(100, &[]);
    let (status, printed) = served.terminate();
    assert_eq!(status, Some(0));
    assert!(
        printed.contains("a:\n") && printed.contains("b:\nno requests yet"),
        "{printed}"
    );
}

#[test]
fn one_export_has_a_name_and_a_description() {
    let args = ["memory:1M", "--nbd", "unix:{dir}/n", "--export-name", "x y"];
    let served = serve(&[&args[..], &["--export-description", "mine"]].concat());
    for name in ["x%20y", ""] {
        let said = client("nbdinfo", &["--json", &uri(&served, name)]);
        let said: Value = serde_json::from_str(&said).unwrap();
        assert_eq!(said["exports"][0]["description"], "mine");
    }
    client_fails("nbdinfo", &[&uri(&served, "x")]);
}

#[test]
fn a_new_size_is_for_those_who_come_after() {
    let dir = disk_dir();
    let image = dir.path().join("image");
    fs::write(&image, vec![0; 1 << 20]).unwrap();
    let served = serve(&[&as_arg(&image), "--nbd", "unix:{dir}/n"]);
    let mut old = Holder::new(&uri(&served, ""));
    assert_eq!(old.size(), 1 << 20);
    let file = fs::OpenOptions::new().write(true).open(&image).unwrap();
    file.set_len(2 << 20).unwrap();
    assert_eq!(size(&uri(&served, "")), 1 << 20, "nobody has said so yet");
    stdout_of(&["resize", &served.api()]);
    assert_eq!(size(&uri(&served, "")), 2 << 20);
    assert_eq!(old.size(), 1 << 20);
}

#[test]
fn an_image_is_in_use_while_somebody_is_connected() {
    let dir = disk_dir();
    let image = as_arg(&dir.path().join("image"));
    client("qemu-img", &["create", "-q", "-f", "qcow2", &image, "16M"]);
    let args = [
        "--format",
        "qcow2",
        "--nbd",
        "unix:{dir}/n",
        "--iothreads",
        "2",
    ];
    let served = serve(&[&[&*image][..], &args].concat());
    // No client is connected, so the image is not locked.
    let write = ["-f", "qcow2", "-c", "write 0 64k", &image];
    client("qemu-io", &write);
    let holders = [
        Holder::new(&uri(&served, "")),
        Holder::new(&uri(&served, "")),
    ];
    eventually("two connections", || {
        (connections(&served, &image) == 2).then_some(())
    });
    let workers = info(&served, &image);
    let of = |i: usize| workers["nbd"]["connections"][i]["worker"].as_u64().unwrap();
    assert_ne!(of(0), of(1), "each worker has one");
    let said = client_fails("qemu-io", &write);
    assert!(said.contains("lock"), "{said}");
    let [first, second] = holders;
    drop(first);
    eventually("one connection", || {
        (connections(&served, &image) == 1).then_some(())
    });
    client_fails("qemu-io", &write);
    drop(second);
    eventually("the lock", || {
        output_of("qemu-io", &write).status.success().then_some(())
    });
    client("qemu-img", &["check", "-q", &image]);
}

#[test]
fn an_image_that_another_process_has_is_denied() {
    let dir = disk_dir();
    let image = as_arg(&dir.path().join("image"));
    client("qemu-img", &["create", "-q", "-f", "qcow2", &image, "16M"]);
    let args = [&*image, "--format", "qcow2", "--nbd", "unix:{dir}/n"];
    let (first, second) = (serve(&args), serve(&args));
    let mut holder = Holder::new(&uri(&first, ""));
    holder.size();
    let said = client_fails("qemu-img", &["info", &uri(&second, "")]);
    assert!(said.contains("in use by"), "{said}");
    assert!(second.log().contains("denied"), "{}", second.log());
    drop(holder);
    eventually("the image", || {
        let said = output_of("nbdinfo", &["--size", &uri(&second, "")]);
        said.status.success().then_some(())
    });
}

/// Starts a load as a front-end, until it is dropped.
fn machine(served: &Served) -> Holder {
    let bench = fathom()
        .args([
            "bench",
            "--vhost-user",
            &served.arg("s"),
            "--runtime",
            "10m",
        ])
        .stdout(Stdio::null())
        .spawn();
    Holder(bench.unwrap())
}

#[test]
fn a_raw_disk_is_shared_by_a_machine_and_clients() {
    let args = [
        "memory:16M",
        "--vhost-user",
        "{dir}/s",
        "--nbd",
        "unix:{dir}/n",
    ];
    let served = serve(&args);
    let mut client = Holder::new(&uri(&served, ""));
    client.size();
    let machine = machine(&served);
    eventually("a queue", || {
        let info = info(&served, "memory:16777216");
        (info["queues_running"] == 1).then_some(())
    });
    client.size();
    drop(machine);
    eventually("no queue", || {
        let info = info(&served, "memory:16777216");
        (info["queues_running"] == 0).then_some(())
    });
    client.size();
    assert_eq!(connections(&served, "memory:16777216"), 1);
}

#[test]
fn an_image_goes_with_its_machine() {
    for format in ["raw", "qcow2"] {
        goes_with_its_machine(format);
    }
}

fn goes_with_its_machine(format: &str) {
    let dir = disk_dir();
    let image = as_arg(&dir.path().join("image"));
    client("qemu-img", &["create", "-q", "-f", format, &image, "16M"]);
    let sockets = ["--vhost-user", "{dir}/s", "--nbd", "unix:{dir}/n"];
    let served = serve(&[&[&*image, "--format", format][..], &sockets].concat());
    let is_let_in = || output_of("nbdinfo", &["--size", &uri(&served, "")]);
    // A raw image has all data even if its server was killed, so clients need not wait for the
    // virtual machine.
    assert_eq!(is_let_in().status.success(), format == "raw");
    let machine = machine(&served);
    let mut client = eventually("a client that is let in", || {
        let running = info(&served, &image)["queues_running"] == 1;
        let admitted = running && is_let_in().status.success();
        admitted.then(|| Holder::new(&uri(&served, "")))
    });
    client.size();
    drop(machine);
    let write = ["-f", format, "-c", "write 0 64k", &image];
    eventually("the lock", || {
        output_of("qemu-io", &write).status.success().then_some(())
    });
    // The server lists the connection for a moment after it has released the image.
    eventually("no connection", || {
        (connections(&served, &image) == 0).then_some(())
    });
    assert!(
        served.log().contains("closed by the server"),
        "{}",
        served.log()
    );
    let said = client_fails("qemu-img", &["info", &uri(&served, "")]);
    assert!(
        said.contains("virtual machine of the disk is not running"),
        "{said}"
    );
}

#[test]
fn wrong_options_are_told_in_one_line() {
    let serve = |args: &[&str], status, words: &[&str]| {
        let args = [&["serve", "null:1M"], args].concat();
        refused(status, &args, words);
    };
    serve(&["--nbd", "/run/x"], 2, &["--nbd", "unix:PATH"]);
    serve(&["--nbd", "tcp:localhost:x"], 2, &["HOST:PORT"]);
    serve(&["--nbd", "fd:77"], 1, &["--nbd", "77"]);
    serve(&["--nbd", "systemd"], 1, &["--nbd", "service manager"]);
    serve(&["--nbd", "unix:/no/such/dir/n"], 1, &["/no/such/dir/n"]);
    serve(&["--nbd", "tcp:192.0.2.1:7"], 1, &["tcp:192.0.2.1:7"]);
    serve(&["--export-name", "x", "--vhost-user", "s"], 2, &["--nbd"]);
    let nbd = ["--nbd", "unix:/no/such/dir/n"];
    serve(
        &[&nbd[..], &["--tls", "on"]].concat(),
        1,
        &["--tls-certificates"],
    );
    serve(
        &[&nbd[..], &["--tls", "maybe"]].concat(),
        2,
        &["off", "require"],
    );
    serve(&["--config", "x"], 2, &["--config", "DISK"]);
    let dir = short_dir();
    let socket = format!("unix:{}", as_arg(&dir.path().join("n")));
    let empty = ["--nbd", &socket, "--tls-certificates", "/no/such/dir"];
    serve(&empty, 1, &["--tls", "/no/such/dir/server-cert.pem"]);

    let config = dir.path().join("conf");
    fs::write(
        &config,
        "[[disk]]\nname = 'a'\nimage = 'null:1M'\nbs = 4096\n",
    )
    .unwrap();
    let path = as_arg(&config);
    refused(
        1,
        &["serve", "--config", &path],
        &[&format!("{path}:4: "), "'bs'"],
    );
    refused(
        1,
        &["serve", "--config", "/no/such/conf"],
        &["/no/such/conf"],
    );
    refused(2, &["serve"], &["DISK"]);
}
