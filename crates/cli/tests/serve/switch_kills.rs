//! Kills a server during switches of a static, a persistent and a transient disk, and restarts it
//! as a user would.
//!
//! After each restart, every disk must have all writes that were acknowledged, or the server must
//! refuse its image and name the image that has these writes.

use crate::exercise::{Random, variable};
use crate::kinds::qemu_img;
use crate::mirror::{disk_after_a_kill, uri_of, write_in_order, written};
use crate::support::{Kept, Served, as_arg, disk_dir, eventually, fathom, short_dir, stdout_of};
use fathom_client::Client;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

/// Number of rounds in one run. `FATHOM_ROUNDS` multiplies it.
const ROUNDS: u64 = 6;

/// Longest time from the start of the switches to the kill, in the first round. Later rounds adapt
/// it to the machine.
const LONGEST: Duration = Duration::from_millis(200);

/// Minimum of that time.
const SHORTEST: Duration = Duration::from_millis(1);

/// The owner of a disk's definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The configuration.
    Static,
    /// A file in the server's `disks-dir`.
    Persistent,
    /// The running server, until it ends.
    Transient,
}

pub const OWNERS: [Owner; 3] = [Owner::Static, Owner::Persistent, Owner::Transient];

impl Owner {
    pub fn disk(self) -> &'static str {
        match self {
            Owner::Static => "static",
            Owner::Persistent => "persistent",
            Owner::Transient => "transient",
        }
    }
}

/// The operation by which a disk changes its image.
#[derive(Clone, Copy, Debug)]
enum Switch {
    Snapshot,
    Mirror,
    /// To a snapshot's overlay and back.
    Commit,
}

const SWITCHES: [Switch; 3] = [Switch::Snapshot, Switch::Mirror, Switch::Commit];

/// A disk during one round.
struct Disk {
    owner: Owner,
    switch: Switch,
    /// The image that the disk has at the start of the round.
    image: String,
    /// The image that a snapshot or a mirror makes.
    other: String,
}

impl Disk {
    fn new(dir: &Path, owner: Owner, switch: Switch, round: u64) -> Disk {
        let path = |kind: &str| as_arg(&dir.join(format!("{}-{kind}{round}", owner.disk())));
        let disk = Disk {
            owner,
            switch,
            image: path("image"),
            other: path("other"),
        };
        qemu_img(dir, &["create", "-q", "-f", "raw", &disk.image, "4M"]);
        disk
    }

    fn log(&self) -> String {
        format!("{}.log", self.image)
    }

    /// Adds the disk on this image through the API. Returns the server's error if it refuses the
    /// image.
    fn add(&self, served: &Served, image: &str) -> Result<(), String> {
        let mut add = fathom();
        add.args(["disk", "add", "--server", &served.api(), self.owner.disk()]);
        add.args([image, "--format", self.format_of(image)]);
        if self.owner == Owner::Transient {
            add.arg("--transient");
        }
        let output = add.output().unwrap();
        match output.status.success() {
            true => Ok(()),
            false => Err(String::from_utf8(output.stderr).unwrap()),
        }
    }

    fn format_of(&self, image: &str) -> &'static str {
        match image == self.image {
            true => "raw",
            false => "qcow2",
        }
    }

    /// Returns the option without which a static disk does not change its image.
    fn for_now(&self) -> &'static [&'static str] {
        match self.owner {
            Owner::Static => &["--transient"],
            Owner::Persistent | Owner::Transient => &[],
        }
    }

    fn command(&self, served: &Served, words: &[&str], more: &[&str]) -> Command {
        let mut command = fathom();
        command.args(words).arg(served.api());
        command.args(["--disk", self.owner.disk()]).args(more);
        command.args(self.for_now());
        command
    }

    /// Does what must come before the switch that is interrupted.
    fn prepare(&self, served: &Served) {
        let mut first = match self.switch {
            Switch::Snapshot => return,
            Switch::Mirror => {
                let api = served.api();
                stdout_of(&[
                    "mirror",
                    "start",
                    &api,
                    "--disk",
                    self.owner.disk(),
                    &self.other,
                    "-O",
                    "qcow2",
                    "--wait",
                ]);
                return;
            }
            Switch::Commit => self.command(served, &["snapshot"], &[&self.other]),
        };
        assert!(first.status().unwrap().success());
    }

    fn begin(&self, served: &Served) -> Kept {
        let mut command = match self.switch {
            Switch::Snapshot => self.command(served, &["snapshot"], &[&self.other]),
            Switch::Mirror => self.command(served, &["mirror", "complete"], &["--quiet"]),
            Switch::Commit => self.command(served, &["commit"], &[&self.image, "--quiet"]),
        };
        Kept::spawn(&mut command)
    }

    /// Checks the disk after a restart.
    fn check(&self, served: &Served) {
        disk_after_a_kill(served, self.owner.disk(), Path::new(&self.log()), 0);
    }
}

