//! A served disk and a load on it, each with its own CPU, and the evidence seen from outside.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use fathom_lab::Process;
use fathom_lab::evidence::{Kind, Sampler, Watch, Watched, device_below};
use fathom_lab::work::{Shape, Worked};
use fathom_limiter::layers;
use fathom_run::evidence::{Evidence, Held, Layer, Load};
use fathom_tests::{Place, fathom, run};
use serde_json::Value;

use crate::groups::Group;

pub const SERVER: u32 = 0;
pub const LOAD: u32 = 1;

/// Time for the load's ramp and the start of its program.
const RAMP: Duration = Duration::from_millis(800);
const WINDOW: Duration = Duration::from_millis(1500);
const SOON: Duration = Duration::from_secs(20);

/// The sockets of a served disk.
pub struct Sockets {
    vhost_user: PathBuf,
    nbd: PathBuf,
}

/// A load, and a function that parses its final output.
pub struct Work<'a> {
    pub command: &'a dyn Fn(&Sockets) -> Command,
    pub told: &'a dyn Fn(&str) -> Load,
}

/// How a disk is served, and what runs at the same time as its load.
#[derive(Clone, Copy, Default)]
pub struct Scene<'a> {
    /// The disk; by default a disk in memory.
    pub image: Option<&'a str>,
    /// A file on the device below the image, which the evidence watches.
    pub on_device: Option<&'a Path>,
    /// Further options of the server.
    pub args: &'a [&'a str],
    pub filter: Option<&'a str>,
    /// A CPU that another program uses, too.
    pub busy: Option<u32>,
    /// The control group of the server.
    pub group: Option<&'a Group>,
}

/// Returns the evidence of a load on a served disk.
pub fn seen(work: &Work, scene: Scene) -> Evidence {
    seen_live(work, scene).0
}

/// Returns the evidence of a load on a served disk, and the kind of limit that `fathom top` names.
pub fn seen_live(work: &Work, scene: Scene) -> (Evidence, String) {
    let place = Place::new();
    let nbd = place.path("nbd.sock");
    let listen = format!("unix:{}", nbd.display());
    let cpu = SERVER.to_string();
    let mut args = vec!["--poll", "off", "--cpus", &cpu, "--nbd", &listen];
    args.extend(scene.filter.iter().flat_map(|filter| ["--filter", filter]));
    args.extend(scene.args);
    let image = scene.image.unwrap_or("memory:64M");
    let mut server = place.serve("disk", Path::new(image), &args);
    let sockets = Sockets {
        vhost_user: server.socket().to_owned(),
        nbd,
    };
    let server = server.process().pid();
    if let Some(group) = scene.group {
        group.add(server);
    }
    let _busy = scene.busy.map(|cpu| spinner(cpu, &place));
    let watched = Watched::new(server, Kind::Server);
    let device = scene.on_device.and_then(|path| device_below(path).unwrap());
    let top = Top::prepare(server);
    let mut live = None;
    let mut evidence = watch_and(
        || live = Some(top.start()),
        vec![watched],
        device,
        (work.command)(&sockets),
        work.told,
    );
    let read = read_stages(server);
    evidence
        .filters
        .extend(scene.filter.map(|filter| held(&read, filter)));
    evidence.layers = read_layers(&read, evidence.load.mean_ns);
    if image.starts_with("nbd") {
        let storage = { evidence.layers.iter_mut() }.find(|one| one.name == layers::STORAGE);
        storage.unwrap().name = layers::NBD.to_owned();
    }
    (evidence, live.unwrap().kind())
}

/// `fathom top` for the disk of a server.
struct Top(Command);

/// The same while it watches an interval.
struct Watching(Child);

impl Top {
    fn prepare(server: u32) -> Top {
        let mut command = Command::new(fathom());
        command
            .args(["top", "--once", "--json", "--server", &server.to_string()])
            .stdout(Stdio::piped());
        Top(command)
    }

    fn start(mut self) -> Watching {
        Watching(self.0.spawn().unwrap())
    }
}

