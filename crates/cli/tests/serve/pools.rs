//! Checks disks that share the threads of a pool.

use crate::driver::{Request, with_disk};
use crate::exercise::{Random, differ, exercise};
use crate::kinds::{ENGINES, Kind, SIZE};
use crate::support::nbd::{make_image, prints};
use crate::support::{
    Kept, Served, as_arg, disk_dir, eventually, fathom, refused, run, short_dir, stdout_of,
};
use fathom_testing::decide;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Starts a server without disks, but with these tables in its configuration.
fn server(pools: &str) -> Served {
    Served::waiting("", pools)
}

fn add(served: &Served, name: &str, disk: &str, more: &[&str]) {
    let control = served.api();
    let add = ["disk", "add", "--server", &control, name, disk];
    stdout_of(&[&add, more].concat());
}

fn remove(served: &Served, name: &str) {
    let control = served.api();
    stdout_of(&["disk", "remove", &control, "--disk", name]);
}

fn info(served: &Served, name: &str) -> Value {
    let control = served.api();
    let text = stdout_of(&["info", &control, "--disk", name, "--json"]);
    serde_json::from_str(&text).unwrap()
}

fn uri(served: &Served, export: &str) -> String {
    format!("nbd+unix:///{export}?socket={}", served.arg("n"))
}

fn descriptors(served: &Served) -> usize {
    let dir = format!("/proc/{}/fd", served.child.id());
    fs::read_dir(dir).unwrap().count()
}

/// Returns the number of threads, without those that the kernel creates for io_uring.
fn threads(served: &Served) -> usize {
    let dir = format!("/proc/{}/task", served.child.id());
    let tasks = fs::read_dir(dir).unwrap();
    // A thread may end meanwhile.
    let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| !name.starts_with("iou-")).count()
}

#[test]
fn disks_of_a_pool_come_and_go_while_others_are_served() {
    let (images, served) = (disk_dir(), server("[pool.p]\nthreads = 2"));
    let image = make_image(images.path(), "qcow2", 64 << 20);
    for name in ["one", "two"] {
        let socket = served.arg(name);
        let args = ["--pool", "p", "--vhost-user", &socket];
        add(&served, name, "memory:64M", &args);
    }
    let has = || [descriptors(&served), threads(&served)];
    let before = has();
    let mut loads = ["one", "two"].map(|name| {
        let mut command = fathom();
        command.args(["bench", "--vhost-user", &served.arg(name)]);
        command.args([
            "--rw",
            "randrw",
            "--verify",
            "--iodepth",
            "8",
            "--queues",
            "2",
        ]);
        Kept::spawn(command.args(["--runtime", "600s"]))
    });
    for round in 0..10 {
        let socket = served.arg("three");
        let way = ["--vhost-user", &socket];
        let way = if round % 2 == 1 { &[][..] } else { &way };
        let args = ["--pool", "p", "--format", "qcow2"];
        add(&served, "three", &image, &[&args, way].concat());
        let verify = ["--rw", "randrw", "--verify", "--number-ios", "50"];
        let load = |target: [&str; 2]| {
            stdout_of(&[&["bench"], &target[..], &verify].concat());
        };
        match round % 2 {
            0 => load(["--vhost-user", &socket]),
            _ => load(["--nbd", &uri(&served, "three")]),
        }
        remove(&served, "three");
        prints(images.path(), "qemu-img", &["check", &image]);
    }
    for load in &mut loads {
        load.signal("INT");
        assert!(load.0.wait().unwrap().success(), "{}", served.log());
    }
    // The server has released all resources of the removed disks.
    eventually("all is given back", || (has() == before).then_some(()));
    for name in ["one", "two"] {
        let shown = info(&served, name);
        assert_eq!(shown["pool"], "p");
        // Each disk counts its own requests, for each of its two queues.
        let requests = shown["workers"].as_array().unwrap().iter();
        let requests: Vec<_> = requests.map(|w| w["requests"].as_u64().unwrap()).collect();
        assert_eq!(requests.len(), 2);
        assert!(requests.iter().all(|n| *n >= 1_000), "{requests:?}");
    }
    let text = stdout_of(&["info", &served.api(), "--disk", "one"]);
    assert!(text.contains("pool:       p\n"), "{text}");
}

/// Runs the test of formats with all images in the same threads.
#[test]
fn images_of_all_kinds_share_threads() {
    let pool = |name: &&str| format!("[pool.{name}]\naio = '{name}'\nthreads = 2\n");
    let served = server(&ENGINES.iter().map(pool).collect::<String>());
    std::thread::scope(|scope| {
        for kind in Kind::all() {
            let served = &served;
            scope.spawn(move || {
                let dir = kind.dir();
                serve_kind(served, kind, dir.path());
            });
        }
    });
}