/// Writes the configuration with this image of the static disk.
fn configure(dir: &Path, disk: &Disk, image: &str) {
    let path = |name: &str| as_arg(&dir.join(name));
    let text = format!(
        "disks-dir = 'disks'\napi = {{ socket = '{}' }}\n[nbd]\nlisten = ['unix:{}']\n\
         [[disk]]\nname = '{}'\nimage = '{image}'\nformat = '{}'\n",
        path("c"),
        path("n"),
        disk.owner.disk(),
        disk.format_of(image),
    );
    fs::write(path("conf"), text).unwrap();
}

/// Starts the server with its configuration. Returns the reason if the server does not serve the
/// configuration's disk.
pub fn start(dir: tempfile::TempDir) -> Result<Served, (tempfile::TempDir, String)> {
    let mut command = fathom();
    command.args(["serve", "--config", &as_arg(&dir.path().join("conf"))]);
    let mut served = Served::spawn(command, dir);
    served.wait_for("the API is at");
    let client = Client::connect(Path::new(&served.api())).unwrap();
    let all: Value = client.get(&["v1", "disks"]).send().unwrap();
    let failed = all["failed"].as_array().unwrap();
    match failed.iter().find(|disk| disk["owner"] == "static") {
        None => Ok(served),
        Some(disk) => {
            let problem = disk["problem"].as_str().unwrap().to_owned();
            served.signal("KILL");
            let _ = served.end();
            Err((std::mem::replace(&mut served.dir, short_dir()), problem))
        }
    }
}

/// Restarts a killed server with the same configuration. If the server refuses the static disk's
/// image, does what a user would do: writes the image that the server has named to the
/// configuration. Returns whether the server has refused the image.
fn restart(mut served: Served, disk: &Disk) -> (Served, bool) {
    served.signal("KILL");
    let _ = served.end();
    let dir = std::mem::replace(&mut served.dir, short_dir());
    drop(served);
    match start(dir) {
        Ok(served) => (served, false),
        Err((dir, log)) => {
            let newer = newer_image(disk, &disk.image, &log);
            configure(dir.path(), disk, newer);
            let served = start(dir).unwrap_or_else(|(_, log)| panic!("{newer}: {log}"));
            (served, true)
        }
    }
}

/// Returns the image that a refusal of `image` names.
fn newer_image<'a>(disk: &'a Disk, image: &str, refusal: &str) -> &'a str {
    assert!(
        refusal.contains("superseded"),
        "{:?} {:?}: {refusal}",
        disk.owner,
        disk.switch
    );
    let newer = if image == disk.image {
        &disk.other
    } else {
        &disk.image
    };
    assert!(refusal.contains(newer), "{refusal}");
    newer
}

#[test]
fn server_killed_during_a_switch_serves_what_was_acknowledged() {
    let rounds = ROUNDS * variable("FATHOM_ROUNDS").unwrap_or(1);
    let mut random = Random::new(variable("FATHOM_SEED").unwrap_or(1) as usize);
    let images = disk_dir();
    let mut dir = short_dir();
    let (mut refused, mut longest) = (0, LONGEST);
    for round in 0..rounds * 4 {
        if round >= rounds && refused > 0 {
            break;
        }
        let switch = |n: u64| SWITCHES[((round + n) % 3) as usize];
        let disks = OWNERS.map(|owner| {
            let n = owner as u64;
            Disk::new(images.path(), owner, switch(n), round)
        });
        configure(dir.path(), &disks[0], &disks[0].image);
        let served = start(dir).unwrap_or_else(|(_, log)| panic!("{log}"));
        for disk in &disks[1..] {
            disk.add(&served, &disk.image).unwrap();
        }
        let loads = disks.each_ref().map(|disk| {
            write_in_order(&uri_of(&served, disk.owner.disk()), Path::new(&disk.log()))
        });
        for disk in &disks {
            let log = disk.log();
            eventually("writes", || (written(Path::new(&log)) > 20).then_some(()));
            disk.prepare(&served);
        }
        let switches = disks.each_ref().map(|disk| disk.begin(&served));
        thread::sleep(Duration::from_micros(
            random.below(longest.as_micros() as u64),
        ));
        let before = refused;
        let (served, is_refused) = restart(served, &disks[0]);
        refused += u64::from(is_refused);
        drop((switches, loads));
        let transient = &disks[2];
        if let Err(refusal) = transient.add(&served, &transient.image) {
            refused += 1;
            let newer = newer_image(transient, &transient.image, &refusal);
            transient.add(&served, newer).unwrap();
        }
        longest = match refused > before {
            true => (longest * 4 / 5).max(SHORTEST),
            false => longest * 5 / 4,
        };
        for disk in &disks {
            disk.check(&served);
        }
        for disk in &disks[1..] {
            stdout_of(&[
                "disk",
                "remove",
                &served.api(),
                "--disk",
                disk.owner.disk(),
                "--force",
            ]);
        }
        let mut served = served;
        served.signal("KILL");
        let _ = served.end();
        dir = std::mem::replace(&mut served.dir, short_dir());
    }
    assert!(refused > 0, "every kill came before the switches");
}
