//! Checks the limits of tenants. (These tests need root, and control groups in which they can make
//! others.)

use super::{contents, pid, socket, start_with, state};
use crate::support::{Served, check_refusal, eventually, fathom, run, send, short_dir, stdout_of};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

const MIB: u64 = 1 << 20;

/// Returns the control group of a process, as the kernel reports it.
pub fn group(pid: u64, controller: &str) -> PathBuf {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let fields = |line: &str| {
        let mut fields = line.splitn(3, ':').skip(1).map(str::to_owned);
        (fields.next().unwrap(), fields.next().unwrap())
    };
    let mut all = groups.lines().map(fields);
    let own = { &mut all }.find(|(names, _)| names.split(',').any(|name| name == controller));
    let (at, path) = match own {
        Some((names, path)) => (format!("/sys/fs/cgroup/{names}"), path),
        None => {
            let (_, path) = groups
                .lines()
                .map(fields)
                .find(|(names, _)| names.is_empty())
                .unwrap();
            ("/sys/fs/cgroup".to_owned(), path)
        }
    };
    Path::new(&at).join(path.trim_start_matches('/'))
}

/// Returns the number in the first of these files that exists.
fn number(dir: &Path, files: &[&str]) -> i64 {
    let texts = files.iter().map(|file| fs::read_to_string(dir.join(file)));
    let text = texts.flatten().next();
    let text = text.unwrap_or_else(|| panic!("{}: none of {files:?}", dir.display()));
    text.split_whitespace()
        .next()
        .unwrap()
        .parse()
        .unwrap_or(-1)
}

pub fn memory_limit(pid: u64) -> i64 {
    let files = ["memory.max", "memory.limit_in_bytes"];
    number(&group(pid, "memory"), &files)
}

pub fn cpu_limit(pid: u64) -> i64 {
    number(&group(pid, "cpu"), &["cpu.max", "cpu.cfs_quota_us"])
}

pub fn tasks_limit(pid: u64) -> i64 {
    number(&group(pid, "pids"), &["pids.max"])
}

/// Returns the directories that contain the control groups of all tenants of a server.
pub fn servers(tenant: u64) -> Vec<PathBuf> {
    let groups = ["memory", "cpu", "pids"].map(|controller| group(tenant, controller));
    groups.map(|dir| dir.parent().unwrap().to_owned()).into()
}

fn is_back(served: &Served, disk: &str, before: u64) {
    eventually("the server starts it again", || {
        let client = fathom_client::Client::connect(Path::new(&served.api())).unwrap();
        let shown: serde_json::Value = client.get(&["v1", "disks", disk]).send().ok()?;
        (shown["state"]["pid"].as_u64() != Some(before)).then_some(())
    });
}

#[test]
fn who_needs_too_much_memory_dies_alone_and_is_served_again() {
    let tenants = "[tenants]\nmemory-max = '64M'";
    let disks = [("a", "memory:256M", ""), ("b", "memory:16M", "")];
    let mut served = start_with(short_dir(), tenants, &disks);
    let b = pid(&served, "b");
    let mut load = fathom();
    let socket_of_b = socket(&served, "b");
    load.args(["bench", "--vhost-user", &socket_of_b, "--rw", "randrw"]);
    load.args(["--overwrite", "--verify", "--runtime", "600s"]);
    load.stdout(Stdio::piped()).stderr(Stdio::piped());
    let load = load.spawn().unwrap();
    for _ in 0..2 {
        let before = pid(&served, "a");
        let (a, whole) = (socket(&served, "a"), "256M");
        let write = ["bench", "--vhost-user", &a, "--rw", "write", "--bs", "64k"];
        let more = [
            "--overwrite",
            "--size",
            whole,
            "--iodepth",
            "4",
            "--runtime",
            "60",
        ];
        let output = run(&[&write[..], &more].concat());
        assert!(!output.status.success(), "it was not limited");
        is_back(&served, "a", before);
        assert!(contents(&served, "a").iter().all(|byte| *byte == 0));
    }
    send("INT", load.id().into());
    let load = load.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&load.stderr);
    assert!(load.status.success(), "{said}");
    assert_eq!(pid(&served, "b"), b);
    let log = served.log();
    let words =
        "tenant 'a': its process was ended by signal 9, because it needed more than its memory-max";
    assert_eq!(log.matches(words).count(), 2, "{log}");
    served.terminate();
}