impl Watching {
    /// Returns the kind of limit of the disk.
    fn kind(self) -> String {
        let output = self.0.wait_with_output().unwrap();
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        let kind = &said["servers"][0]["disks"][0]["limiter"]["kind"];
        kind.as_str().unwrap_or_else(|| panic!("{said}")).to_owned()
    }
}

/// Returns the evidence of reads of 1M from this machine's disk, with `depth` requests in flight.
///
/// The load is one of `readers` programs that read.
pub fn seen_on_disk(depth: u32, readers: usize) -> Evidence {
    let place = tempfile::tempdir_in("/var/tmp").unwrap();
    let files: Vec<PathBuf> = { 0..readers }
        .map(|reader| place.path().join(format!("file{reader}")))
        .collect();
    for file in &files {
        let made = reads(file, depth).arg("--create_only=1").output().unwrap();
        assert!(made.status.success(), "{made:?}");
    }
    let others = files[1..].iter();
    let others = others.map(|file| reads(file, depth).stdout(Stdio::null()).spawn().unwrap());
    let others: Vec<Child> = others.collect();
    let device = device_below(&files[0]).unwrap();
    let told = |said: &str| {
        let shape = Shape { threads: 1, depth };
        Worked::of_fio(said, shape).unwrap().load
    };
    let evidence = watch(Vec::new(), device, reads(&files[0], depth), &told);
    for mut other in others {
        assert!(other.wait().unwrap().success());
    }
    evidence
}

/// Returns a command for fio on the host itself.
pub fn reads(file: &Path, depth: u32) -> Command {
    let mut fio = Command::new("fio");
    fio.args(["--name=load", "--ioengine=libaio", "--output-format=json"])
        .arg(format!("--filename={}", file.display()))
        .args(["--rw=randread", "--bs=1M", "--direct=1", "--size=256M"])
        .arg(format!("--iodepth={depth}"))
        .args([
            "--time_based",
            "--ramp_time=500ms",
            "--runtime=2500ms",
            "--thread",
        ]);
    fio
}

/// Returns the number of requests per second.
pub fn rate(evidence: &Evidence) -> f64 {
    evidence.load.requests as f64 / evidence.load.seconds
}

/// Returns the evidence of a load together with these processes.
pub fn watch(
    processes: Vec<Watched>,
    device: Option<String>,
    load: Command,
    told: &dyn Fn(&str) -> Load,
) -> Evidence {
    watch_and(|| (), processes, device, load, told)
}

/// Like [`watch`], and calls `begin` when the watched window begins.
fn watch_and(
    begin: impl FnOnce(),
    mut processes: Vec<Watched>,
    device: Option<String>,
    mut load: Command,
    told: &dyn Fn(&str) -> Load,
) -> Evidence {
    let load = load.stdout(Stdio::piped()).spawn().unwrap();
    thread::sleep(RAMP);
    processes.push(Watched::new(load.id(), Kind::Load));
    let sampler = Sampler::start(Watch {
        processes,
        device,
        ..Watch::default()
    });
    begin();
    thread::sleep(WINDOW);
    let (evidence, _) = sampler.unwrap().stop();
    let output = load.wait_with_output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}");
    let load = within(told(&said), evidence.seconds);
    Evidence { load, ..evidence }
}

/// Returns the load's share for `seconds`, the time in which everything else was observed.
fn within(load: Load, seconds: f64) -> Load {
    let part = |count: u64| (count as f64 * seconds / load.seconds) as u64;
    Load {
        requests: part(load.requests),
        bytes: part(load.bytes),
        seconds,
        ..load
    }
}

/// Returns the stages of the load's most frequent operation, according to the server.
fn read_stages(server: u32) -> Vec<Value> {
    let ended = run(&["stats", &server.to_string(), "--json"], SOON);
    let stats: Value = serde_json::from_str(&ended.stdout).unwrap();
    let operations = stats["operations"].as_array().unwrap().iter();
    let stages = operations.map(|operation| operation["stages"].as_array().unwrap());
    let count = |stages: &&Vec<Value>| stage(stages, "total").unwrap()["count"].as_u64();
    stages.max_by_key(count).unwrap().clone()
}

