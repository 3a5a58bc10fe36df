//! Checks that a worker allocates no memory once its queues are warm.

mod support;

use fathom_client::Client;
use fathom_daemon::Daemon;
use fathom_formats::Format;
use fathom_host::options::{DiskOptions, ServeOptions};
use fathom_sandbox::Mode as SandboxMode;
use fathom_spec::{DiskSpec, SocketSpec};
use fathom_stack::PoolOptions;
use fathom_storage::Location;
use serde_json::json;
use std::alloc::{GlobalAlloc, Layout, System};
use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use support::{convert, disk_dir, eventually, fathom, listens, short_dir};

/// The system's allocator; counts the calls of one thread.
struct Counting;

/// Kernel id of the thread whose calls are counted; 0 if none is counted.
static WATCHED: AtomicI32 = AtomicI32::new(0);
static CALLS: AtomicU64 = AtomicU64::new(0);
/// Size of the last counted call in bytes.
static SIZE: AtomicUsize = AtomicUsize::new(0);

fn count(size: usize) {
    let watched = WATCHED.load(Ordering::Relaxed);
    // SAFETY: gettid(2) has no arguments and cannot fail.
    if watched != 0 && unsafe { libc::gettid() } == watched {
        CALLS.fetch_add(1, Ordering::Relaxed);
        SIZE.store(size, Ordering::Relaxed);
    }
}

// SAFETY: every call is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller upholds the contract, which is that of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(layout.size());
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns the kernel id of this process's thread with that name.
fn thread_named(name: &str) -> i32 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let found = tasks.map(Result::unwrap).find(|task| {
        let comm = std::fs::read_to_string(task.path().join("comm"));
        comm.is_ok_and(|comm| comm.trim() == name)
    });
    let task = found.unwrap_or_else(|| panic!("no thread is named {name}"));
    task.file_name().to_str().unwrap().parse().unwrap()
}

fn requests(client: &Client) -> u64 {
    let all: serde_json::Value = client.get(&["v1", "disks"]).send().unwrap();
    let workers = &all["disks"][0]["state"]["workers"];
    workers[0]["requests"].as_u64().unwrap()
}

/// Waits until the server has completed `count` more requests.
///
/// Fewer are enough on a machine so busy that each request takes a time slice of the scheduler.
fn wait_for(count: u64, client: &Client) {
    let (start, before) = (Instant::now(), requests(client));
    eventually("requests", || {
        let enough = match start.elapsed() < Duration::from_secs(20) {
            true => count,
            false => 500,
        };
        (requests(client) - before > enough).then_some(())
    });
}

fn location(text: impl AsRef<OsStr>) -> Location {
    Location::parse(text.as_ref()).unwrap()
}

/// Serves the disk in this process while another process loads it, and counts allocations.
fn check(disk: Location, trace: Option<&Path>, load: &[&str]) {
    check_image(disk, None, &[], trace, load);
}

/// Checks the disk with a worker of its own, then with a worker of a pool.
fn check_image(
    disk: Location,
    format: Option<Format>,
    filters: &[&str],
    trace: Option<&Path>,
    load: &[&str],
) {
    for pool in [None, Some("p")] {
        let mut spec = json!({ "name": "d", "image": disk.to_string(), "filters": filters });
        let text = [
            ("format", format.map(|format| format.to_string())),
            ("pool", pool.map(str::to_owned)),
            ("trace", trace.map(|path| path.to_str().unwrap().to_owned())),
        ];
        for (key, value) in text {
            if let Some(value) = value {
                spec[key] = value.into();
            }
        }
        check_worker(spec, load);
    }
}

