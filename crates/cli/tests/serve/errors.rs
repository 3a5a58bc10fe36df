//! Checks error messages: each is one line that helps the user.

use crate::support::{as_arg, disk_dir, refused, run, short_dir, stdout_of};
use std::fs;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

#[test]
fn every_command_tells_all_its_options() {
    for (command, options) in [
        (
            "serve",
            "DISK --vhost-user --format --readonly --aio --cache --queues --iothreads --cpus \
             --register-memory --poll --serial --trace --force-share --no-discard --json --log \
             --offset --size --metadata-cache --zero-missing-clusters --allow-dir --data-file --server-timeout nbd://",
        ),
        ("stats", "PID|SOCKET --json --watch"),
        ("show", "PID|SOCKET --json --server --qemu"),
        ("resize", "PID|SOCKET --json"),
        ("quit", "PID|SOCKET"),
        ("trace", "FILE --json --follow --disk --server --on --off"),
        (
            "bench",
            "--vhost-user --nbd --rw --bs --iodepth --replies --workload",
        ),
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
        (serve(&["--format", "parallels"]), "qemu-img convert"),
        (
            serve(&["--format", "ext4"]),
            "known are raw, qcow2, qed, luks",
        ),
        (serve(&["--offset", "x"]), "not a size"),
        (serve(&["--metadata-cache", "much"]), "not a size"),
        (serve(&["--aio", "posix"]), "io_uring, native or threads"),
        (serve(&["--cache", "unsafe"]), "writeback"),
        (serve(&["--queues", "0"]), "must be 1 to 256"),
        (serve(&["--queues", "257"]), "must be 1 to 256"),
        (serve(&["--iothreads", "0"]), "must be 1 to 256"),
        (serve(&["--cpus", "1-"]), "list of CPUs"),
        (serve(&["--poll", "20"]), "duration"),
        (serve(&["--serial", "a serial of 21 bytes."]), "20"),
        (serve(&["--force-share"]), "--readonly"),
        (serve(&["--frobnicate"]), "--frobnicate"),
        (serve(&["--log", "=,="]), "--log"),
        (serve(&["--log", "loud"]), "'loud' is not a level"),
        (serve(&["--log", "info,fathom_core"]), "MODULE=LEVEL"),
        (
            vec!["serve", "http://host/disk.img", "--vhost-user", "s"],
            "http://",
        ),
        (vec!["bench"], "--nbd <URI>"),
        (vec!["bench", "--nbd", "/run/s"], "nbd+unix:///?socket=PATH"),
        (vec!["bench", "--nbd", "nbd://h", "file"], "cannot be used"),
        (vec!["bench", "file", "--replies", "simple"], "--replies"),
        (vec!["bench", "--workload", "mail-server"], "required"),
        (vec!["bench", "dir", "--files", "9"], "--workload"),
        (vec!["stats"], "PID|SOCKET"),
        (vec!["stats", "1", "--watch", "0"], "seconds"),
        (vec!["trace"], "FILE"),
        (vec!["trace", "file", "--server", "1", "--off"], "--server"),
        (vec!["trace", "--disk", "a"], "--on"),
        (
            vec!["trace", "--server", "1", "--on", "x", "--off"],
            "--off",
        ),
    ] {
        refused(2, &args, &[words]);
    }
    assert_eq!(run(&[]).status.code(), Some(2));
    let dir = short_dir();
    let socket = as_arg(&dir.path().join("s"));
    let cpu = [
        "serve",
        "null:1G",
        "--vhost-user",
        &socket,
        "--cpus",
        "1023",
    ];
    refused(
        1,
        &cpu,
        &["--cpus: CPU 1023 does not exist; this machine has CPUs 0"],
    );
}

