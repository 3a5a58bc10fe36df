//! Limits that a seed draws: which limit, how strong, and sometimes two at the same time. The
//! verdicts on recorded evidence and those of `fathom top` are scored.
//!
//! `FATHOM_ROUNDS` is the number of draws, and `FATHOM_SEED` the first seed. A run of at least
//! [`JUDGED`] draws must reach the bars, and needs a machine on which nothing else runs.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command};

use fathom_lab::evidence::device_numbers;
use fathom_limiter::{CPU_CAP, IO_CAP, UNKNOWN, judge};
use fathom_run::evidence::{Evidence, IoLimitKind};
use fathom_testing::outrank_other_programs;
use fathom_tests::Place;

use crate::groups::Group;
use crate::memory::seen_with_memory;
use crate::scene::{
    SERVER, Scene, Sockets, Work, bench, checksums, reads, seen_live, seen_on_disk, told_by_bench,
    told_by_fio,
};

/// Number of draws from which the bars apply.
const JUDGED: usize = 100;
/// Least percentage of right verdicts, and most percentage of wrong ones. The others are "unknown".
const RIGHT: usize = 90;
const WRONG: usize = 2;
/// Percentage of draws with two limits.
const TWO: u64 = 25;
/// Bytes of the images, more than the caches of tables hold.
const IMAGE: usize = 128 << 20;

/// A limit that can be drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Limit {
    Thread,
    LoadThread,
    Requests,
    Bytes,
    Delay,
    RunQueue,
    CpuCap,
    Client,
    Reads,
    Writes,
    ReadBytes,
    WriteBytes,
    Neighbour,
    DeviceLatency,
    Device,
    Memory,
    Tables,
    Nbd,
}

/// A drawn limit.
#[derive(Clone, Copy, Debug)]
struct Draw {
    seed: u64,
    limit: Limit,
    /// From 0 (weakest) to 1.
    strength: f64,
    /// A second limit of a served disk: [`Limit::RunQueue`] or [`Limit::Delay`].
    second: Option<Limit>,
}

/// Worth of a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Score {
    Right,
    Wrong,
    Unknown,
}

/// Images that all draws use.
struct Images {
    _place: Place,
    raw: PathBuf,
    qcow2: PathBuf,
}

impl Limit {
    const ALL: [Limit; 18] = [
        Limit::Thread,
        Limit::LoadThread,
        Limit::Requests,
        Limit::Bytes,
        Limit::Delay,
        Limit::RunQueue,
        Limit::CpuCap,
        Limit::Client,
        Limit::Reads,
        Limit::Writes,
        Limit::ReadBytes,
        Limit::WriteBytes,
        Limit::Neighbour,
        Limit::DeviceLatency,
        Limit::Device,
        Limit::Memory,
        Limit::Tables,
        Limit::Nbd,
    ];

    /// Returns the right verdicts: on evidence, and of `fathom top`, which sees less. The second
    /// list is empty where `top` does not judge.
    fn verdicts(self) -> (&'static [&'static str], &'static [&'static str]) {
        match self {
            Limit::Thread => (&["thread"], &["thread"]),
            Limit::LoadThread => (&["load-thread"], &["client"]),
            Limit::Requests | Limit::Bytes | Limit::Delay => (&["filter"], &["filter"]),
            Limit::RunQueue => (&["run-queue"], &["latency", "thread"]),
            Limit::CpuCap => (&[CPU_CAP], &["latency", "thread"]),
            // A single request of a disk in memory takes its time in the client and on the way.
            Limit::Client => (&["latency"], &["client", "latency"]),
            Limit::Reads | Limit::Writes | Limit::ReadBytes | Limit::WriteBytes => {
                (&[IO_CAP], &["latency"])
            }
            Limit::Neighbour => (&["neighbour"], &["latency"]),
            Limit::DeviceLatency => (&["latency"], &["latency"]),
            Limit::Device => (&["device"], &[]),
            Limit::Memory => (&["pressure"], &[]),
            // Both the tables and the data are read from the device, one after the other.
            Limit::Tables => (&["tables", "latency"], &["tables", "latency"]),
            Limit::Nbd => (&["latency"], &["latency"]),
        }
    }
}

impl Draw {
    fn of(seed: u64) -> Draw {
        let mut random = Random(seed);
        let limit = Limit::ALL[random.below(Limit::ALL.len() as u64) as usize];
        let strength = random.below(101) as f64 / 100.0;
        let has_room = matches!(limit, Limit::Requests | Limit::Bytes | Limit::CpuCap);
        let second = (has_room && random.below(100) < TWO)
            .then(|| [Limit::RunQueue, Limit::Delay][random.below(2) as usize]);
        Draw {
            seed,
            limit,
            strength,
            second,
        }
    }

    /// Returns a number between those for the weakest and the strongest limit.
    fn between(&self, weakest: u64, strongest: u64) -> u64 {
        let (weakest, strongest) = (weakest as f64, strongest as f64);
        (weakest + (strongest - weakest) * self.strength).round() as u64
    }

