//! Checks starting and stopping the server, and the commands that show its state.

use crate::support::{
    Served, as_arg, disk_dir, eventually, fathom, make_dead_socket, run, short_dir, stdout_of,
};
use fathom_testing::until;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::Stdio;

/// Returns the stages of one operation in a summary.
fn stages<'a>(summary: &'a Value, op: &str) -> &'a Vec<Value> {
    let operations = summary["operations"].as_array().expect("operations");
    let of_op = operations.iter().find(|o| o["op"] == op);
    of_op.expect(op)["stages"].as_array().expect("stages")
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn a_disk_is_served_asked_about_and_ended() {
    let mut served = Served::start("null:1T", &[]);
    let log = served.log();
    let line = format!(
        "serving null:1099511627776 (1 TiB, raw, io_uring) on vhost-user {}",
        served.arg("s")
    );
    assert!(
        log.lines().next().is_some_and(|l| l.ends_with(&line)),
        "{log}"
    );
    assert!(!log.contains('\u{1b}'), "colours in a file: {log}");
    assert_eq!(stdout_of(&["stats", &served.api()]), "no requests yet\n");
    served.load(10_000, &["--rw", "randread", "--iodepth", "32"]);

    // A client may get its reply before the server counts the request.
    let summary = eventually("all are counted", || {
        let summary = json(&stdout_of(&["stats", &served.api(), "--json"]));
        let count = stages(&summary, "read")[6]["count"].as_u64();
        (count == Some(10_000)).then_some(summary)
    });
    let table = stdout_of(&["stats", &served.api()]);
    assert_eq!(table.lines().count(), 17, "{table}");
    assert_eq!(summary["operations"][0]["bytes"], 10_000 * 4096);
    let reads = stages(&summary, "read");
    let names: Vec<_> = reads.iter().map(|s| s["stage"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        [
            "wake", "queue", "map", "device", "finish", "notify", "total"
        ]
    );
    for stage in reads {
        assert_eq!(stage["count"], 10_000, "{stage}");
    }
    let mean = |stage: &Value| stage["mean_ns"].as_f64().unwrap();
    let sum: f64 = reads[..6].iter().map(mean).sum();
    assert!((sum / mean(&reads[6]) - 1.0).abs() < 1e-6, "{summary}");

    let (status, stdout) = served.terminate();
    assert_eq!(status, Some(0), "{}", served.log());
    assert_eq!(stdout.lines().count(), 9, "{stdout}");
    assert!(stdout.starts_with("operation"), "{stdout}");
    assert!(!served.path("s").exists() && !served.path("c").exists());
}

#[test]
fn the_end_is_told_in_json() {
    let mut served = Served::start("memory:64M", &["--json"]);
    served.load(1000, &["--rw", "randwrite", "--iodepth", "4"]);
    served.signal("INT");
    let (status, stdout) = served.end();
    assert_eq!(status, Some(0));
    assert_eq!(stages(&json(&stdout), "write")[6]["count"], 1000);
}

#[test]
fn what_is_in_flight_and_what_comes_in_an_interval_is_told() {
    let served = Served::start("memory:64M", &["--filter", "delay:read=3s"]);
    served.load(1000, &["--rw", "write", "--bs", "8k"]);
    let reads = ["--rw", "randread", "--iodepth", "4"];
    let mut load = served.start_load(4, &reads);
    let stats = || json(&stdout_of(&["stats", &served.api(), "--json"]));
    eventually("four reads", || (stats()["in_flight"] == 4).then_some(()));
    assert_eq!(stages(&stats(), "write")[6]["count"], 1000);

    let watch = ["stats", &served.api(), "--watch", "0.2"];
    let mut watching = fathom().args(watch).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(watching.stdout.take().unwrap()).lines();
    let mut next = || output.next().expect("a line").unwrap();
    let line = next();
    assert!(
        line.starts_with("no request completed in 0.") && line.ends_with("; 4 in flight"),
        "{line}"
    );
    assert!(load.wait().unwrap().success());
    let line = loop {
        let line = next();
        if line.contains("IOPS") {
            break line;
        }
    };
    // The earlier writes are not in this interval.
    assert!(
        line.starts_with("read ") && !line.contains("write"),
        "{line}"
    );
    watching.kill().unwrap();
    watching.wait().unwrap();
}

#[test]
fn watching_ends_with_the_daemon() {
    let mut served = Served::start("null:1G", &[]);
    let watch = ["stats", &served.api(), "--watch", "0.01", "--json"];
    let mut watching = fathom().args(watch).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(watching.stdout.take().unwrap()).lines();
    let mut next = || json(&output.next().expect("a line").unwrap());
    next();
    served.load(10, &[]);
    // The first lines may be older than the load.
    until("a line with operations", || {
        next()["operations"] != json("[]")
    });
    assert_eq!(served.terminate().0, Some(0));
    // The command could not end while the pipe is full.
    output.for_each(drop);
    assert!(watching.wait().unwrap().success());
}

#[test]
fn quitting_ends_it_as_a_signal_does() {
    let mut served = Served::start("null:1G", &[]);
    stdout_of(&["quit", &served.api()]);
    assert_eq!(served.end(), (Some(0), "no requests yet\n".into()));
}

#[test]
fn server_ends_in_the_middle_of_a_front_ends_load() {
    let mut served = Served::start("null:1G", &["--iothreads", "2"]);
    let mut bench = fathom()
        .args([
            "bench",
            "--runtime",
            "10m",
            "--iodepth",
            "32",
            "--queues",
            "2",
        ])
        .args(["--vhost-user", &served.arg("s")])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    eventually("requests", || {
        let info = json(&stdout_of(&["info", &served.api(), "--json"]));
        assert_eq!(info["workers"].as_array().unwrap().len(), 2);
        let busy = |worker: &Value| worker["requests"].as_u64() > Some(0);
        let all_busy = info["workers"].as_array().unwrap().iter().all(busy);
        all_busy.then(|| assert_eq!(info["front_end"]["pid"], bench.id()))
    });
    let (status, stdout) = served.terminate();
    assert_eq!(status, Some(0), "{}", served.log());
    assert!(stdout.contains("total"), "{stdout}");
    bench.kill().unwrap();
    bench.wait().unwrap();
}

#[test]
fn info_says_what_is_served_and_how() {
    let dir = disk_dir();
    let image = dir.path().join("disk.img");
    fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
    let args = [
        "--aio",
        "threads",
        "--cache",
        "writeback",
        "--readonly",
        "--queues",
        "3",
    ];
    let served = Served::start(&as_arg(&image), &args);
    let info = json(&stdout_of(&["info", &served.api(), "--json"]));
    for (key, value) in [
        ("disk", Value::from(as_arg(&image))),
        ("size", (64u64 << 20).into()),
        ("format", "raw".into()),
        ("engine", "threads".into()),
        ("cache", "writeback".into()),
        ("read_only", true.into()),
        ("max_queues", 3.into()),
        ("queues_running", 0.into()),
        ("vhost_user", served.arg("s").into()),
        ("front_end", Value::Null),
        ("trace", Value::Null),
        ("bounced", 0.into()),
        ("pid", served.child.id().into()),
    ] {
        assert_eq!(info[key], value, "{key}");
    }
    let text = stdout_of(&["info", &served.api()]);
    assert!(
        text.contains("cache=writeback") && text.contains("read-only"),
        "{text}"
    );
}

#[test]
fn a_resized_image_is_noticed_on_demand() {
    let dir = disk_dir();
    let image = dir.path().join("disk.img");
    let file = fs::File::create(&image).unwrap();
    file.set_len(1 << 20).unwrap();
    let served = Served::start(&as_arg(&image), &[]);
    file.set_len(3 << 20).unwrap();
    let text = stdout_of(&["resize", &served.api()]);
    assert_eq!(text, "the disk has 3 MiB (3145728 bytes)\n");
    let info = json(&stdout_of(&["info", &served.api(), "--json"]));
    assert_eq!(info["size"], 3 << 20);
    // A front-end sees the new size.
    served.load(10, &["--offset", "2M", "--size", "1M"]);
}

#[test]
fn without_a_control_option_it_is_found_by_its_process_id() {
    let dir = short_dir();
    let mut command = fathom();
    command
        .args(["serve", "null:1G", "--vhost-user"])
        .arg(dir.path().join("s"));
    command.env("XDG_RUNTIME_DIR", dir.path());
    let mut served = Served::spawn(command, dir);
    served.wait_for("serving");
    let pid = served.child.id().to_string();
    let output = fathom()
        .args(["stats", &pid])
        .env("XDG_RUNTIME_DIR", served.dir.path())
        .output()
        .unwrap();
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "no requests yet\n",
        "{}",
        served.log()
    );
    assert_eq!(served.terminate().0, Some(0));
    let output = fathom()
        .args(["stats", &pid])
        .env("XDG_RUNTIME_DIR", served.dir.path())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    crate::support::check_refusal(output.status, &stderr, 1, &["no server listens"]);
}

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
    let dir = short_dir();
    let socket = as_arg(&dir.path().join("s"));
    make_dead_socket(socket.as_ref());
    let control = as_arg(&dir.path().join("c"));
    let args = [
        "serve",
        "null:1G",
        "--vhost-user",
        &socket,
        "--api",
        &control,
    ];
    let mut command = fathom();
    command.args(args);
    let mut first = Served::spawn(command, dir);
    first.wait_for("serving");
    let other = as_arg(&first.path("other"));
    crate::support::refused(1, &args, &["s: ", "in use by fathom (process"]);
    let args = [
        "serve",
        "null:1G",
        "--vhost-user",
        &other,
        "--api",
        &control,
    ];
    crate::support::refused(1, &args, &["c: ", "in use by fathom (process"]);
    assert!(!first.path("other").exists());
    stdout_of(&["stats", &control]);
    // A killed server leaves its sockets behind. The next server takes them over.
    first.child.kill().unwrap();
    first.child.wait().unwrap();
    assert!(first.path("s").exists() && first.path("c").exists());
    let args = [
        "serve",
        "null:1G",
        "--vhost-user",
        &socket,
        "--api",
        &control,
    ];
    first.child = fathom().args(args).spawn().unwrap();
    eventually("its successor", || {
        run(&["stats", &control]).status.success().then_some(())
    });
}