#[test]
fn what_the_log_says_is_chosen() {
    for (filter, is_told) in [
        ("info", true),
        ("warn,fathom_daemon=info", true),
        ("off", false),
    ] {
        let dir = short_dir();
        let mut command = crate::support::fathom();
        command.args(["serve", "null:1M", "--log", filter, "--vhost-user"]);
        command
            .arg(dir.path().join("s"))
            .arg("--api")
            .arg(dir.path().join("c"));
        let mut served = crate::support::Served::spawn(command, dir);
        let control = served.api();
        crate::support::eventually("it serves", || {
            run(&["info", &control]).status.success().then_some(())
        });
        served.terminate();
        assert_eq!(served.log().contains("serving null"), is_told, "{filter}");
    }
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
        let args = ["serve", disk, "--vhost-user", &socket, "--api", &control];
        refused(status, &args, words);
        assert_eq!(fs::read_dir(sockets.path()).unwrap().count(), 0, "{disk}");
    };
    served(&path("missing"), 1, &["missing", "no such file"]);
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
        let looks = format!("looks like a {format}");
        let advice = match format {
            "qcow2" | "qed" => format!("--format {format}"),
            _ => format!("--format {format} --readonly"),
        };
        served(&path(format), 1, &[&looks, "--format raw", &advice]);
    }
    for (format, magic) in [
        ("luks", &b"LUKS\xba\xbe\0\x01"[..]),
        ("luks", b"LUKS\xba\xbe\0\x02"),
        ("qcow", b"QFI\xfb\0\0\0\x01"),
        ("parallels", b"WithoutFreeSpace"),
        ("vmdk", b"# disk descriptorfile\nversion=1\n"),
    ] {
        let mut image = vec![0; 1 << 20];
        image[..magic.len()].copy_from_slice(magic);
        fs::write(dir.path().join("image"), image).unwrap();
        let looks = format!("looks like a {format} image;");
        served(&path("image"), 1, &[&looks, "--format raw"]);
    }
}

/// Checks that `fathom serve IMAGE` with more options fails with these words.
fn not_served(image: &str, more: &[&str], words: &[&str]) {
    let sockets = short_dir();
    let path = |name: &str| as_arg(&sockets.path().join(name));
    let (socket, control) = (path("s"), path("c"));
    let args = ["serve", image, "--vhost-user", &socket, "--api", &control];
    refused(1, &[&args, more].concat(), words);
    assert_eq!(fs::read_dir(sockets.path()).unwrap().count(), 0, "{image}");
}

fn qemu_img(args: &[&str]) {
    let done = Command::new("qemu-img").args(args).output();
    let done = done.expect("qemu-img is installed by `make setup`");
    let errors = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success(), "{args:?}: {errors}");
}

#[test]
fn options_that_do_not_go_together_are_told_in_one_line() {
    let dir = disk_dir();
    let raw = as_arg(&dir.path().join("raw"));
    fs::write(&raw, [0; 4096]).unwrap();
    for (disk, more, words) in [
        ("null:1G", "--format qcow2", "in files"),
        ("memory:1M", "--offset 0", "in files"),
        (&raw, "--format qcow2 --offset 512", "raw images"),
        (&raw, "--format qed --size 512", "raw images"),
        (&raw, "--offset 100", "512"),
        (&raw, "--size 1000", "512"),
        (&raw, "--size 0", "512"),
        (&raw, "--metadata-cache 1M", "qcow2"),
        (&raw, "--zero-missing-clusters", "qcow2"),
        (&raw, "--format qcow2 --metadata-cache 0", "64k"),
        (&raw, "--allow-dir /", "qcow2"),
        (&raw, "--data-file x", "qcow2"),
        (&raw, "--offset 4096", "raw: the file has 4096 bytes"),
        (&raw, "--offset 1G", "raw: the file has 4096 bytes"),
        (
            &raw,
            "--offset 2048 --size 2560",
            "raw: the file has 4096 bytes",
        ),
        (&raw, "--format qcow2", "not a qcow2 image"),
        (&raw, "--format qed", "not a qed image"),
    ] {
        let more: Vec<_> = more.split(' ').collect();
        not_served(disk, &more, &[words]);
    }
}

/// Sets bits in the byte at `at`.
fn set_bits(image: &Path, at: usize, bits: u8) {
    let mut bytes = fs::read(image).unwrap();
    bytes[at] |= bits;
    fs::write(image, bytes).unwrap();
}

