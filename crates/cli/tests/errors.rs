//! What users are told when something is wrong: one line that helps.

mod support;

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use support::{as_arg, disk_dir, refused, run, short_dir, stdout_of};

#[test]
fn every_command_tells_all_its_options() {
    for (command, options) in [
        (
            "serve",
            "DISK --vhost-user --format --readonly --aio --cache --queues --iothreads --cpus \
             --register-memory --poll --serial --trace --control --force-share --no-discard --json --log",
        ),
        ("stats", "PID|SOCKET --json --watch"),
        ("info", "PID|SOCKET --json"),
        ("resize", "PID|SOCKET --json"),
        ("quit", "PID|SOCKET"),
        ("trace", "FILE --json --follow --pid --on --off"),
        ("bench", "--vhost-user --rw --bs --iodepth"),
        ("lab", "run"),
        ("breakdown", "--pid --seconds --disk --qmp --join --output"),
        ("guest", "record"),
        ("report", "RUN --html --json --csv --perfetto"),
        ("img", "create info check"),
    ] {
        let help = stdout_of(&[command, "--help"]);
        for option in options.split_whitespace() {
            assert!(help.contains(option), "{command}: no {option} in {help}");
        }
        assert!(stdout_of(&["--help"]).contains(command));
    }
    assert!(stdout_of(&["--version"]).starts_with("fathom "));
}

#[test]
fn wrong_arguments_are_told_in_one_line() {
    let serve = |args: &[&'static str]| {
        let socket = ["serve", "null:1G", "--vhost-user", "/nonexistent/s"];
        [&socket, args].concat()
    };
    for (args, words) in [
        (vec!["sevre"], "sevre"),
        (vec!["serve"], "<DISK>"),
        (vec!["serve", "null:1X", "--vhost-user", "s"], "not a size"),
        (vec!["serve", "memory:0", "--vhost-user", "s"], "512 bytes"),
        (
            vec!["serve", "null:1G", "--vhost-user", "fd:x"],
            "file descriptor",
        ),
        (serve(&["--format", "qcow2"]), "not supported"),
        (serve(&["--format", "ext4"]), "raw"),
        (serve(&["--aio", "posix"]), "io_uring, native or threads"),
        (serve(&["--cache", "unsafe"]), "writeback"),
        (serve(&["--queues", "0"]), "1..=256"),
        (serve(&["--queues", "257"]), "1..=256"),
        (serve(&["--iothreads", "0"]), "1..=256"),
        (serve(&["--cpus", "1-"]), "list of CPUs"),
        (serve(&["--poll", "20"]), "duration"),
        (serve(&["--serial", "a serial of 21 bytes."]), "20"),
        (serve(&["--force-share"]), "--readonly"),
        (serve(&["--frobnicate"]), "--frobnicate"),
        (serve(&["--log", "=,="]), "--log"),
        (vec!["stats"], "PID|SOCKET"),
        (vec!["stats", "1", "--watch", "0"], "seconds"),
        (vec!["trace"], "FILE"),
        (vec!["trace", "file", "--pid", "1", "--off"], "--pid"),
        (vec!["trace", "--pid", "1"], "--on"),
        (vec!["trace", "--pid", "1", "--on", "x", "--off"], "--off"),
    ] {
        refused(2, &args, &[words]);
    }
    assert_eq!(run(&[]).status.code(), Some(2));
}

#[test]
fn disks_that_cannot_be_served_are_told_in_one_line() {
    let dir = disk_dir();
    let sockets = short_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let (socket, control) = (
        as_arg(&sockets.path().join("s")),
        as_arg(&sockets.path().join("c")),
    );
    let served = |disk: &str, status, words: &[&str]| {
        let args = [
            "serve",
            disk,
            "--vhost-user",
            &socket,
            "--control",
            &control,
        ];
        refused(status, &args, words);
        assert_eq!(fs::read_dir(sockets.path()).unwrap().count(), 0, "{disk}");
    };
    served(&path("missing"), 1, &["missing", "No such file"]);
    served(&path(""), 1, &["irectory"]);
    served("/dev/null", 1, &["/dev/null"]);
    fs::write(dir.path().join("empty"), "").unwrap();
    served(&path("empty"), 1, &["empty"]);
    let fifo = Command::new("mkfifo").arg(path("fifo")).status().unwrap();
    assert!(fifo.success());
    served(&path("fifo"), 1, &["fifo"]);
    for format in ["qcow2", "qed", "vmdk", "vdi", "vhdx"] {
        let made = Command::new("qemu-img")
            .args(["create", "-q", "-f", format, &path(format), "1M"])
            .status()
            .expect("qemu-img is installed by `make setup`");
        assert!(made.success());
        let looks = format!("looks like {format}");
        served(&path(format), 1, &[&looks, "--format raw"]);
    }
}