#[test]
fn a_service_manager_passes_a_socket_and_is_told() {
    let dir = short_dir();
    let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
    let notified = UnixDatagram::bind(dir.path().join("notify")).unwrap();
    notified
        .set_read_timeout(Some(crate::support::PATIENCE))
        .unwrap();
    let mut command = fathom();
    command
        .args(["serve", "null:1G", "--api"])
        .arg(dir.path().join("c"));
    command.env("NOTIFY_SOCKET", dir.path().join("notify"));
    command.env("LISTEN_FDS", "1");
    let fd = listener.as_raw_fd();
    // The socket must have this number, and stay open across exec.
    let pass = move || {
        // SAFETY: dup2(2) and fcntl(2) are safe to call between fork and exec. The child does not
        // need the former descriptor 3.
        match unsafe { (libc::dup2(fd, 3), libc::fcntl(3, libc::F_SETFD, 0)) } {
            (3, 0) => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: see above.
    unsafe { command.pre_exec(pass) };
    let mut served = Served::spawn(command, dir);
    let mut state = [0; 100];
    let len = notified.recv(&mut state).unwrap();
    assert_eq!(&state[..len], b"READY=1\n");
    served.wait_for("serving");
    let socket = served.arg("socket");
    stdout_of(&["bench", "--vhost-user", &socket, "--number-ios", "10"]);
    assert_eq!(served.terminate().0, Some(0));
    let len = notified.recv(&mut state).unwrap();
    assert_eq!(&state[..len], b"STOPPING=1\n");
    assert!(served.path("socket").exists(), "it is the manager's");
}

#[test]
fn a_second_signal_ends_it_at_once() {
    // The process is stopped, so both signals arrive before it handles the first one.
    let mut served = Served::start("null:1G", &[]);
    let _idle = UnixStream::connect(served.path("s")).unwrap();
    served.signal("STOP");
    served.signal("TERM");
    served.signal("INT");
    served.signal("CONT");
    assert_eq!(served.end().0, Some(1), "{}", served.log());
}
