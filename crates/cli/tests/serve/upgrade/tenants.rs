//! Checks upgrades of servers with tenants: first the supervisor gets a successor, then each tenant
//! does.

mod limits;
mod log;
mod silent;

use super::{
    BLOCK, Chain, HELLO, SIZE, StopAtEnd, block, configured, fails_late, image, load, program,
    speaks,
};
use crate::driver::{Driver, Request, with_disk};
use crate::kinds::qemu_img;
use crate::support::{disk_dir, eventually, run, stdout_of};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

/// Returns a disk of a configuration, with the socket `NAME.s`.
fn disk(name: &str, image: &str, more: &str) -> String {
    format!("[[disk]]\nname = '{name}'\nimage = '{image}'\nvhost-user = 'DIR/{name}.s'\n{more}\n")
}

fn start(disks: &[String]) -> Chain {
    let disks = disks.concat();
    configured(&format!("tenants = true\nstop-timeout = '3s'\n{disks}"))
}

impl Chain {
    fn show(&self, disk: &str) -> Option<Value> {
        let client = fathom_client::Client::connect(Path::new(&self.server.api())).ok()?;
        client.get(&["v1", "disks", disk]).send().ok()
    }

    /// Returns the process id of the disk's tenant.
    fn tenant(&self, disk: &str) -> u64 {
        let pid = || self.show(disk)?["state"]["pid"].as_u64();
        eventually("the disk's process", pid)
    }

    /// Kills the disk's tenant, and waits until another process has the disk.
    fn kill_tenant(&self, disk: &str) {
        let before = self.tenant(disk);
        kill(before);
        eventually("the server starts it again", || {
            (self.show(disk)?["state"]["pid"].as_u64()? != before).then_some(())
        });
    }

    fn answered(&self, disk: &str) -> u64 {
        let stats = self.ask(&["stats", "--disk", disk]);
        let operations = stats["operations"].as_array().unwrap().iter();
        let total = |op: &Value| op["stages"].as_array().unwrap().last().unwrap()["count"].as_u64();
        operations.map(|op| total(op).unwrap()).sum()
    }

    fn socket(&self, disk: &str) -> String {
        self.server.arg(&format!("{disk}.s"))
    }

    /// Upgrades a server some of whose tenants cannot be upgraded. Returns the reply and the
    /// errors.
    fn upgrade_in_part(&mut self) -> (Value, String) {
        let output = run(&["upgrade", &self.server.api(), "--json"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{said}");
        assert!(said.contains("not all tenants"), "{said}");
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        self.pid = answer["pid"].as_u64().unwrap();
        (answer, said)
    }
}

fn kill(pid: u64) {
    // The process may have ended already.
    let _ = Command::new("kill").args(["-9", &pid.to_string()]).output();
}

fn progress(of: &AtomicU64, rounds: u64) {
    let before = of.load(SeqCst);
    let has_come = || (of.load(SeqCst) >= before + rounds).then_some(());
    eventually("progress", has_come);
}

/// Writes the first block of this round.
fn write(disk: &mut Driver<'_>, round: u64) {
    let data = block(0, round);
    let done = disk.all(&[Request::Write { offset: 0, data }]);
    assert!(done.iter().all(Result::is_ok));
}

/// Checks that each block has the data of the last round.
fn check(socket: &str, rounds: u64) {
    with_disk(socket, 1, |disk| {
        let contents = disk.contents();
        for at in (0..SIZE).step_by(BLOCK * 4) {
            let found = &contents[at as usize..at as usize + BLOCK];
            assert!(found == block(at, rounds), "{at}");
        }
    });
}

#[test]
fn loaded_guests_of_two_tenants_see_nothing_of_ten_upgrades() {
    let (raw, qcow2) = (disk_dir(), disk_dir());
    let more = "format = 'qcow2'\niothreads = 2";
    let mut chain = start(&[
        disk("a", &image(raw.path(), "raw"), ""),
        disk("b", &image(qcow2.path(), "qcow2"), more),
    ]);
    let (a, b) = (chain.socket("a"), chain.socket("b"));
    let stop = AtomicBool::new(false);
    let (of_a, of_b) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        scope.spawn(|| load(&a, 1, &stop, &of_a));
        scope.spawn(|| load(&b, 2, &stop, &of_b));
        for _ in 0..10 {
            progress(&of_a, 1);
            progress(&of_b, 1);
            let before = ["a", "b"].map(|disk| chain.tenant(disk));
            let answer = chain.upgrade(&[]);
            for pid in before {
                let files = format!("/proc/{pid}/fd/0");
                eventually("the process before ends", || {
                    (!Path::new(&files).exists()).then_some(())
                });
            }
            let now = ["a", "b"].map(|disk| chain.tenant(disk));
            assert!(before[0] != now[0] && before[1] != now[1]);
            let told = answer["tenants"].as_array().unwrap().iter();
            let told: Vec<_> = told.map(|one| one["pid"].as_u64().unwrap()).collect();
            assert_eq!(told, now);
        }
    });
    let blocks = SIZE / (BLOCK as u64 * 4);
    for (name, rounds) in [("a", &of_a), ("b", &of_b)] {
        let rounds = rounds.load(SeqCst);
        assert_eq!(chain.answered(name), 2 * rounds * blocks, "{name}");
        check(&chain.socket(name), rounds);
    }
    let log = chain.server.log();
    // Two more front-ends have checked the disks.
    assert_eq!(log.matches("front-end connected").count(), 4, "{log}");
    assert!(!log.contains("ERROR") && !log.contains("WARN"), "{log}");
    chain.quit();
}

