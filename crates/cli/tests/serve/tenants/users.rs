//! Checks tenants that are users of their own, without access to any file. (These tests need root.)

use super::{LEN, contents, pid, start_with, state, use_disk};
use crate::kinds::{qemu_img, tool};
use crate::support::nbd::Nbd;
use crate::support::{
    Served, as_arg, check_refusal, eventually, fathom, refused, send, short_dir, stdout_of,
};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use tempfile::TempDir;

const RANGE: &str = "[tenants]\nusers = '3000000000-3000000009'";

/// The real, effective, saved and file-system ids of a process, and its other privileges.
#[derive(Debug, PartialEq, Eq)]
struct Rights {
    users: BTreeSet<u32>,
    groups: BTreeSet<u32>,
    supplementary: String,
    capabilities: String,
}

fn rights(pid: u64) -> Rights {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap().trim().to_owned()
    };
    let numbers = |name| {
        let field = field(name);
        field
            .split_whitespace()
            .map(|n| n.parse().unwrap())
            .collect()
    };
    let sets = ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"].map(field);
    Rights {
        users: numbers("Uid:"),
        groups: numbers("Gid:"),
        supplementary: field("Groups:"),
        capabilities: sets.concat().replace('0', ""),
    }
}

/// Returns the user of a process. Fails if the process has another user, group or privilege.
fn user(pid: u64) -> u32 {
    let rights = rights(pid);
    let uid = *rights.users.first().unwrap();
    let only = Rights {
        users: [uid].into(),
        groups: [uid].into(),
        supplementary: String::new(),
        capabilities: String::new(),
    };
    assert_eq!(rights, only);
    uid
}

/// Makes a directory for files that only root can reach, and that others cannot even list.
fn secret_dir() -> TempDir {
    let dir = short_dir();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
    dir
}

fn write_secret(path: &Path, bytes: &[u8]) -> String {
    fs::write(path, bytes).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    as_arg(path)
}

fn kill_and_wait(served: &mut Served, disk: &str) {
    send("KILL", pid(served, disk));
    served.wait_for("the server starts it again");
    eventually("it is there again", || {
        let api = served.api();
        let client = fathom_client::Client::connect(Path::new(&api)).unwrap();
        let shown = client.get(&["v1", "disks", disk]);
        shown.send::<serde_json::Value>().ok()
    });
}

#[test]
fn each_is_another_user_and_the_same_one_after_it_has_died() {
    let shared = "tenant = 'vm'";
    let disks = [
        ("a", "null:1M", ""),
        ("b", "null:1M", shared),
        ("d", "null:1M", shared),
    ];
    let mut served = start_with(short_dir(), RANGE, &disks);
    let [a, b, d] = ["a", "b", "d"].map(|disk| user(pid(&served, disk)));
    assert!(a != b && b == d, "{a} {b} {d}");
    assert!((3_000_000_000..=3_000_000_009).contains(&a));
    kill_and_wait(&mut served, "a");
    assert_eq!(user(pid(&served, "a")), a);
    let info = stdout_of(&["info", &served.api(), "--disk", "a"]);
    assert!(
        info.contains(&format!("user: {a}, of the group {a} alone")),
        "{info}"
    );
    // All threads of the process have this user.
    let tasks = fs::read_dir(format!("/proc/{}/task", pid(&served, "a"))).unwrap();
    for task in tasks.flatten() {
        assert_eq!(task.metadata().unwrap().uid(), a);
    }
}

/// The mode of the sandbox does not matter.
#[test]
fn without_a_sandbox_they_are_users_of_their_own_too() {
    let dir = short_dir();
    let config = super::configure(&dir, RANGE, &[("a", "memory:12M", "")]);
    for mode in ["off", "log"] {
        let text = fs::read_to_string(&config).unwrap();
        let (_, rest) = text.split_once('\n').unwrap();
        fs::write(&config, format!("sandbox = '{mode}'\n{rest}")).unwrap();
        let mut command = fathom();
        command.args(["serve", "--config", &config]);
        let mut served = Served::spawn(command, short_dir());
        served.wait_for("the API is at");
        let api = as_arg(&dir.path().join("c"));
        let info = stdout_of(&["info", &api, "--disk", "a", "--json"]);
        let info: serde_json::Value = serde_json::from_str(&info).unwrap();
        let uid = user(info["pid"].as_u64().unwrap());
        assert!(uid >= 3_000_000_000, "{mode}");
        // The next server uses the same sockets.
        served.terminate();
    }
}