fn serve_kind(served: &Served, kind: Kind, dir: &Path) {
    kind.make(dir);
    let mut model = kind.contents(dir, None);
    let mut random = Random::new(200 + kind.number);
    let (name, data) = (format!("k{}", kind.number), as_arg(&dir.join("data.raw")));
    let (socket, image) = (served.arg(&name), as_arg(&dir.join("i")));
    let mut args = vec!["--vhost-user", &*socket, "--pool"];
    // The pool defines the engine.
    let mut own = kind.serve_writable(&data).into_iter();
    while let Some(arg) = own.next() {
        match arg {
            "--aio" => args.insert(3, own.next().unwrap()),
            "--iothreads" => drop(own.next()),
            _ => args.push(arg),
        }
    }
    add(served, &name, &image, &args);
    for _ in 0..2 {
        with_disk(&socket, 2, |disk| {
            assert_eq!(disk.size(), SIZE);
            exercise(disk, &mut model, &mut random);
            assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
        });
    }
    eventually("nobody uses it", || {
        let control = served.api();
        let removed = run(&["disk", "remove", &control, "--disk", &name]);
        removed.status.success().then_some(())
    });
    kind.is_clean(dir);
    assert_eq!(differ(&kind.contents(dir, None), &model), None, "{kind:?}");
}

/// Timers of filters, sockets of NBD disks, and changes from other threads also work in a pool.
#[test]
fn filters_and_disks_of_servers_are_in_pools() {
    let served = server("[pool.p]\nthreads = 1");
    add(&served, "far", "memory:16M", &["--pool", "p"]);
    let far = uri(&served, "far");
    let filters = [
        "--filter",
        "delay:read=2ms,write=1ms",
        "--filter",
        "throttle:iops-total=100000",
    ];
    let socket = served.arg("s");
    let way = ["--pool", "p", "--vhost-user", &socket];
    // The server is its own client. Both ends of the connection are in the same thread.
    let storage = uri(&served, "far");
    add(&served, "near", &storage, &[&way[..], &filters].concat());
    let verify = [
        "--rw",
        "randrw",
        "--verify",
        "--iodepth",
        "4",
        "--number-ios",
        "500",
    ];
    let begun = Instant::now();
    stdout_of(&[&["bench", "--vhost-user", &socket], &verify[..]].concat());
    assert!(begun.elapsed() > Duration::from_millis(100));
    stdout_of(&[
        "disk",
        "set",
        &served.api(),
        "--disk",
        "near",
        "delay",
        "read=0",
        "write=0",
    ]);
    stdout_of(&[&["bench", "--vhost-user", &socket], &verify[..]].concat());
    // (`--overwrite`: the server itself uses this disk.)
    let bench = ["bench", "--overwrite", "--nbd", &far];
    stdout_of(&[&bench, &verify[..]].concat());
    let before = descriptors(&served);
    eventually("nobody uses it", || {
        let removed = run(&["disk", "remove", &served.api(), "--disk", "near"]);
        removed.status.success().then_some(())
    });
    assert!(descriptors(&served) < before);
    stdout_of(&["bench", "--nbd", &far, "--number-ios", "100"]);
}

#[test]
fn what_does_not_go_with_pools_is_told() {
    let served = server("[pool.p]\n[pool.q]");
    let control = served.api();
    let add = [
        "disk", "add", "--server", &control, "a", "null:1G", "--pool",
    ];
    refused(1, &[&add, &["r"][..]].concat(), &["no pool 'r'", "p, q"]);
    for option in [
        ["--iothreads", "2"],
        ["--cpus", "0"],
        ["--poll", "off"],
        ["--aio", "native"],
    ] {
        let output = run(&[&add, &["p"][..], &option].concat());
        assert_eq!(output.status.code(), Some(2));
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            said.contains(option[0]) && said.contains("--pool"),
            "{said}"
        );
    }
    let without = server("");
    let control = without.api();
    let add = [
        "disk", "add", "--server", &control, "a", "null:1G", "--pool", "p",
    ];
    refused(1, &add, &["[pool.p]"]);
}