/// The new supervisor passes requests on to tenants, and does its own work.
#[test]
fn a_new_supervisor_does_what_the_old_one_did() {
    let dir = disk_dir();
    let image = image(dir.path(), "raw");
    let mut chain = start(&[disk("a", &image, "tenant = 'vm'\nfilters = ['delay']")]);
    let (api, added) = (chain.server.api(), chain.socket("d"));
    chain.upgrade(&[]);
    let add = [
        "disk", "add", "--server", &api, "d", "null:1M", "--tenant", "vm",
    ];
    stdout_of(&[&add[..], &["--vhost-user", &added]].concat());
    assert_eq!(chain.tenant("a"), chain.tenant("d"));
    stdout_of(&["set", &api, "--disk", "a", "delay", "read=1us"]);
    chain.upgrade(&[]);
    assert!(chain.server.path("disks/d.toml").exists());
    assert_eq!(chain.show("d").unwrap()["kept"], true);
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    let socket = chain.socket("a");
    thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        scope.spawn(|| load(&socket, 1, &stop, &written));
        progress(&written, 1);
    });
    // The new supervisor restarts processes that it has inherited, and processes that it has
    // started.
    for _ in 0..2 {
        chain.kill_tenant("a");
        check(&socket, written.load(SeqCst));
        let filters = chain.show("a").unwrap()["options"]["filters"].to_string();
        assert!(filters.contains("1us"), "{filters}");
        chain.upgrade(&[]);
    }
    stdout_of(&["disk", "remove", &api, "--disk", "d"]);
    assert!(!chain.server.path("disks/d.toml").exists() && !Path::new(&added).exists());
    chain.quit();
}