    /// Returns the evidence of a load under this limit, and the kind of limit that `fathom top`
    /// names, if the disk is one of Fathom's.
    fn seen(&self, images: &Images) -> (Evidence, Option<String>) {
        let live = |(evidence, kind)| (evidence, Some(kind));
        match self.limit {
            Limit::Device => (seen_on_disk(self.between(16, 64) as u32, 1), None),
            Limit::Memory => (seen_with_memory(self.between(56, 52) << 20), None),
            Limit::LoadThread => live(seen_live(
                &Work {
                    command: &checksums,
                    told: &told_by_fio,
                },
                Scene::default(),
            )),
            _ => live(self.seen_by_bench(images)),
        }
    }

    fn seen_by_bench(&self, images: &Images) -> (Evidence, String) {
        let raw = images.raw.to_str().unwrap();
        let filter = self.filter();
        let depth = self.depth().to_string();
        let mut load = vec!["--iodepth", &depth, "--rw", self.operation()];
        load.extend(self.size());
        let group = self.group(images);
        let neighbour = (self.limit == Limit::Neighbour).then(|| self.neighbour(images));
        let nbd = (self.limit == Limit::Nbd).then(|| SlowServer::start(self.between(2, 20)));
        let mut scene = Scene {
            filter: filter.as_deref(),
            group: group.as_ref(),
            busy: self.has(Limit::RunQueue).then_some(SERVER),
            ..Scene::default()
        };
        match self.limit {
            Limit::Tables => {
                scene.image = images.qcow2.to_str();
                scene.args = &["--format", "qcow2", "--metadata-cache", "64k"];
                scene.on_device = Some(&images.qcow2);
            }
            Limit::Nbd => scene.image = nbd.as_ref().map(|server| &*server.uri),
            Limit::DeviceLatency
            | Limit::Neighbour
            | Limit::Reads
            | Limit::Writes
            | Limit::ReadBytes
            | Limit::WriteBytes => {
                scene.image = Some(raw);
                scene.args = &["--format", "raw"];
                scene.on_device = Some(&images.raw);
            }
            _ => (),
        }
        let work = Work {
            command: &|sockets: &Sockets| bench(sockets, &load),
            told: &told_by_bench,
        };
        let seen = seen_live(&work, scene);
        drop(neighbour);
        seen
    }

    fn has(&self, limit: Limit) -> bool {
        self.limit == limit || self.second == Some(limit)
    }

    fn filter(&self) -> Option<String> {
        let delay = || format!("delay:read={}ms", self.between(1, 30));
        match self.limit {
            Limit::Requests => Some(format!("throttle:iops-read={}", self.between(4000, 200))),
            Limit::Bytes => Some(format!("throttle:bps-read={}K", self.between(16_000, 800))),
            Limit::Delay => Some(delay()),
            _ if self.second == Some(Limit::Delay) => Some(delay()),
            _ => None,
        }
    }

    fn group(&self, images: &Images) -> Option<Group> {
        let io = |kind, most| {
            let device = device_numbers(&images.raw).unwrap();
            Some(Group::with_io(device, kind, most))
        };
        match self.limit {
            Limit::CpuCap => Some(Group::with_cpu(self.between(50, 10))),
            Limit::Reads => io(IoLimitKind::Reads, self.between(400, 50)),
            Limit::Writes => io(IoLimitKind::Writes, self.between(400, 50)),
            Limit::ReadBytes => io(IoLimitKind::ReadBytes, self.between(4 << 20, 1 << 19)),
            Limit::WriteBytes => io(IoLimitKind::WriteBytes, self.between(4 << 20, 1 << 19)),
            _ => None,
        }
    }

    fn depth(&self) -> u64 {
        match self.limit {
            Limit::Client | Limit::DeviceLatency | Limit::Tables => 1,
            Limit::Nbd => self.between(1, 4),
            Limit::Neighbour => self.between(2, 4),
            Limit::Reads | Limit::Writes | Limit::ReadBytes | Limit::WriteBytes => {
                self.between(1, 16)
            }
            Limit::Thread | Limit::RunQueue | Limit::CpuCap => 16,
            _ => 32,
        }
    }

    fn operation(&self) -> &'static str {
        match self.limit {
            Limit::Writes | Limit::WriteBytes => "randwrite",
            _ => "randread",
        }
    }

    /// Returns the options for the size of requests. A worker copies large ones for most of the
    /// time, while the load's threads refill the other queues.
    fn size(&self) -> &'static [&'static str] {
        match self.limit {
            Limit::Thread | Limit::RunQueue | Limit::CpuCap => &["--bs", "256k", "--queues", "4"],
            Limit::ReadBytes | Limit::WriteBytes => &["--bs", "16k"],
            _ => &["--bs", "4k"],
        }
    }

    /// Starts a program that reads much from the device of the images.
    fn neighbour(&self, images: &Images) -> Running {
        let depth = self.between(16, 48) as u32;
        let mut fio = reads(&images.raw, depth);
        fio.args(["--readonly", "--size=64M", "--runtime=1000"]);
        fio.stdout(std::process::Stdio::null());
        Running(fio.spawn().unwrap())
    }

    fn score(&self, verdict: &str, of_top: bool) -> Option<Score> {
        let limits = [Some(self.limit), self.second];
        let right = limits.into_iter().flatten().flat_map(|limit| match of_top {
            true => limit.verdicts().1,
            false => limit.verdicts().0,
        });
        let right: Vec<&str> = right.copied().collect();
        if right.is_empty() {
            return None;
        }
        Some(match verdict {
            UNKNOWN => Score::Unknown,
            _ if right.contains(&verdict) => Score::Right,
            _ => Score::Wrong,
        })
    }
}

