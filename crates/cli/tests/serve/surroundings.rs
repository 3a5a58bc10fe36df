//! Checks failures of what a server depends on: storage that does not respond, a log that no
//! process reads, threads that cannot be created, files that cannot grow.

use crate::support::nbd::{make_image, prints, python};
use crate::support::{
    Kept, PATIENCE, Served, as_arg, check_refusal, disk_dir, eventually, fathom, listens,
    short_dir, stdout_of,
};
use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

/// The first of two disks is on a server of QEMU, which is stopped in the middle of a request.
#[test]
fn hanging_storage_delays_neither_other_disks_nor_the_end() {
    let (images, dir) = (disk_dir(), short_dir());
    let image = make_image(images.path(), "raw", 64 << 20);
    let path = |name: &str| as_arg(&dir.path().join(name));
    let backend = Kept::spawn(
        Command::new("qemu-nbd")
            .args(["-t", "-f", "raw", "-k", &path("q")])
            .arg(&image),
    );
    eventually("qemu-nbd listens", || {
        listens(&dir.path().join("q")).then_some(())
    });
    let config = format!(
        "api = {{ socket = '{0}' }}\nstop-timeout = '500ms'\n\
         [nbd]\nlisten = ['unix:{1}']\n\
         [[disk]]\nname = 'silent'\nimage = 'nbd+unix:///?socket={2}'\nserver-timeout = 'off'\n\
         filters = ['delay:read=1us']\n\
         [[disk]]\nname = 'other'\nimage = 'null:1G'\nfilters = ['delay:read=1us']\n",
        path("c"),
        path("n"),
        path("q")
    );
    fs::write(dir.path().join("conf"), config).unwrap();
    let (conf, uri) = (path("conf"), path("n"));
    let uri = |export: &str| format!("nbd+unix:///{export}?socket={uri}");
    let mut command = fathom();
    command.args(["serve", "--config", &conf]);
    let mut served = Served::spawn(command, dir);
    served.wait_for("NBD clients connect to");
    let load = |uri: &str, n: &str| stdout_of(&["bench", "--nbd", uri, "--number-ios", n]);
    load(&uri("silent"), "10");
    backend.signal("STOP");
    let script = "import nbd, os, sys, time\n\
                  h = nbd.NBD()\n\
                  h.connect_uri(os.environ['URI'])\n\
                  h.aio_pread(nbd.Buffer(4096), 0)\n\
                  print('sent', flush=True)\n\
                  time.sleep(1000)\n";
    let mut client = Command::new("/usr/bin/python3");
    client.args(["-c", script]).env("URI", uri("silent"));
    let client = client.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut waits = Kept(client.expect("python3 is installed by `make setup`"));
    let mut sent = [0; 4];
    let said = waits.0.stdout.as_mut().unwrap().read_exact(&mut sent);
    said.expect("it has sent a request");
    let control = served.api();
    load(&uri("other"), "100");
    for disk in ["silent", "other"] {
        let set = ["set", &control, "--disk", disk, "delay", "read=2us"];
        stdout_of(&set);
        stdout_of(&["stats", &control, "--disk", disk]);
    }
    let (status, said) = served.terminate();
    let log = served.log();
    assert_eq!(status, Some(1), "{log}");
    assert!(said.contains("other:"), "{said}");
    let lines: Vec<_> = log.lines().filter(|l| l.contains("abandoned")).collect();
    let [line] = lines[..] else {
        panic!("not one line: {log}");
    };
    for word in ["500ms", "--stop-timeout", "'silent'"] {
        assert!(line.contains(word), "{line}");
    }
    assert!(!line.contains("'other'"), "{line}");
    assert!(!log.contains("panicked"), "{log}");
    backend.signal("CONT");
}