/// Starts a server with one pool and many null disks on the sockets s0, s1 and so on.
fn serve_many(disks: usize, threads: usize) -> Served {
    let dir = short_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let mut config = format!(
        "api = {{ socket = '{}' }}\n[pool.p]\nthreads = {threads}\n",
        path("c")
    );
    for number in 0..disks {
        let socket = path(&format!("s{number}"));
        config += &format!(
            "[[disk]]\nname = 'd{number}'\nimage = 'null:1G'\nvhost-user = '{socket}'\npool = 'p'\n"
        );
    }
    fs::write(path("conf"), config).unwrap();
    let mut command = fathom();
    command.args(["serve", "--config", &path("conf")]);
    let mut served = Served::spawn(command, dir);
    served.wait_for(&format!(
        "vhost-user {}",
        served.arg(&format!("s{}", disks - 1))
    ));
    served
}

/// Returns the memory of a process in KiB, without the memory that guests share with it.
pub fn memory(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let of = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        let number = line.split_whitespace().nth(1).unwrap();
        number.parse::<u64>().unwrap()
    };
    of("Pss_Anon:") + of("Pss_File:")
}

/// Returns the CPU time of the server in clock ticks.
fn cpu_time(served: &Served) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{}/stat", served.child.id())).unwrap();
    let (_, fields) = stat.rsplit_once(')').unwrap();
    let fields: Vec<_> = fields.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn a_thousand_disks_that_are_idle_cost_little() {
    const DISKS: usize = 1000;
    let files = getrlimit(Resource::Nofile);
    let all = Rlimit {
        current: files.maximum,
        ..files
    };
    setrlimit(Resource::Nofile, all).unwrap();
    let few = serve_many(1, 2);
    let begun = Instant::now();
    let many = serve_many(DISKS, 2);
    let started = begun.elapsed();
    let (connected, over) = (Barrier::new(DISKS + 2), Barrier::new(DISKS + 2));
    let guest = |socket: String| {
        with_disk(&socket, 1, |disk| {
            let (offset, len) = (4096, 4096);
            disk.all(&[Request::Read { offset, len }]);
            connected.wait();
            over.wait();
        });
    };
    let (used, each, threads, fds) = std::thread::scope(|scope| {
        scope.spawn(|| guest(few.arg("s0")));
        for number in 0..DISKS {
            let (guest, socket) = (&guest, many.arg(&format!("s{number}")));
            scope.spawn(move || guest(socket));
        }
        connected.wait();
        // Waits until the work of the connections is done.
        std::thread::sleep(Duration::from_secs(1));
        let before = cpu_time(&many);
        std::thread::sleep(Duration::from_secs(3));
        let used = cpu_time(&many) - before;
        let each = (memory(many.child.id()) - memory(few.child.id())) / (DISKS as u64 - 1);
        let all = (used, each, threads(&many), descriptors(&many));
        over.wait();
        all
    });
    eprintln!(
        "{DISKS} idle disks: started in {started:?}, {used} ticks of CPU time in 3 s, {each} KiB \
         each, {threads} threads, {fds} descriptors"
    );
    // A tick is 10 ms.
    assert!(used <= 2, "{used} ticks");
    assert!(each < 1024, "{each} KiB");
}

/// Tests one thread, because the kernel decides how much CPU time each of several threads gets.
#[test]
fn busy_disks_get_equal_parts_of_a_thread() {
    // (The shares of the loads also depend on the CPU time that other programs leave them.)
    decide(each_busy_disk_gets_its_part);
}

fn each_busy_disk_gets_its_part() {
    const DISKS: usize = 16;
    let served = serve_many(DISKS, 1);
    let load = |number: usize| {
        let socket = served.arg(&format!("s{number}"));
        let args = [
            "bench",
            "--vhost-user",
            &socket,
            "--runtime",
            "6",
            "--ramp-time",
            "2",
        ];
        // Half of the disks have more requests in flight.
        let depth = if number.is_multiple_of(2) { "16" } else { "64" };
        let text = stdout_of(&[&args, &["--iodepth", depth, "--json"][..]].concat());
        let value: Value = serde_json::from_str(&text).unwrap();
        value["iops"].as_f64().unwrap()
    };
    let rates: Vec<f64> = std::thread::scope(|scope| {
        let load = &load;
        let loads: Vec<_> = (0..DISKS).map(|n| scope.spawn(move || load(n))).collect();
        loads.into_iter().map(|load| load.join().unwrap()).collect()
    });
    for kind in 0..2 {
        let alike: Vec<_> = rates.iter().skip(kind).step_by(2).collect();
        let mean = alike.iter().copied().sum::<f64>() / alike.len() as f64;
        let least = alike.iter().copied().copied().fold(f64::MAX, f64::min);
        assert!(least > 0.5 * mean, "{least} of {mean}: {rates:?}");
    }
}