#[test]
fn limits_are_the_kernels_and_are_shown_with_what_is_used() {
    let tenants = "[tenants]\nusers = '3000000000-3000000009'\n\
                   memory-max = '64M'\ncpu-max = '10%'\ntasks-max = 100\n\
                   [tenant.b]\nmemory-max = 134217728\ncpu-max = 'off'";
    let disks = [("a", "memory:16M", ""), ("b", "null:1M", "")];
    let mut served = start_with(short_dir(), tenants, &disks);
    let supervisor = u64::from(served.child.id());
    for round in 0..2 {
        let [a, b] = ["a", "b"].map(|disk| pid(&served, disk));
        assert_eq!(memory_limit(a), 64 * MIB as i64);
        assert_eq!(memory_limit(b), 128 * MIB as i64);
        assert_eq!((cpu_limit(a), cpu_limit(b)), (10_000, -1));
        assert_eq!((tasks_limit(a), tasks_limit(b)), (100, 100));
        for controller in ["memory", "cpu", "pids"] {
            let [a, b, own] = [a, b, supervisor].map(|pid| group(pid, controller));
            assert!(a != b && a != own && b != own, "{controller}");
        }
        // The number includes all threads.
        let count = fs::read_dir(format!("/proc/{a}/task")).unwrap().count() as u64;
        let limits = state(&served, "a")["limits"].clone();
        assert!(limits["tasks"].as_u64().unwrap() >= count, "{limits}");
        assert_eq!(limits["memory_max"], 64 * MIB);
        assert_eq!(limits["cpu_max_percent"], 10);
        assert!(state(&served, "b")["limits"]["cpu_max_percent"].is_null());
        if round == 0 {
            send("KILL", a);
            served.wait_for("the server starts it again");
            is_back(&served, "a", a);
        }
    }
    // A tenant that would use a whole CPU is throttled.
    let load = [
        "bench",
        "--vhost-user",
        &socket(&served, "a"),
        "--rw",
        "randread",
    ];
    stdout_of(&[&load[..], &["--iodepth", "16", "--runtime", "2"]].concat());
    let limits = state(&served, "a")["limits"].clone();
    assert!(limits["cpu_held_back_ms"].as_u64().unwrap() > 0, "{limits}");
    let info = stdout_of(&["info", &served.api(), "--disk", "a"]);
    assert!(
        info.contains(" of 64 MiB of memory, 10% of a CPU (held back for "),
        "{info}"
    );
    assert!(info.contains(" of 100 tasks"), "{info}");
    // No control group is left behind.
    let dirs = servers(pid(&served, "a"));
    let of_b = group(pid(&served, "b"), "memory");
    stdout_of(&["disk", "remove", &served.api(), "--disk", "b"]);
    eventually("the group is gone", || (!of_b.exists()).then_some(()));
    let (status, log) = served.terminate();
    assert_eq!(status, Some(0), "{log}");
    for dir in dirs {
        assert!(!dir.exists(), "{}", dir.display());
    }
}

#[test]
fn what_a_killed_server_has_left_is_removed_and_nothing_else() {
    let tenants = "[tenants]\nmemory-max = '64M'\ncpu-max = '50%'\ntasks-max = 100";
    let mut other = start_with(short_dir(), tenants, &[("a", "null:1M", "")]);
    let others = servers(pid(&other, "a"));
    // This server has no tenant any more, but its groups still belong to it.
    stdout_of(&["disk", "remove", &other.api(), "--disk", "a"]);
    let mut killed = start_with(short_dir(), tenants, &[("a", "null:1M", "")]);
    let tenant = pid(&killed, "a");
    let left = servers(tenant);
    killed.signal("KILL");
    let _ = killed.end();
    eventually("its tenant ends", || {
        (!Path::new(&format!("/proc/{tenant}")).exists()).then_some(())
    });
    let mut next = start_with(short_dir(), tenants, &[]);
    for dir in left {
        // (Another server may remove the group at the same time.)
        eventually("the control group is removed", || {
            (!dir.exists()).then_some(())
        });
    }
    for dir in others {
        assert!(dir.exists(), "{}", dir.display());
    }
    for server in [&mut other, &mut next] {
        server.terminate();
    }
}

#[test]
fn without_limits_there_are_no_groups() {
    let served = start_with(short_dir(), "tenants = true", &[("a", "null:1M", "")]);
    let groups = |pid: u64| fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let supervisor = u64::from(served.child.id());
    assert_eq!(groups(pid(&served, "a")), groups(supervisor));
    assert!(state(&served, "a")["limits"].is_null());
}

/// A server that cannot enforce a limit does not run without it.
#[test]
fn who_cannot_limit_does_not_start() {
    for (key, value) in [
        ("memory-max", "'64M'"),
        ("cpu-max", "'50%'"),
        ("tasks-max", "100"),
    ] {
        let dir = short_dir();
        let tenants = format!("[tenants]\n[tenant.a]\n{key} = {value}");
        let config = super::configure(&dir, &tenants, &[]);
        let output = super::serve_as_nobody(&dir, &config);
        let error = String::from_utf8(output.stderr).unwrap();
        let words = [&format!("[tenants]: {key}: "), "Delegate=yes"];
        check_refusal(output.status, &error, 1, &words);
    }
}
