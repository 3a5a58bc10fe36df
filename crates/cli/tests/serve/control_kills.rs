//! Kills a server while three clients change its disks in every way and others reload and upgrade
//! the server, and restarts it as a user would.
//!
//! After each restart, every disk must have all writes that were acknowledged. Every persistent
//! disk must be as its last successful change has left it: present or not, with the image and the
//! options of this change.

mod load;

use crate::exercise::{Random, variable};
use crate::support::{Kept, Served, as_arg, disk_dir, eventually, fathom, short_dir};
use crate::switch_kills::{OWNERS, Owner, start};
use fathom_testing::{Deadline, is_time_up};
use load::Hosting;
use parking_lot::Mutex;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Number of kills in one run. `FATHOM_ROUNDS` multiplies it.
const ROUNDS: u64 = 6;

/// Size of a disk at the start of a round, in bytes.
const SIZE: u64 = 4 << 20;

/// The longest time from the first change to the kill.
const LONGEST: Duration = Duration::from_millis(1500);

/// The states that a disk may have after a restart: the state after its last successful change, or
/// the state after a change that got no reply.
#[derive(Clone, Debug)]
struct Expected {
    images: Vec<String>,
    iothreads: BTreeSet<u64>,
    sizes: BTreeSet<u64>,
    is_present: BTreeSet<bool>,
}

/// Numbers of commands that have succeeded and that have failed, by their names.
type Replies = Mutex<BTreeMap<String, (u64, u64)>>;

/// A client that changes one disk.
struct Client<'a> {
    owner: Owner,
    dir: &'a Path,
    round: u64,
    api: String,
    hosting: Hosting,
    /// Options by which clients reach the disk.
    export: Vec<String>,
    random: Random,
    is_killed: &'a AtomicBool,
    replies: &'a Replies,
    expected: Expected,
    /// Number of names that the client has given to new images.
    images: u64,
    load: Option<Kept>,
}

