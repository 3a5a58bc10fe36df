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

/// Filter and program that run at the same time as the load.
#[derive(Clone, Copy, Default)]
pub struct Beside<'a> {
    pub filter: Option<&'a str>,
    /// A CPU that another program uses, too.
    pub busy: Option<u32>,
}

/// Returns the evidence of a load on a memory disk.
pub fn seen(work: &Work, beside: Beside) -> Evidence {
    let place = Place::new();
    let nbd = place.path("nbd.sock");
    let listen = format!("unix:{}", nbd.display());
    let cpu = SERVER.to_string();
    let mut args = vec!["--poll", "off", "--cpus", &cpu, "--nbd", &listen];
    args.extend(beside.filter.iter().flat_map(|filter| ["--filter", filter]));
    let mut server = place.serve("disk", Path::new("memory:64M"), &args);
    let sockets = Sockets {
        vhost_user: server.socket().to_owned(),
        nbd,
    };
    let server = server.process().pid();
    let _busy = beside.busy.map(|cpu| spinner(cpu, &place));
    let watched = Watched::new(server, Kind::Server);
    let mut evidence = watch(vec![watched], None, (work.command)(&sockets), work.told);
    let read = read_stages(server);
    evidence
        .filters
        .extend(beside.filter.map(|filter| held(&read, filter)));
    evidence.layers = read_layers(&read, evidence.load.mean_ns);
    evidence
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
fn reads(file: &Path, depth: u32) -> Command {
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