#[test]
fn a_log_that_nobody_reads_any_more_ends_nothing() {
    let dir = short_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let mut command = fathom();
    command.args(["serve", "null:1G", "--vhost-user", &path("s")]);
    command.args(["--api", &path("c")]);
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let mut served = Kept(child.expect("it starts"));
    let mut log = BufReader::new(served.0.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("serving") {
        line.clear();
        assert!(log.read_line(&mut line).unwrap() > 0);
    }
    drop(log);
    for _ in 0..3 {
        let mut stranger = UnixStream::connect(path("s")).unwrap();
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        // The server disconnects the client, and would write a line about it to the log.
        assert!(matches!(stranger.read(&mut [0]), Ok(0) | Err(_)));
        let (socket, n) = (path("s"), "100");
        stdout_of(&["bench", "--vhost-user", &socket, "--number-ios", n]);
    }
    stdout_of(&["quit", &path("c")]);
    assert!(served.0.wait().unwrap().success());
}

/// A user without other processes, to whom limits apply.
const NOBODY: u32 = 64_321;

#[test]
fn threads_that_cannot_be_made_end_nothing() {
    let dir = short_dir();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let socket = as_arg(&dir.path().join("n"));
    let mut command = fathom();
    command.uid(NOBODY).gid(NOBODY);
    command.args(["serve", "null:1G", "--nbd", &format!("unix:{socket}")]);
    command.arg("--vhost-user").arg(dir.path().join("s"));
    command.arg("--api").arg(dir.path().join("c"));
    command.args(["--filter", "delay:read=1us"]);
    let mut served = Served::spawn(command, dir);
    served.wait_for("NBD clients connect to");
    // Sets the limit as this user, because root may lack the right to do so.
    let pid = served.child.id().to_string();
    let mut limit = Command::new("prlimit");
    limit.uid(NOBODY).gid(NOBODY);
    let limited = limit.args(["--nproc=0:0", "--pid", &pid]).status();
    assert!(limited.expect("prlimit is installed").success());
    for _ in 0..3 {
        // The server's interrupts may block, and the front-end disconnects while requests are in
        // flight.
        served.load(1000, &["--iodepth", "8"]);
        let uri = format!("nbd+unix:///?socket={socket}");
        let refused = ["bench", "--nbd", &uri, "--number-ios", "1"];
        let client = fathom().args(refused).output().unwrap();
        assert!(!client.status.success());
        stdout_of(&["set", &served.api(), "delay", "read=2us"]);
    }
    let log = served.log();
    assert!(log.contains("nbd: cannot start a thread"), "{log}");
    stdout_of(&["quit", &served.api()]);
    assert_eq!(served.end().0, Some(0), "{}", served.log());
    assert!(!served.log().contains("panicked"), "{}", served.log());
}

#[test]
fn thaw_without_a_thread_releases_clients() {
    let dir = short_dir();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let address = format!("unix:{}", as_arg(&dir.path().join("n")));
    let mut command = fathom();
    command.uid(NOBODY).gid(NOBODY);
    command.args(["serve", "memory:8M", "--nbd", &address, "--api"]);
    command.arg(dir.path().join("c"));
    let mut served = Served::spawn(command, dir);
    served.wait_for("NBD clients connect to");
    let script = "import nbd, os, sys\n\
                  h = nbd.NBD()\n\
                  h.connect_uri(os.environ['URI'])\n\
                  print('connected', flush=True)\n\
                  sys.stdin.readline()\n\
                  h.pread(4096, 0)\n\
                  print('read', flush=True)\n";
    let client = Command::new("/usr/bin/python3")
        .args(["-c", script])
        .env("URI", format!("nbd+unix:///?socket={}", served.arg("n")))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let mut client = Kept(client.unwrap());
    let mut lines = BufReader::new(client.0.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "connected");
    stdout_of(&["disk", "freeze", &served.api()]);
    let pid = served.child.id().to_string();
    let mut limit = Command::new("prlimit");
    limit.uid(NOBODY).gid(NOBODY);
    let limited = limit.args(["--nproc=0:0", "--pid", &pid]).status();
    assert!(limited.expect("prlimit is installed").success());
    stdout_of(&["disk", "thaw", &served.api()]);
    assert!(
        served.log().contains("cannot start a thread"),
        "{}",
        served.log()
    );
    client.0.stdin.take().unwrap().write_all(b"go\n").unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || tell.send(lines.next().unwrap().unwrap()));
    let line = told.recv_timeout(PATIENCE);
    assert_eq!(line.as_deref(), Ok("read"), "{}", served.log());
}

/// No operation waits for the reader of the log, not even the end of the server.
#[test]
fn a_log_that_nobody_reads_for_now_holds_up_nothing() {
    let dir = short_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let uri = format!("nbd+unix:///?socket={}", path("n"));
    let mut command = fathom();
    command.args(["serve", "null:1G", "--api", &path("c")]);
    command.args([
        "--vhost-user",
        &path("s"),
        "--nbd",
        &format!("unix:{}", path("n")),
    ]);
    // Logs all lines, however frequent, and all requests.
    command.args(["--log", "debug", "--filter", "log"]);
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let mut served = Kept(child.expect("it starts"));
    let stderr = served.0.stderr.take().unwrap();
    rustix::pipe::fcntl_setpipe_size(&stderr, 4096).unwrap();
    let mut log = BufReader::new(stderr);
    let mut line = String::new();
    while !line.contains("NBD clients connect to") {
        line.clear();
        assert!(log.read_line(&mut line).unwrap() > 0);
    }
    // The server refuses each of these clients, and logs a line about each. Twenty lines fill the
    // pipe.
    const STRANGERS: usize = 200;
    for n in 0..STRANGERS {
        let socket = if n % 2 == 0 { path("n") } else { path("s") };
        let mut stranger = UnixStream::connect(socket).unwrap();
        stranger.set_read_timeout(Some(PATIENCE)).unwrap();
        let _ = stranger.write_all(&[0xff; 64]);
        let end = stranger.read_to_end(&mut Vec::new());
        let waited = end.is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
        assert!(!waited, "stranger {n} is not answered");
    }
    let (socket, control) = (path("s"), path("c"));
    let answers = |args: &[&str]| {
        let mut child = Kept::spawn(fathom().args(args));
        let status = eventually("an answer", || child.0.try_wait().unwrap());
        status.success()
    };
    // More lines than the filter buffers.
    assert!(answers(&[
        "bench",
        "--nbd",
        &uri,
        "--iodepth",
        "64",
        "--number-ios",
        "100000"
    ]));
    assert!(answers(&[
        "bench",
        "--vhost-user",
        &socket,
        "--number-ios",
        "100"
    ]));
    assert!(!answers(&["set", &control, "log", "format=json"]));
    assert!(answers(&["stats", &control]));
    stdout_of(&["quit", &control]);
    let ended = eventually("its end", || served.0.try_wait().unwrap());
    assert!(ended.success());
}