#[test]
fn images_that_cannot_be_served_are_told_in_one_line() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let create = |format: &str, name: &str, more: &[&str]| {
        let args = ["create", "-q", "-f", format];
        qemu_img(&[&args[..], more, &[&path(name), "1M"]].concat());
    };
    let qcow2 = |name: &str, more: &[&str], words: &[&str]| {
        not_served(&path(name), &[&["--format", "qcow2"], more].concat(), words);
    };
    create("qcow2", "sound", &[]);
    create("qed", "qed", &[]);
    qcow2("qed", &[], &["qed: not a qcow2 image"]);
    not_served(&path("sound"), &["--format", "qed"], &["not a qed image"]);
    qcow2(
        "sound",
        &["--allow-dir", "/nonexistent"],
        &["--allow-dir", "no such file"],
    );

    let secret = ["--object", "secret,id=s,data=abc", "-o"];
    let luks = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    create("qcow2", "luks", &[&secret[..], &[luks]].concat());
    qcow2("luks", &[], &["luks: ", "encrypted", "--key"]);

    create("qcow2", "corrupt", &[]);
    set_bits(&dir.path().join("corrupt"), 79, 2);
    qcow2(
        "corrupt",
        &[],
        &["corrupt: ", "fathom img check --repair all", "--readonly"],
    );
    create("qcow2", "future", &[]);
    set_bits(&dir.path().join("future"), 72, 0x80);
    qcow2("future", &[], &["future: ", "not supported", "bit 63"]);
    fs::write(dir.path().join("short"), b"QFI\xfb\0\0\0\x03").unwrap();
    qcow2("short", &[], &["short: "]);
}

#[test]
fn files_that_an_image_names_in_vain_are_told_in_one_line() {
    let dir = disk_dir();
    let other = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let elsewhere = as_arg(&other.path().join("base"));
    fs::write(dir.path().join("base"), [0; 4096]).unwrap();
    fs::write(&elsewhere, [0; 4096]).unwrap();
    let above = |name: &str, below: &str, format: &str| {
        let args = [
            "create", "-q", "-f", "qcow2", "-u", "-b", below, "-F", format,
        ];
        qemu_img(&[&args[..], &[&path(name), "1M"]].concat());
    };
    let fifo = Command::new("mkfifo").arg(path("fifo")).status().unwrap();
    assert!(fifo.success());
    for (name, below, words) in [
        ("missing", "nothing", "no such file"),
        ("out", "../../../../../../etc/passwd", "--allow-dir /etc"),
        ("away", &elsewhere, "--allow-dir"),
        ("nbd", "nbd:localhost:10809", "protocol 'nbd'"),
        ("json", "json:{\"driver\":\"null-co\"}", "only files"),
        ("fifo-above", "fifo", "not a regular file"),
        ("directory", ".", "not a regular file"),
    ] {
        above(name, below, "raw");
        let image = path(name);
        not_served(
            &image,
            &["--format", "qcow2"],
            &[&format!("{image}: "), words],
        );
    }
    let allow = ["--format", "qcow2", "--allow-dir", &as_arg(other.path())];
    fs::remove_file(&elsewhere).unwrap();
    not_served(&path("away"), &allow, &["away: ", "no such file"]);

    above("wrong", "base", "qcow2");
    not_served(
        &path("wrong"),
        &["--format", "qcow2"],
        &["base: not a qcow2 image"],
    );
    above("parallels", "base", "parallels");
    let qcow2 = ["--format", "qcow2"];
    not_served(&path("parallels"), &qcow2, &["parallels: ", "'parallels'"]);
    above("one", "two", "qcow2");
    above("two", "one", "qcow2");
    not_served(&path("one"), &["--format", "qcow2"], &["one: ", "twice"]);
    above("self", "self", "qcow2");
    not_served(&path("self"), &["--format", "qcow2"], &["self: ", "twice"]);

    let option = format!("data_file={}", path("data"));
    let data = ["create", "-q", "-f", "qcow2", "-o", &option];
    qemu_img(&[&data[..], &[&path("with-data"), "1M"]].concat());
    let (with_data, of_it) = (path("with-data"), path("data"));
    let qcow2 = ["--format", "qcow2"];
    let advice = format!("--data-file {of_it}");
    not_served(&with_data, &qcow2, &["with-data: ", &advice]);
    // An allowed directory does not include data files.
    let allow = ["--allow-dir", &as_arg(dir.path())];
    not_served(&with_data, &[qcow2, allow].concat(), &[&advice]);
    let named = [qcow2, ["--data-file", &of_it]].concat();
    above("plain", "base", "raw");
    not_served(&path("plain"), &named, &["no external data file"]);
    fs::remove_file(&of_it).unwrap();
    not_served(&with_data, &named, &["data: ", "no such file"]);
    let read_only = [&qcow2[..], &["--readonly"]].concat();
    not_served(&with_data, &read_only, &["data", "no such file"]);
}