impl Client<'_> {
    /// Runs a command about the disk. Returns whether it succeeded, or `None` if the server was
    /// killed meanwhile: then the command may have taken effect.
    fn try_to(&self, words: &[&str]) -> Option<bool> {
        let output = fathom().args(words).output().unwrap();
        let is_done = output.status.success();
        if !is_done && self.is_killed.load(Ordering::SeqCst) {
            return None;
        }
        let names = words
            .iter()
            .take(2)
            .filter(|word| !word.starts_with(['/', '-']));
        let mut replies = self.replies.lock();
        let kind = names.copied().collect::<Vec<_>>().join(" ");
        let (succeeded, failed) = replies.entry(kind).or_default();
        *(if is_done { succeeded } else { failed }) += 1;
        Some(is_done)
    }

    /// Returns the option without which a static disk does not change its image.
    fn for_now(&self) -> &'static [&'static str] {
        match self.owner {
            Owner::Static => &["--transient"],
            Owner::Persistent | Owner::Transient => &[],
        }
    }

    fn image(&self) -> &str {
        self.expected.images.last().unwrap()
    }

    fn new_image(&mut self) -> String {
        self.images += 1;
        let name = format!("{}-{}-{}", self.owner.disk(), self.round, self.images);
        as_arg(&self.dir.join(name))
    }

    /// Changes the disk in some way, until the server is killed.
    fn run(mut self) -> Expected {
        while !self.is_killed.load(Ordering::SeqCst) {
            // (Disks of tenants have no jobs.)
            let kinds = match self.hosting {
                Hosting::Server => 9,
                Hosting::Tenants => 3,
            };
            match self.random.below(kinds) {
                0 | 1 => self.change(),
                2 => self.remove_and_add(),
                3 => self.snapshot(),
                4 => self.mirror(),
                5 => self.commit(),
                6 => self.stream(),
                7 => self.backup(),
                _ => self.resize(),
            }
        }
        self.expected
    }

    fn change(&mut self) {
        let threads = 1 + self.random.below(4);
        let option = format!("iothreads={threads}");
        let disk = self.owner.disk();
        let words = ["disk", "change", disk, "--server", &self.api, &option];
        match self.try_to(&words) {
            Some(true) => self.expected.iothreads = BTreeSet::from([threads]),
            Some(false) => {}
            None => drop(self.expected.iothreads.insert(threads)),
        }
    }

    /// Makes the persistent disk larger by 1 MiB.
    fn resize(&mut self) {
        if self.owner != Owner::Persistent {
            return;
        }
        let size = self.expected.sizes.last().unwrap() + (1 << 20);
        let text = size.to_string();
        let words = ["resize", "--server", &self.api, self.owner.disk(), &text];
        match self.try_to(&words) {
            Some(true) => self.expected.sizes = BTreeSet::from([size]),
            Some(false) => {}
            None => drop(self.expected.sizes.insert(size)),
        }
    }

    /// Runs a command that gives the disk another image.
    fn switch(&mut self, words: &[&str], image: String) {
        match self.try_to(&[words, self.for_now()].concat()) {
            Some(true) => self.expected.images = vec![image],
            Some(false) => {}
            // `image` continues to return the older image, which the test tries first.
            None => self.expected.images.insert(0, image),
        }
    }

    fn snapshot(&mut self) {
        let overlay = self.new_image();
        let (api, disk) = (self.api.clone(), self.owner.disk());
        self.switch(
            &["snapshot", &api, "--disk", disk, &overlay],
            overlay.clone(),
        );
    }

    fn mirror(&mut self) {
        let target = self.new_image();
        let (api, disk) = (self.api.clone(), self.owner.disk());
        let start = ["mirror", "start", &api, "--disk", disk, &target];
        if self.try_to(&[&start, &["-O", "qcow2", "--wait"][..]].concat()) != Some(true) {
            return;
        }
        let is_completed = self.random.below(3) > 0;
        match is_completed {
            true => self.switch(
                &["mirror", "complete", &api, "--disk", disk, "--quiet"],
                target.clone(),
            ),
            false => drop(self.try_to(&["mirror", "stop", &api, "--disk", disk])),
        }
    }

    /// Takes a snapshot, and commits it to the previous image.
    fn commit(&mut self) {
        let base = self.image().to_owned();
        self.snapshot();
        if self.image() != base {
            let (api, disk) = (self.api.clone(), self.owner.disk());
            let words = ["commit", &api, "--disk", disk, &base, "--quiet"];
            self.switch(&words, base.clone());
        }
    }

    fn stream(&self) {
        let start = ["stream", "start", &self.api, "--disk", self.owner.disk()];
        self.try_to(&[&start[..], &["--wait"]].concat());
    }

    fn backup(&self) {
        let disk = self.owner.disk();
        // (In this directory, the socket has the name of the disk.)
        let place = format!("unix:{}", as_arg(self.dir));
        let start = [
            "backup", "start", &self.api, "--disk", disk, "--nbd", &place,
        ];
        if self.try_to(&start) == Some(true) {
            self.try_to(&["backup", "stop", &self.api, "--disk", disk]);
        }
    }

    fn remove_and_add(&mut self) {
        if self.owner == Owner::Static {
            return;
        }
        // Ends the load, which would otherwise lose its connection in the middle of a write.
        let Some(load) = self.load.take() else {
            return;
        };
        drop(load);
        let disk = self.owner.disk();
        let remove = ["disk", "remove", "--server", &self.api, disk, "--force"];
        match self.try_to(&remove) {
            Some(true) => self.expected.is_present = BTreeSet::from([false]),
            Some(false) => return,
            None => drop(self.expected.is_present.insert(false)),
        }
        let add = add_words(&self.api, &self.export, self.owner, self.image());
        let added = self.try_to(&add.iter().map(String::as_str).collect::<Vec<_>>());
        match added {
            Some(true) => {
                self.expected.is_present = BTreeSet::from([true]);
                self.expected.iothreads = BTreeSet::from([1]);
            }
            Some(false) => {}
            None => {
                self.expected.is_present.insert(true);
                self.expected.iothreads.insert(1);
            }
        }
    }
}

fn format_of(image: &str) -> &'static str {
    match image.ends_with(".raw") {
        true => "raw",
        false => "qcow2",
    }
}

/// Images that the server has named as newer ones.
#[derive(Default)]
struct Refused(BTreeSet<String>);

impl Refused {
    /// Returns the image to try next, and whether the server has named it before. In that case two
    /// images name each other, because a switch back to an earlier image was interrupted, and both
    /// images have all data.
    fn next(&mut self, refusal: &str) -> (String, bool) {
        let words = "superseded by ";
        let at = refusal.find(words).unwrap_or_else(|| panic!("{refusal}"));
        let rest = &refusal[at + words.len()..];
        let end = rest.find([' ', ',', ';', ':', '\n']).unwrap_or(rest.len());
        let image = rest[..end].trim_matches('\'').to_owned();
        let is_circle = !self.0.insert(image.clone());
        (image, is_circle)
    }
}