/// The tenants are users of their own, who get files only from the server. (This test needs root.)
#[test]
fn tenants_stay_who_they_are() {
    let dir = disk_dir();
    let image = image(dir.path(), "raw");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
    let disks = [disk("a", &image, ""), disk("b", "null:1M", "")].concat();
    let first = "[tenants]\nusers = '3000000000-3000000003'";
    let mut chain = configured(&format!("{first}\n{disks}"));
    let user = |chain: &Chain, disk| {
        let status = format!("/proc/{}/status", chain.tenant(disk));
        let status = fs::read_to_string(status).unwrap();
        let line = status.lines().find(|line| line.starts_with("Uid:"));
        let numbers = line.unwrap().split_whitespace().skip(1);
        let all: Vec<u32> = numbers.map(|n| n.parse().unwrap()).collect();
        assert!(all.iter().all(|uid| *uid == all[0]), "{all:?}");
        all[0]
    };
    let (before, socket) = (["a", "b"].map(|disk| user(&chain, disk)), chain.socket("a"));
    with_disk(&socket, 1, |disk| {
        for round in 0..3 {
            write(disk, round);
            chain.upgrade(&[]);
            assert_eq!(["a", "b"].map(|disk| user(&chain, disk)), before);
            let found = disk.contents();
            assert!(found[..BLOCK] == block(0, round));
        }
        // A new tenant is another user.
        let (api, added) = (chain.server.api(), chain.socket("d"));
        let add = ["disk", "add", "--server", &api, "d", "null:1M"];
        stdout_of(&[&add[..], &["--vhost-user", &added]].concat());
        assert!(!before.contains(&user(&chain, "d")));
        // A changed configuration of users also applies to existing tenants.
        let conf = chain.server.path("conf");
        let text = fs::read_to_string(&conf).unwrap();
        let other = "[tenants]\nusers = '3100000000-3100000002'";
        fs::write(&conf, text.replace(first, other)).unwrap();
        chain.upgrade(&[]);
        for disk in ["a", "b", "d"] {
            assert!((3_100_000_000..=3_100_000_002).contains(&user(&chain, disk)));
        }
        write(disk, 4);
        fs::write(
            &conf,
            text.replace(first, "[tenants]\nusers = '3100000000-3100000001'"),
        )
        .unwrap();
        chain.refused(&[], "no user is left");
        write(disk, 5);
    });
    with_disk(&socket, 1, |disk| {
        assert!(disk.contents()[..BLOCK] == block(0, 5))
    });
    chain.quit();
}

/// The next process also has the files open that an image names, and can examine them.
#[test]
fn an_image_with_a_backing_file_goes_along() {
    let dir = disk_dir();
    let base: Vec<u8> = (0..SIZE).map(|i| (i / 512) as u8).collect();
    fs::write(dir.path().join("base"), &base).unwrap();
    let over = [
        "create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "over",
    ];
    qemu_img(dir.path(), &over);
    let image = crate::support::as_arg(&dir.path().join("over"));
    let mut chain = start(&[disk("a", &image, "format = 'qcow2'")]);
    let socket = chain.socket("a");
    for _ in 0..3 {
        with_disk(&socket, 1, |disk| {
            assert!(disk.contents() == base);
            chain.upgrade(&[]);
            assert!(disk.contents() == base);
        });
    }
    chain.kill_tenant("a");
    with_disk(&socket, 1, |disk| assert!(disk.contents() == base));
    chain.quit();
}

#[test]
fn tenants_of_a_server_whose_successor_fails_notice_nothing() {
    let dir = disk_dir();
    let mut chain = start(&[
        disk("a", &image(dir.path(), "raw"), ""),
        disk("d", "null:1M", ""),
    ]);
    let speak = |name: &str, body: &str| speaks(dir.path(), name, &format!("{HELLO}{body}"));
    let cases = [
        (
            program(dir.path(), "gone", "#!/bin/sh\nexit 3\n"),
            "connection is closed",
        ),
        (speak("cannot", "say({'Refused': 'no room'})"), "no room"),
        (speak("after", ""), "connection is closed"),
        (
            speak("dies-late", "say('Prepared')\nhear()"),
            "connection is closed",
        ),
        (fails_late(dir.path()), "locked"),
    ];
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let socket = chain.socket("a");
    thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        scope.spawn(|| load(&socket, 2, &stop, &rounds));
        progress(&rounds, 1);
        let tenant = chain.tenant("a");
        for (binary, words) in &cases {
            chain.refused(&["--binary", binary], words);
            progress(&rounds, 1);
            assert_eq!(chain.tenant("a"), tenant);
        }
        // The present supervisor restarts tenants, and can be upgraded.
        chain.kill_tenant("d");
        chain.upgrade(&[]);
        progress(&rounds, 2);
        chain.kill_tenant("d");
    });
    let log = chain.server.log();
    assert_eq!(log.matches("front-end connected").count(), 1, "{log}");
    chain.quit();
}