#[test]
fn raw_image_like_another_format_is_served_on_request() {
    let dir = disk_dir();
    let image = dir.path().join("disk.img");
    let mut bytes = vec![0; 1 << 20];
    bytes[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    fs::write(&image, &bytes).unwrap();
    let mut served = crate::support::Served::start(&as_arg(&image), &["--format", "raw"]);
    assert_eq!(served.terminate().0, Some(0));
    assert_eq!(fs::read(&image).unwrap(), bytes);
}

#[test]
fn an_image_that_is_truncated_while_served_is_told_once() {
    let dir = disk_dir();
    let image = dir.path().join("disk.img");
    let file = fs::File::create(&image).unwrap();
    file.set_len(1 << 20).unwrap();
    let mut served = crate::support::Served::start(&as_arg(&image), &[]);
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
        "{}: truncated while it was served: the file ends at 4096 bytes, the disk at 1048576",
        image.display()
    );
    assert_eq!(log.matches(&line).count(), 1, "{log}");
    assert!(!log.contains("input/output error"), "{log}");
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
        let args = ["serve", "null:1G", "--vhost-user", socket, "--api", control];
        refused(1, &[&args, more].concat(), words);
    };
    serve(&path("file"), &path("c"), &[], &["not a socket"]);
    serve(&path("s"), &path("file"), &[], &["not a socket"]);
    serve(
        "/nonexistent/s",
        &path("c"),
        &[],
        &["/nonexistent/s", "no such directory"],
    );
    serve(
        &path("s"),
        "/nonexistent/c",
        &[],
        &["/nonexistent/c", "no such directory"],
    );
    serve(&path(&long), &path("c"), &[], &["longer than"]);
    serve("fd:77", &path("c"), &[], &["file descriptor 77"]);
    let trace = ["--trace", "/nonexistent/trace"];
    serve(&path("s"), &path("c"), &trace, &["--trace", "no such file"]);
    let file = path("file");
    serve(
        &path("s"),
        &path("c"),
        &["--trace", &file],
        &["not a trace"],
    );
    serve(&path("s"), &path("c"), &["--cpus", "1023"], &["CPU"]);
    refused(1, &["serve", "null:1G"], &["--vhost-user, --nbd or --fuse"]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    assert_eq!(fs::read(dir.path().join("file")).unwrap(), b"precious");
}

#[test]
fn daemons_that_are_not_there_are_told_in_one_line() {
    let dir = short_dir();
    let missing = as_arg(&dir.path().join("c"));
    for command in ["stats", "info", "resize", "quit"] {
        refused(1, &[command, &missing], &[&missing, "no server"]);
    }
    refused(1, &["trace", "--pid", &missing, "--off"], &["no server"]);
    let file = as_arg(&dir.path().join("file"));
    fs::write(&file, "").unwrap();
    refused(1, &["stats", &file], &["no server"]);
    // Another program listens on the socket.
    let path = dir.path().join("other");
    let other = UnixListener::bind(&path).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            use std::io::Write;
            for words in ["220 mail ESMTP\r\n", "{}\n", "[1]", ""] {
                let (mut socket, _) = other.accept().unwrap();
                socket.write_all(words.as_bytes()).unwrap();
                let _ = socket.shutdown(std::net::Shutdown::Write);
                std::io::copy(&mut socket, &mut std::io::sink()).unwrap();
            }
        });
        for _ in 0..3 {
            refused(1, &["stats", &as_arg(&path)], &["not a fathom server"]);
        }
        refused(1, &["stats", &as_arg(&path)], &["closed the connection"]);
    });
}

#[test]
fn files_that_are_no_traces_are_told_in_one_line() {
    refused(1, &["trace", "/nonexistent/trace"], &["no such file"]);
    for path in [
        Path::new("/dev/zero"),
        Path::new("/etc/passwd"),
        Path::new("/"),
    ] {
        refused(1, &["trace", &as_arg(path)], &["not a trace"]);
    }
}
