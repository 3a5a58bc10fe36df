//! Kills processes at any instant of an upgrade: no request of a guest may be lost or done twice.

use super::image;
use crate::exercise::variable;
use crate::kinds::tool;
use crate::support::{as_arg, disk_dir, eventually, fathom, run, short_dir};
use fathom_testing::{Deadline, Tried};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Duration of the load of each format in seconds. FATHOM_ROUNDS multiplies it.
const SECONDS: u64 = 5;

/// A disk, and the directory of its servers.
struct Bed<'a> {
    dir: &'a Path,
    image: &'a str,
    format: &'a str,
}

impl Bed<'_> {
    fn path(&self, name: &str) -> String {
        as_arg(&self.dir.join(name))
    }

    /// Starts a server, and waits until it replies. Servers that were killed may still listen until
    /// they have ended, so the start may have to be repeated.
    fn serve(&self) {
        let info = ["info", &self.path("c"), "--json"];
        eventually("an answer", || {
            let mut child = self.start();
            let answers = || run(&info).status.success().then_some(true);
            let mut ends = || child.try_wait().unwrap().map(|_| false);
            let is_there = eventually("an answer or an end", || answers().or_else(&mut ends));
            // Reaps the process whenever it ends. The successors of that process are not children
            // of this process.
            std::thread::spawn(move || child.wait());
            is_there.then_some(())
        });
    }

    fn start(&self) -> Child {
        let mut log = File::options();
        log.create(true).append(true);
        let log = log.open(self.path("log")).unwrap();
        let mut command = fathom();
        command.args(["serve", self.image, "--format", self.format]);
        command.args(["--vhost-user", &self.path("s"), "--api", &self.path("c")]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(log).spawn().unwrap()
    }

    /// Returns the number of servers that are left when all others have ended.
    fn left(&self) -> usize {
        let info = ["info", &self.path("c"), "--json"];
        eventually("one server", || {
            let servers = self.servers();
            let answers = || run(&info).status.success() && self.servers() == servers;
            (servers.is_empty() || servers.len() == 1 && answers()).then_some(servers.len())
        })
    }

    /// Returns the processes that serve the disk, each with whether it has started as a successor.
    fn servers(&self) -> Vec<(i32, bool)> {
        let api = self.path("c");
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let server = |entry: fs::DirEntry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let line = fs::read(entry.path().join("cmdline")).ok()?;
            let words: Vec<_> = line.split(|byte| *byte == 0).collect();
            let has = |word: &str| words.contains(&word.as_bytes());
            (has("serve") && has(&api) && !has("starter")).then(|| (pid, has("--take-over")))
        };
        processes.filter_map(server).collect()
    }

    fn begin_upgrade(&self) -> Child {
        let mut command = fathom();
        command.args(["upgrade", &self.path("c")]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(Stdio::null()).spawn().unwrap()
    }
}

fn kill(pid: i32) {
    Tried::Kills.count(1);
    // The process may have ended already.
    let _ = Command::new("kill").args(["-9", &pid.to_string()]).output();
}

/// Random numbers. Each run has another seed, which it prints.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// Numbers of upgrades during which a process was or was not killed, and their outcomes.
#[derive(Debug, Default)]
struct Seen {
    tried: u64,
    upgraded: u64,
    /// Upgrades after which no server was left.
    without_server: u64,
}

impl Seen {
    fn has_all(&self) -> bool {
        self.tried > 5 && self.upgraded > 0 && self.without_server > 0
    }
}

/// Upgrades the server, and kills the old one, the new one or none at a random instant, until the
/// load ends.
fn kill_during(bed: &Bed<'_>, mut load: Child, random: &mut Random, seen: &mut Seen) {
    let ended = loop {
        if let Some(ended) = load.try_wait().unwrap() {
            break ended;
        }
        seen.tried += 1;
        let old = bed.servers();
        let mut upgrade = bed.begin_upgrade();
        sleep(Duration::from_micros(random.below(40_000)));
        let now = bed.servers();
        let is_new = |one: &&(i32, bool)| !old.contains(one);
        match (random.below(3), now.iter().find(is_new)) {
            (0, Some((pid, _))) => kill(*pid),
            (1, _) => old.iter().for_each(|(pid, _)| kill(*pid)),
            _ => {}
        }
        seen.upgraded += u64::from(upgrade.wait().unwrap().success());
        if bed.left() == 0 {
            seen.without_server += 1;
            bed.serve();
        }
    };
    let log = || fs::read_to_string(bed.path("load")).unwrap();
    assert!(ended.success(), "{}", log());
}

#[test]
fn a_kill_at_any_instant_of_an_upgrade_loses_nothing() {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = variable("FATHOM_SEED").unwrap_or(now.as_nanos() as u64 | 1);
    eprintln!("FATHOM_SEED={seed}");
    let mut random = Random(seed);
    let seconds = SECONDS * variable("FATHOM_ROUNDS").unwrap_or(1);
    for format in ["raw", "qcow2", "qed"] {
        let (images, dir) = (disk_dir(), short_dir());
        let image = image(images.path(), format);
        let bed = Bed {
            dir: dir.path(),
            image: &image,
            format,
        };
        bed.serve();
        let mut seen = Seen::default();
        // On a busy machine, one load may be too short for all outcomes.
        let deadline = Deadline::new("all outcomes of an upgrade");
        while !seen.has_all() {
            deadline.check();
            kill_during(&bed, load(&bed, seconds), &mut random, &mut seen);
        }
        eprintln!("{format}: {seen:?}");
        for (pid, _) in bed.servers() {
            let _ = Command::new("kill").arg(pid.to_string()).output();
        }
        eventually("the end", || bed.servers().is_empty().then_some(()));
        if format != "raw" {
            // Clusters that a killed server has just allocated may be leaked (status 3).
            let check = tool(images.path(), "qemu-img", &["check", "-f", format, "i"]);
            assert!(matches!(check.status.code(), Some(0 | 3)), "{check:?}");
        }
    }
}

/// Starts a load that writes and reads all over the disk for this time, and then reads all of it
/// again.
fn load(bed: &Bed<'_>, seconds: u64) -> Child {
    let log = File::create(bed.dir.join("load")).unwrap();
    let mut command = fathom();
    command.args(["bench", "--vhost-user", &bed.path("s"), "--rw", "randrw"]);
    command.args(["--iodepth", "8", "--rwmixzero", "5", "--verify"]);
    command.args(["--reconnect=60s", "--runtime", &format!("{seconds}s")]);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(log).spawn().unwrap()
}