/// A limit on the size of files is like a full disk: writes fail, and nothing else does.
#[test]
fn files_that_may_not_grow_fail_writes_and_nothing_else() {
    const LIMIT: u64 = 1 << 20;
    let images = disk_dir();
    let file = |engine: &str| {
        let dir = images.path().join(engine);
        fs::create_dir(&dir).unwrap();
        make_image(&dir, "qcow2", 64 << 20)
    };
    // The limit also applies to memory disks, whose memory is a file.
    let mut command = Command::new("prlimit");
    command.arg(format!("--fsize={LIMIT}"));
    let socket = as_arg(&images.path().join("s"));
    let args = ["serve", "memory:8M", "--vhost-user", &socket];
    let output = command
        .arg(fathom().get_program())
        .args(args)
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    check_refusal(output.status, &error, 1, &["memory:", "ulimit -f"]);
    for engine in ["io_uring", "native", "threads"] {
        let image = file(engine);
        let dir = short_dir();
        let path = |name: &str| as_arg(&dir.path().join(name));
        let config = format!(
            "api = {{ socket = '{}' }}\n[nbd]\nlisten = ['unix:{}']\n\
             [[disk]]\nname = 'grows'\nimage = '{image}'\nformat = 'qcow2'\naio = '{engine}'\n\
             [[disk]]\nname = 'other'\nimage = 'memory:1M'\n",
            path("c"),
            path("n"),
        );
        fs::write(dir.path().join("conf"), config).unwrap();
        let (conf, socket) = (path("conf"), path("n"));
        let mut command = Command::new("prlimit");
        command.arg(format!("--fsize={LIMIT}"));
        command
            .arg(fathom().get_program())
            .args(["serve", "--config", &conf]);
        let mut served = Served::spawn(command, dir);
        served.wait_for("NBD clients connect to");
        let script = "
import nbd, os
def disk(name):
    h = nbd.NBD()
    h.connect_uri('nbd+unix:///%s?socket=%s' % (name, os.environ['SOCKET']))
    return h
grows, other = disk('grows'), disk('other')
size, written = 65536, 0
try:
    while True:
        grows.pwrite(b'x' * size, written)
        written += size
except nbd.Error as error:
    assert error.errno == 'ENOSPC', error
assert 0 < written <= int(os.environ['LIMIT']), written
other.pwrite(b'y' * size, 0)
assert other.pread(size, 0) == b'y' * size
assert grows.pread(written, 0) == b'x' * written
grows.flush()
print(written)
";
        let limit = LIMIT.to_string();
        let written = python(script, &[("SOCKET", &socket), ("LIMIT", &limit)]);
        let control = served.api();
        stdout_of(&["stats", &control, "--disk", "grows"]);
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        let pattern = format!("read -P 0x78 0 {}", written.trim());
        prints(images.path(), "qemu-img", &["check", "-q", &image]);
        let said = prints(images.path(), "qemu-io", &["-c", &pattern, &image]);
        assert!(!said.contains("Pattern verification failed"), "{said}");
    }
    // The limit also applies to an image that is being made.
    let raw = images.path().join("raw");
    fs::write(&raw, vec![1; 2 * LIMIT as usize]).unwrap();
    let target = as_arg(&images.path().join("target"));
    let mut command = Command::new("prlimit");
    command
        .arg(format!("--fsize={LIMIT}"))
        .arg(fathom().get_program());
    command.args(["img", "convert", "-f", "raw", "-O", "qcow2"]);
    let output = command.arg(&raw).arg(&target).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    check_refusal(output.status, &said, 1, &["file too large"]);
}