fn stage<'a>(stages: &'a [Value], name: &str) -> Option<&'a Value> {
    stages.iter().find(|stage| stage["stage"] == name)
}

/// Returns where the load's requests have spent their time.
fn read_layers(stages: &[Value], mean_ns: f64) -> Vec<Layer> {
    let mean = |name: &str| stage(stages, name)?["mean_ns"].as_f64();
    let outside = mean_ns - mean("total").unwrap();
    let outside = (layers::OUTSIDE.to_owned(), outside.max(0.0));
    let own =
        { layers::STAGES.iter() }.filter_map(|name| Some((layers::of_stage(name), mean(name)?)));
    [outside]
        .into_iter()
        .chain(own)
        .map(|(name, mean_ns)| Layer { name, mean_ns })
        .collect()
}

/// Returns how long a filter has held requests back.
fn held(stages: &[Value], filter: &str) -> Held {
    let queue = stage(stages, "queue").unwrap();
    Held {
        filter: filter.split(':').next().unwrap().to_owned(),
        requests: queue["count"].as_u64().unwrap(),
        mean_ns: queue["mean_ns"].as_f64().unwrap(),
    }
}

/// Starts a program that keeps one CPU busy until it is dropped.
fn spinner(cpu: u32, place: &Place) -> Process {
    let mut command = Command::new("taskset");
    command.args(["-c", &cpu.to_string(), "sh", "-c", "while :; do :; done"]);
    Process::spawn("taskset", command, &place.path("spinner.log")).unwrap()
}

/// Returns a command for `fathom bench` as a front-end.
pub fn bench(sockets: &Sockets, args: &[&str]) -> Command {
    let mut bench = Command::new(fathom());
    bench
        .args([
            "bench",
            "--json",
            "--cpus",
            &LOAD.to_string(),
            "--vhost-user",
        ])
        .arg(&sockets.vhost_user)
        .args(["--ramp-time", "500ms", "--runtime", "2500ms"])
        .args(args);
    bench
}

/// Parses the output of `fathom bench`.
pub fn told_by_bench(report: &str) -> Load {
    let report: Value = serde_json::from_str(report).unwrap();
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{report}"));
    let seconds = number(&report["runtime"]);
    let operations = report["operations"].as_array().unwrap();
    let sum = |figure: &dyn Fn(&Value) -> f64| operations.iter().map(figure).sum::<f64>();
    let requests = sum(&|one| number(&one["ios"]));
    let spent = sum(&|one| number(&one["ios"]) * number(&one["latency"]["mean_ns"]));
    Load {
        threads: number(&report["queues"]) as u32,
        depth: number(&report["iodepth"]) as u32,
        requests: requests as u64,
        bytes: (number(&report["mb_per_s"]) * 1e6 * seconds) as u64,
        seconds,
        mean_ns: spent / requests,
        thread_cpu: Vec::new(),
        polls: false,
    }
}

/// Returns a command for fio as an NBD client that computes a checksum of all that it writes.
pub fn checksums(sockets: &Sockets) -> Command {
    let uri = format!("nbd+unix:///?socket={}", sockets.nbd.display());
    let mut fio = Command::new("fio");
    fio.args(["--name=load", "--ioengine=nbd", "--output-format=json"])
        .arg(format!("--uri={uri}"))
        .args(["--rw=randwrite", "--bs=64k", "--iodepth=32", "--size=64M"])
        .args(["--verify=sha512", "--do_verify=0", "--verify_state_save=0"])
        .args(["--time_based", "--ramp_time=500ms", "--runtime=2500ms"])
        .args(["--thread", &format!("--cpus_allowed={LOAD}")]);
    fio
}

/// Parses the output of fio with one thread and 32 requests in flight.
pub fn told_by_fio(report: &str) -> Load {
    let shape = Shape {
        threads: 1,
        depth: 32,
    };
    Worked::of_fio(report, shape).unwrap().load
}