#[test]
fn who_has_no_right_to_any_file_serves_every_kind_of_disk() {
    let dir = secret_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let base: Vec<u8> = (0..LEN).map(|i| (i / 512) as u8).collect();
    write_secret(&dir.path().join("base"), &base);
    let raw = write_secret(&dir.path().join("raw"), &vec![0; LEN]);
    let over = [
        "create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "over",
    ];
    qemu_img(dir.path(), &over);
    let with_data = format!("data_file={}", path("data"));
    let apart = [
        "create", "-q", "-f", "qcow2", "-o", &with_data, "apart", "12M",
    ];
    qemu_img(dir.path(), &apart);
    let far = Nbd::start("memory:12M", &[]);
    let far = far.uri();
    let data = format!("format = 'qcow2'\ndata-file = '{}'", path("data"));
    let logged = format!("filters = ['log:file={}']", path("log"));
    let scratch = format!("filters = ['cow:dir={}']", as_arg(dir.path()));
    let traced = format!("trace = '{}'", path("trace"));
    let (under, over, apart) = (path("base"), path("over"), path("apart"));
    let disks = [
        ("raw", &*raw, &*logged),
        ("over", &over, "format = 'qcow2'\nregister-memory = true"),
        ("apart", &apart, &data),
        ("cow", &under, &scratch),
        ("memory", "memory:12M", &traced),
        ("far", &far, "aio = 'threads'"),
    ];
    let mut served = start_with(dir, RANGE, &disks);
    let mut users = BTreeSet::new();
    for (name, _, _) in disks {
        users.insert(user(pid(&served, name)));
        let mut model = match name {
            "over" | "cow" => base.clone(),
            _ => vec![0; LEN],
        };
        assert!(contents(&served, name) == model, "{name}");
        use_disk(&served, name, &mut model);
        assert!(contents(&served, name) == model, "{name}");
        if !["memory", "cow"].contains(&name) {
            kill_and_wait(&mut served, name);
            assert!(contents(&served, name) == model, "{name}");
        }
    }
    assert_eq!(users.len(), disks.len());
    let api = served.api();
    stdout_of(&["resize", &api, "--disk", "raw", "24M"]);
    stdout_of(&["resize", &api, "--disk", "over", "24M"]);
    stdout_of(&[
        "disk",
        "change",
        &api,
        "--disk",
        "apart",
        "cache=writethrough",
    ]);
    stdout_of(&["disk", "freeze", &api, "--disk", "over"]);
    stdout_of(&["disk", "thaw", &api, "--disk", "over"]);
    let trace = served.arg("another");
    stdout_of(&["trace", "--pid", &api, "--disk", "raw", "--on", &trace]);
    let size = contents(&served, "raw").len();
    stdout_of(&["trace", "--pid", &api, "--disk", "raw", "--off"]);
    assert_eq!(
        (size, state(&served, "over")["size"].as_u64()),
        (2 * LEN, Some(2 * LEN as u64))
    );
    for trace in [&trace, &served.arg("trace")] {
        let lines = stdout_of(&["trace", trace]).lines().count();
        assert!(lines > 20, "{lines}");
    }
    assert!(fs::metadata(served.path("log")).unwrap().len() > 0);
    let (status, log) = served.terminate();
    assert_eq!(status, Some(0), "{log}");
    for image in ["over", "apart"] {
        let checked = tool(served.dir.path(), "qemu-img", &["check", image]);
        assert!(checked.status.success(), "{image}");
    }
}

/// Checks what the kernel denies to the user of a tenant that was taken over, without any sandbox.
#[test]
fn a_tenants_user_reaches_neither_its_neighbour_nor_its_image() {
    let dir = short_dir();
    let mine = write_secret(&dir.path().join("mine"), &vec![0; LEN]);
    let other = write_secret(&dir.path().join("other"), &vec![0; LEN]);
    let disks = [("a", &*mine, ""), ("b", &*other, "")];
    let served = start_with(dir, RANGE, &disks);
    let [a, b] = ["a", "b"].map(|disk| pid(&served, disk));
    let uid = user(a);
    let open = |path: String| {
        let mut as_tenant = Command::new("head");
        as_tenant.args(["-c0", &path]).uid(uid).gid(uid);
        as_tenant.stdin(Stdio::null()).stderr(Stdio::null());
        as_tenant.status().unwrap().success()
    };
    // The user can open its own process, so the following failures mean something.
    assert!(open(format!("/proc/{a}/mem")) && open(format!("/proc/{a}/environ")));
    for path in [
        format!("/proc/{b}/mem"),
        format!("/proc/{b}/environ"),
        format!("/proc/{}/mem", served.child.id()),
        other,
        mine,
    ] {
        assert!(!open(path.clone()), "{path}");
    }
}

#[test]
fn one_user_is_that_of_all() {
    let disks = [("a", "null:1M", ""), ("b", "null:1M", "")];
    let served = start_with(short_dir(), "[tenants]\nusers = 'nobody'", &disks);
    let status = |disk| rights(pid(&served, disk));
    assert_eq!(status("a"), status("b"));
    assert_eq!(status("a").users, [65534].into());
    assert_eq!(status("a").supplementary, "");
}

#[test]
fn when_no_user_is_left_a_disk_is_refused_and_others_go_on() {
    let two = "[tenants]\nusers = '3000000000-3000000001'";
    let disks = [("a", "null:1M", ""), ("b", "null:1M", "")];
    let served = start_with(short_dir(), two, &disks);
    let (api, socket) = (served.api(), served.arg("d.s"));
    let add = |name: &'static str| {
        [
            "disk",
            "add",
            "--server",
            &api,
            name,
            "null:1M",
            "--vhost-user",
            &socket,
        ]
        .map(String::from)
    };
    let add = add("d");
    let add: Vec<&str> = add.iter().map(|arg| &**arg).collect();
    refused(1, &add, &["no user is left for tenant 'd'", "larger range"]);
    let one = user(pid(&served, "a"));
    stdout_of(&["disk", "remove", &api, "--disk", "a"]);
    // The user is free as soon as the tenant's process has ended.
    eventually("there is room", || {
        let added = fathom().args(&add).output().unwrap();
        added.status.success().then_some(())
    });
    assert_eq!(user(pid(&served, "d")), one);
}

#[test]
fn who_is_not_root_is_told_at_once() {
    let dir = short_dir();
    let config = super::configure(&dir, RANGE, &[]);
    let output = super::serve_as_nobody(&dir, &config);
    let error = String::from_utf8(output.stderr).unwrap();
    check_refusal(output.status, &error, 1, &["[tenants]: users", "root"]);
}