fn check_worker(mut spec: serde_json::Value, load: &[&str]) {
    let dir = short_dir();
    let (socket, api) = (dir.path().join("s"), dir.path().join("c"));
    spec["vhost-user"] = socket.to_str().unwrap().into();
    let spec: DiskSpec = serde_json::from_value(spec).unwrap();
    let is_connected = spec.image.kind().name == "nbd";
    let thread = match spec.pool {
        Some(_) => "pool p/0",
        None => "worker 0",
    };
    let what = format!("{} {load:?} {thread}", spec.image);
    let (format, is_plain) = (spec.format, spec.filters.is_empty());
    let mut options = ServeOptions::of(DiskOptions::of(spec, false).unwrap());
    options.pools.push(PoolOptions {
        threads: 1,
        ..PoolOptions::new("p".into())
    });
    options.api.socket = Some(SocketSpec::Path(api.clone()));
    // This process starts programs, which a sandboxed server cannot.
    options.sandbox = SandboxMode::Off;
    let daemon = Daemon::start(options).unwrap();
    let worker = thread_named(thread);
    let running = std::thread::spawn(move || daemon.run().unwrap());
    WATCHED.store(worker, Ordering::SeqCst);
    let mut bench = bench(&socket, load);
    let client = Client::connect(&api).unwrap();
    // The count must be so high that a throttle delays some requests, even on a busy machine.
    let count = match is_plain {
        true => 100_000,
        false => 10_000,
    };
    // The caches of an image must fill first, and a connection to a server is set up meanwhile.
    // Everything else has what it needs as soon as a queue is attached.
    let warm = match (is_connected, format, is_plain) {
        (false, None, true) => 10,
        _ => count / 5,
    };
    wait_for(warm, &client);
    let attaching = CALLS.swap(0, Ordering::SeqCst);
    assert!(attaching > 0, "{what}: the counter does not count");
    wait_for(count, &client);
    WATCHED.store(0, Ordering::SeqCst);
    let calls = CALLS.swap(0, Ordering::SeqCst);
    bench.kill().unwrap();
    bench.wait().unwrap();
    client.post(&["v1", "server", "quit"]).send::<()>().unwrap();
    running.join().unwrap();
    let size = SIZE.load(Ordering::SeqCst);
    assert_eq!(
        calls, 0,
        "{what}: calls of the allocator, the last of {size} bytes"
    );
}

fn bench(socket: &Path, load: &[&str]) -> std::process::Child {
    let mut command: Command = fathom();
    command
        .args(["bench", "--runtime", "10m", "--vhost-user"])
        .arg(socket)
        .args(load);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

/// A single test, because all threads share the counter.
#[test]
fn a_warm_worker_allocates_nothing() {
    let dir = disk_dir();
    let image = dir.path().join("disk.img");
    std::fs::write(&image, vec![0xa5; 16 << 20]).unwrap();
    let trace = dir.path().join("trace");
    let file = || Location::file(&image);
    let deep = ["--rw", "randread", "--iodepth", "32"];
    check(location("null:1T"), None, &deep);
    check(
        location("null:1T"),
        Some(&trace),
        &["--rw", "randrw", "--iodepth", "1"],
    );
    check(
        location("memory:64M"),
        None,
        &["--rw", "randrw", "--iodepth", "32", "--bs", "64k"],
    );
    check(file(), None, &deep);
    check(
        file(),
        Some(&trace),
        &["--rw", "randrw", "--iodepth", "8", "--bs", "16k"],
    );
    let server = dir.path().join("nbdkit");
    let mut nbdkit = Command::new("nbdkit")
        .args(["--foreground", "--exit-with-parent", "-U"])
        .arg(&server)
        .args(["memory", "64M"])
        .spawn()
        .expect("nbdkit is installed by `make setup`");
    eventually("nbdkit", || listens(&server).then_some(()));
    let uri = format!("nbd+unix:///?socket={}", server.display());
    let of_server = location(uri);
    check(of_server, None, &["--rw", "randrw", "--iodepth", "32"]);
    nbdkit.kill().unwrap();
    nbdkit.wait().unwrap();
    for format in [Format::Qcow2, Format::Qed] {
        let allocated = dir.path().join(format.name());
        convert(&image, format, &allocated);
        let allocated = Location::file(allocated);
        let mixed = ["--rw", "randrw", "--iodepth", "32"];
        check_image(allocated, Some(format), &[], Some(&trace), &mixed);
    }
    let filters = [
        "delay:read=10us..40us",
        "throttle:iops-read=5000",
        "fault:error=EIO,probability=0",
        "log:file=/dev/null",
        "readahead",
        "pause",
    ];
    check_image(location("null:1T"), None, &filters, None, &deep);
}