fn add_words(api: &str, export: &[String], owner: Owner, image: &str) -> Vec<String> {
    let words = ["disk", "add", "--server", api, owner.disk(), image];
    let mut words: Vec<_> = words.map(str::to_owned).into();
    words.extend(["--format".into(), format_of(image).into()]);
    words.extend_from_slice(export);
    if owner == Owner::Transient {
        words.push("--transient".into());
    }
    words
}

/// Starts the server. While the server refuses an image because it is superseded, puts the newer
/// image into the configuration.
fn start_as_a_user(hosting: Hosting, mut dir: tempfile::TempDir) -> Served {
    let mut refused = Refused::default();
    let deadline = Deadline::new("a server that starts");
    loop {
        let log = match start(dir) {
            Ok(served) => return served,
            Err((same, log)) => {
                dir = same;
                log
            }
        };
        if is_still_locked(hosting, &log) {
            deadline.check_with(|| log);
            continue;
        }
        let (image, is_circle) = refused.next(&log);
        let more = if is_circle {
            "allow-superseded = true\n"
        } else {
            ""
        };
        hosting.configure(dir.path(), &image, more);
    }
}

/// Returns whether the server refused an image because a tenant of the killed server still uses it.
fn is_still_locked(hosting: Hosting, refusal: &str) -> bool {
    hosting == Hosting::Tenants && refusal.contains("in use")
}

/// Adds a disk on this image, or on a newer image that the server names.
fn add_as_a_user(hosting: Hosting, served: &Served, owner: Owner, image: &str) {
    let mut refused = Refused::default();
    let mut image = image.to_owned();
    let mut more = Vec::new();
    let deadline = Deadline::new("the disk is added");
    loop {
        let export = hosting.export(served, owner);
        let mut add = add_words(&served.api(), &export, owner, &image);
        add.extend(more.clone());
        let output = fathom().args(add).output().unwrap();
        if output.status.success() {
            return;
        }
        let refusal = String::from_utf8(output.stderr).unwrap();
        if is_still_locked(hosting, &refusal) {
            deadline.check_with(|| refusal);
            continue;
        }
        let (newer, is_circle) = refused.next(&refusal);
        image = newer;
        more.extend(is_circle.then(|| "--allow-superseded".to_owned()));
    }
}

/// Checks what the server shows of the persistent disk. Returns whether there is one.
fn check_definition(served: &Served, expected: &Expected) -> bool {
    let shown = |what: &str| {
        let shown = fathom().args(["show", &served.api(), "--json"]).output();
        let disks: Value = serde_json::from_slice(&shown.unwrap().stdout).unwrap();
        // If there is only one disk, the server shows that disk without its name.
        disks["persistent"].get(what).cloned()
    };
    if expected.is_present == BTreeSet::from([true]) {
        eventually("the persistent disk", || shown("name"));
    }
    let Some(image) = shown("disk") else {
        assert!(expected.is_present.contains(&false), "{expected:?}");
        return false;
    };
    assert!(expected.is_present.contains(&true), "{expected:?}");
    let image = image.as_str().unwrap();
    assert!(
        expected.images.iter().any(|one| one == image),
        "{image}: {expected:?}"
    );
    let size = shown("size").unwrap().as_u64().unwrap();
    assert!(expected.sizes.contains(&size), "{size}: {expected:?}");
    let workers = shown("workers").unwrap().as_array().unwrap().len() as u64;
    assert!(
        expected.iothreads.contains(&workers),
        "{workers}: {expected:?}"
    );
    true
}

/// Kills the server, and returns its directory.
fn end(mut served: Served) -> tempfile::TempDir {
    served.signal("KILL");
    let _ = served.end();
    std::mem::replace(&mut served.dir, short_dir())
}

/// Upgrades the server, unless it refuses because a disk is being changed. Returns the process id
/// of the successor.
fn try_to_upgrade(served: &Served) -> Option<u64> {
    let upgrade = fathom().args(["upgrade", &served.api(), "--json"]).output();
    let reply: Value = serde_json::from_slice(&upgrade.unwrap().stdout).ok()?;
    let pid = reply["pid"].as_u64()?;
    served.succeeded_by(pid);
    Some(pid)
}