/// The tenant keeps its process and its disks.
#[test]
fn a_tenant_that_cannot_hand_over_stays() {
    let mut chain = start(&[
        disk("far", "null:1M", ""),
        disk(
            "memory",
            "memory:8M",
            "filters = ['fault:hang=yes,op=flush']",
        ),
    ]);
    let socket = chain.socket("memory");
    let read = |disk: &mut Driver<'_>| {
        let (offset, len) = (0, BLOCK);
        let all = disk.all(&[Request::Read { offset, len }]);
        all.into_iter().next().unwrap().unwrap()
    };
    with_disk(&socket, 1, |disk| {
        write(disk, 1);
        for round in 1..3 {
            let (far, stays) = (chain.tenant("far"), chain.tenant("memory"));
            let (answer, said) = chain.upgrade_in_part();
            assert!(said.contains("tenant 'memory'"), "{said}");
            assert_eq!(answer["tenants"].as_array().unwrap().len(), 2, "{answer}");
            assert!(chain.tenant("far") != far && chain.tenant("memory") == stays);
            assert!(read(disk) == block(0, round));
            write(disk, round + 1);
        }
    });
    // Another front-end can connect to it.
    with_disk(&socket, 1, |disk| assert!(read(disk) == block(0, 3)));
    chain.quit();
}

/// Returns the processes of this tenant.
fn processes(tenant: &str) -> Vec<u64> {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_it = |pid: &u64| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.ends_with(&[b"\0tenant\0", tenant.as_bytes(), b"\0"].concat())
    };
    pids.filter(is_it).collect()
}

/// Kills processes at instants all over a handover. Other tenants do not notice that.
#[test]
fn whichever_process_of_a_tenant_dies_its_disk_is_served() {
    let (dir, other) = (disk_dir(), disk_dir());
    let name = format!("victim-{}", std::process::id());
    let more = format!("tenant = '{name}'\nformat = 'qcow2'");
    let mut chain = start(&[
        disk("v", &image(dir.path(), "qcow2"), &more),
        disk("b", &image(other.path(), "raw"), ""),
    ]);
    let (victim, b) = (chain.socket("v"), chain.socket("b"));
    let (stop, rounds, written) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        scope.spawn(|| load(&b, 1, &stop, &rounds));
        for i in 0..24 {
            let enough = AtomicBool::new(false);
            thread::scope(|scope| {
                let _stop = StopAtEnd(&enough);
                scope.spawn(|| load(&victim, 1, &enough, &written));
                progress(&written, 1);
            });
            // Data that is not flushed may be lost with its process.
            let flush = |disk: &mut Driver<'_>| assert!(disk.all(&[Request::Flush])[0].is_ok());
            with_disk(&victim, 1, flush);
            let old = chain.tenant("v");
            let api = chain.server.api();
            let upgrading = scope.spawn(move || run(&["upgrade", &api, "--json"]));
            let new = eventually("a new process", || {
                let found = processes(&name).into_iter().find(|pid| *pid != old);
                found.or_else(|| upgrading.is_finished().then_some(old))
            });
            thread::sleep(Duration::from_millis(i * 3 / 2));
            match i % 3 {
                0 => kill(old),
                1 => kill(new),
                _ => [old, new].into_iter().for_each(kill),
            }
            let output = upgrading.join().unwrap();
            let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
            chain.pid = answer["pid"].as_u64().unwrap();
            eventually("it is served", || chain.show("v"));
            check(&victim, written.load(SeqCst));
            let is_one = || (processes(&name).len() == 1).then_some(());
            eventually("one process", is_one);
            progress(&rounds, 1);
        }
    });
    check(&b, rounds.load(SeqCst));
    chain.quit();
    qemu_img(dir.path(), &["check", "-f", "qcow2", "i"]);
}