#[test]
fn what_looks_like_another_format_is_served_when_the_user_insists() {
    let dir = disk_dir();
    let image = dir.path().join("disk.img");
    let mut bytes = vec![0; 1 << 20];
    bytes[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    fs::write(&image, &bytes).unwrap();
    let mut served = support::Served::start(&as_arg(&image), &["--format", "raw"]);
    assert_eq!(served.terminate().0, Some(0));
    assert_eq!(fs::read(&image).unwrap(), bytes);
}

#[test]
fn an_image_that_is_truncated_while_served_is_told_once() {
    let dir = disk_dir();
    let image = dir.path().join("disk.img");
    let file = fs::File::create(&image).unwrap();
    file.set_len(1 << 20).unwrap();
    let mut served = support::Served::start(&as_arg(&image), &[]);
    served.load(100, &["--rw", "randread"]);
    file.set_len(4096).unwrap();
    let socket = served.arg("s");
    let past_end = ["--rw", "read", "--offset", "512k", "--number-ios", "100"];
    let load = run(&[&["bench", "--vhost-user", &socket], &past_end[..]].concat());
    assert!(!load.status.success());
    let error = String::from_utf8_lossy(&load.stderr).into_owned();
    assert!(error.contains("IOERR"), "{error}");
    let log = served.log();
    let line = format!(
        "{}: was truncated while it was served: it ends at 4096 bytes, the disk at 1048576",
        image.display()
    );
    assert_eq!(log.matches(&line).count(), 1, "{log}");
    assert!(!log.contains("Input/output error"), "{log}");
    served.load(8, &["--rw", "read", "--bs", "512"]);
    file.set_len(1 << 20).unwrap();
    served.load(100, &["--rw", "randread"]);
    assert_eq!(served.terminate().0, Some(0));
}

#[test]
fn sockets_and_traces_that_cannot_be_made_are_told_in_one_line() {
    let dir = short_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    fs::write(dir.path().join("file"), "precious").unwrap();
    let long = "x".repeat(120);
    let serve = |socket: &str, control: &str, more: &[&str], words: &[&str]| {
        let args = [
            "serve",
            "null:1G",
            "--vhost-user",
            socket,
            "--control",
            control,
        ];
        refused(1, &[&args, more].concat(), words);
    };
    serve(&path("file"), &path("c"), &[], &["not a socket"]);
    serve(&path("s"), &path("file"), &[], &["not a socket"]);
    serve(
        "/nonexistent/s",
        &path("c"),
        &[],
        &["/nonexistent/s", "No such file"],
    );
    serve(
        &path("s"),
        "/nonexistent/c",
        &[],
        &["/nonexistent/c", "No such file"],
    );
    serve(&path(&long), &path("c"), &[], &["longer than"]);
    serve("fd:77", &path("c"), &[], &["file descriptor 77"]);
    let trace = ["--trace", "/nonexistent/trace"];
    serve(&path("s"), &path("c"), &trace, &["--trace", "No such file"]);
    let file = path("file");
    serve(
        &path("s"),
        &path("c"),
        &["--trace", &file],
        &["not a trace"],
    );
    serve(&path("s"), &path("c"), &["--cpus", "1023"], &["CPU"]);
    refused(1, &["serve", "null:1G"], &["no socket", "--vhost-user"]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    assert_eq!(fs::read(dir.path().join("file")).unwrap(), b"precious");
}

#[test]
fn daemons_that_are_not_there_are_told_in_one_line() {
    let dir = short_dir();
    let missing = as_arg(&dir.path().join("c"));
    for command in ["stats", "info", "resize", "quit"] {
        refused(1, &[command, &missing], &[&missing, "no daemon"]);
    }
    refused(1, &["trace", "--pid", &missing, "--off"], &["no daemon"]);
    let file = as_arg(&dir.path().join("file"));
    fs::write(&file, "").unwrap();
    refused(1, &["stats", &file], &["no daemon"]);
    // Something else listens there.
    let path = dir.path().join("other");
    let other = UnixListener::bind(&path).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            use std::io::Write;
            for words in ["HTTP/1.1 400 Bad Request\r\n", "{}\n", "[1]", ""] {
                let (mut socket, _) = other.accept().unwrap();
                socket.write_all(words.as_bytes()).unwrap();
                let _ = socket.shutdown(std::net::Shutdown::Write);
                std::io::copy(&mut socket, &mut std::io::sink()).unwrap();
            }
        });
        for _ in 0..3 {
            refused(1, &["stats", &as_arg(&path)], &["control protocol"]);
        }
        refused(1, &["stats", &as_arg(&path)], &["closed the connection"]);
    });
}

#[test]
fn files_that_are_no_traces_are_told_in_one_line() {
    refused(1, &["trace", "/nonexistent/trace"], &["No such file"]);
    for path in [
        Path::new("/dev/zero"),
        Path::new("/etc/passwd"),
        Path::new("/"),
    ] {
        refused(1, &["trace", &as_arg(path)], &["not a trace"]);
    }
}