/// Kills a successor, and waits until it has ended.
fn kill(pid: u64) {
    let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    let path = format!("/proc/{}/status", pid.as_raw_nonzero());
    eventually("the end of the successor", || {
        let status = fs::read_to_string(&path).unwrap_or_default();
        (status.is_empty() || status.contains("State:\tZ")).then_some(())
    });
}

#[test]
fn disks_are_as_last_changed_when_the_server_is_killed() {
    kill_again_and_again(Hosting::Server);
}

#[test]
fn tenants_disks_are_as_last_changed_when_the_server_is_killed() {
    kill_again_and_again(Hosting::Tenants);
}

fn kill_again_and_again(hosting: Hosting) {
    let rounds = ROUNDS * variable("FATHOM_ROUNDS").unwrap_or(1);
    let seed = variable("FATHOM_SEED").unwrap_or(1);
    let mut random = Random::new(7);
    let mut dir = short_dir();
    let replies = Replies::default();
    for round in 0..rounds {
        if is_time_up() {
            break;
        }
        dir = one_kill(hosting, dir, round, seed, &mut random, &replies);
    }
    // A command that never succeeds would test nothing. A disk on a raw image has nothing to
    // stream.
    let replies = replies.into_inner();
    let never = |(kind, counts): &(&String, &(u64, u64))| {
        counts.0 == 0 && counts.1 >= 5 && *kind != "stream start"
    };
    assert_eq!(replies.iter().find(never), None);
}

/// Runs one round. Returns the server's directory.
fn one_kill(
    hosting: Hosting,
    dir: tempfile::TempDir,
    round: u64,
    seed: u64,
    random: &mut Random,
    replies: &Replies,
) -> tempfile::TempDir {
    let images = disk_dir();
    let owners = OWNERS;
    let first = owners.map(|owner| {
        let path = images.path().join(format!("{}.raw", owner.disk()));
        File::create(&path).unwrap().set_len(SIZE).unwrap();
        as_arg(&path)
    });
    hosting.configure(dir.path(), &first[0], "");
    let served = start(dir).unwrap_or_else(|(_, log)| panic!("{log}"));
    for (owner, image) in owners.iter().zip(&first).skip(1) {
        add_as_a_user(hosting, &served, *owner, image);
    }
    let is_killed = AtomicBool::new(false);
    let log = |owner: Owner| images.path().join(format!("{}.log", owner.disk()));
    let clients = owners.map(|owner| {
        let place = hosting.place(&served, owner);
        Client {
            owner,
            dir: images.path(),
            round,
            api: served.api(),
            hosting,
            load: Some(hosting.start_load(&place, &log(owner))),
            export: hosting.export(&served, owner),
            random: Random::new((seed << 20 | round << 4 | owner as u64) as usize),
            is_killed: &is_killed,
            replies,
            expected: Expected {
                images: vec![first[owner as usize].clone()],
                iothreads: BTreeSet::from([1]),
                sizes: BTreeSet::from([SIZE]),
                is_present: BTreeSet::from([true]),
            },
            images: 0,
        }
    });
    for owner in owners {
        hosting.wait_for_writes(&served, owner, &log(owner));
    }
    let pause = Duration::from_micros(random.below(LONGEST.as_micros() as u64));
    let (reloads, upgrades) = (random.below(2) == 0, random.below(3) == 0);
    let (dir, expected) = thread::scope(|scope| {
        let running = clients.map(|client| scope.spawn(|| client.run()));
        thread::sleep(pause / 2);
        if reloads {
            served.signal("HUP");
        }
        let successor = if upgrades {
            try_to_upgrade(&served)
        } else {
            None
        };
        thread::sleep(pause / 2);
        is_killed.store(true, Ordering::SeqCst);
        successor.into_iter().for_each(kill);
        let dir = end(served);
        (dir, running.map(|client| client.join().unwrap()))
    });
    let served = start_as_a_user(hosting, dir);
    let is_present = check_definition(&served, &expected[1]);
    add_as_a_user(
        hosting,
        &served,
        Owner::Transient,
        expected[2].images.last().unwrap(),
    );
    for owner in owners {
        if owner != Owner::Persistent || is_present {
            hosting.check(&served, owner, &log(owner));
        }
    }
    for owner in &owners[1..] {
        let remove = [
            "disk",
            "remove",
            "--server",
            &served.api(),
            owner.disk(),
            "--force",
        ];
        let _ = fathom().args(remove).output();
    }
    end(served)
}