impl fmt::Display for Draw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "seed {}: {:?} {:.2}",
            self.seed, self.limit, self.strength
        )?;
        self.second
            .map_or(Ok(()), |second| write!(f, " and {second:?}"))
    }
}

impl Images {
    fn make() -> Images {
        let place = Place::new();
        let (raw, qcow2) = (place.path("raw"), place.path("qcow2"));
        let mut file = std::fs::File::create(&raw).unwrap();
        file.write_all(&vec![7; IMAGE]).unwrap();
        file.sync_all().unwrap();
        let made = Command::new("qemu-img")
            .args(["convert", "-f", "raw", "-O", "qcow2", "-S", "0"])
            .args(["-o", "cluster_size=4k"])
            .args([&raw, &qcow2])
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");
        Images {
            _place: place,
            raw,
            qcow2,
        }
    }
}

/// A program that is killed on drop.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An NBD server that delays each read.
struct SlowServer {
    _running: Running,
    _dir: tempfile::TempDir,
    uri: String,
}

impl SlowServer {
    fn start(delay_ms: u64) -> SlowServer {
        let dir = tempfile::tempdir_in("/tmp").unwrap();
        let socket = dir.path().join("nbd");
        let running = Command::new("nbdkit")
            .args(["--foreground", "--unix"])
            .arg(&socket)
            .args(["--filter=delay", "memory", "64M"])
            .arg(format!("rdelay={delay_ms}ms"))
            .spawn()
            .expect("this test needs nbdkit");
        let running = Running(running);
        fathom_testing::until("the NBD server's socket", || socket.exists());
        SlowServer {
            _running: running,
            uri: format!("nbd+unix:///?socket={}", socket.display()),
            _dir: dir,
        }
    }
}

/// Random numbers (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }
}

/// How often each verdict was given under each limit.
#[derive(Default)]
struct Scores {
    verdicts: BTreeMap<Limit, BTreeMap<String, usize>>,
    right: usize,
    wrong: usize,
    unknown: usize,
}

impl Scores {
    fn add(&mut self, draw: &Draw, verdict: &str, of_top: bool) -> Option<Score> {
        let score = draw.score(verdict, of_top)?;
        let row = self.verdicts.entry(draw.limit).or_default();
        *row.entry(verdict.to_owned()).or_default() += 1;
        match score {
            Score::Right => self.right += 1,
            Score::Wrong => self.wrong += 1,
            Score::Unknown => self.unknown += 1,
        }
        Some(score)
    }

    fn all(&self) -> usize {
        self.right + self.wrong + self.unknown
    }
}

/// Prints a table in Markdown: limits, and the verdicts on each.
impl fmt::Display for Scores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (right, wrong, unknown) = (self.right, self.wrong, self.unknown);
        writeln!(
            f,
            "{right} right, {wrong} wrong, {unknown} unknown of {}\n",
            self.all()
        )?;
        writeln!(f, "| limit | verdicts |\n|---|---|")?;
        for (limit, row) in &self.verdicts {
            let row = row
                .iter()
                .map(|(verdict, count)| format!("{verdict} {count}"));
            let row: Vec<String> = row.collect();
            writeln!(f, "| {limit:?} | {} |", row.join(", "))?;
        }
        Ok(())
    }
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn drawn_limits_are_named() {
    let _alone = crate::ALONE.lock();
    outrank_other_programs();
    let rounds = variable("FATHOM_ROUNDS").unwrap_or(2);
    let seed = variable("FATHOM_SEED").unwrap_or(1);
    let images = Images::make();
    let (mut scores, mut of_top) = (Scores::default(), Scores::default());
    for seed in seed..seed + rounds {
        let draw = Draw::of(seed);
        let (evidence, live) = draw.seen(&images);
        let verdict = judge(&evidence);
        let name = verdict.rule().unwrap_or(UNKNOWN);
        let score = scores.add(&draw, name, false);
        let live_score = live.as_ref().and_then(|live| of_top.add(&draw, live, true));
        println!("{draw}: {score:?}: {verdict}; top: {live:?}: {live_score:?}");
        if score == Some(Score::Wrong) {
            println!("{:#?}\n{evidence:#?}", verdict.also);
        }
    }
    println!("\nOn evidence: {scores}\nOf fathom top: {of_top}");
    for scores in [&scores, &of_top] {
        if scores.all() >= JUDGED {
            assert!(scores.right * 100 >= RIGHT * scores.all(), "{scores}");
            assert!(scores.wrong * 100 <= WRONG * scores.all(), "{scores}");
        }
    }
}
