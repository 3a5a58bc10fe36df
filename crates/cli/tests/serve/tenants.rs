//! Checks tenants: processes that each serve some of a server's disks.

mod hostile;
pub mod limits;
mod log;
mod memory;
mod users;

use crate::driver::with_disk;
use crate::exercise::{Random, exercise};
use crate::kinds::{SIZE, qemu_img, tool};
use crate::support::nbd::Nbd;
use crate::support::{Served, as_arg, eventually, fathom, refused, send, short_dir, stdout_of};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Size of a disk in bytes.
const LEN: usize = SIZE as usize;

/// Starts a server with these disks. For each: its name, its image, and more lines of its
/// configuration.
pub fn start(dir: TempDir, disks: &[(&str, &str, &str)]) -> Served {
    start_with(dir, "tenants = true", disks)
}

/// Starts a server like [`start`], with these lines about tenants.
fn start_with(dir: TempDir, tenants: &str, disks: &[(&str, &str, &str)]) -> Served {
    let config = configure(&dir, tenants, disks);
    let mut command = fathom();
    command.args(["serve", "--config", &config]);
    let mut served = Served::spawn(command, dir);
    served.wait_for("the API is at");
    served
}

fn configure(dir: &TempDir, tenants: &str, disks: &[(&str, &str, &str)]) -> String {
    let path = |name: &str| as_arg(&dir.path().join(name));
    let mut text = format!(
        "sandbox = 'on'\nstop-timeout = '3s'\ndisks-dir = 'disks'\napi = {{ socket = '{}' }}\n{tenants}\n",
        path("c")
    );
    for (name, image, more) in disks {
        let socket = path(name);
        text += &format!("[[disk]]\nname = '{name}'\nimage = '{image}'\n");
        text += &format!("vhost-user = '{socket}.s'\n{more}\n");
    }
    fs::write(path("conf"), text).unwrap();
    path("conf")
}

/// Starts a server with this configuration as a user without privileges. Returns its output when it
/// ends.
fn serve_as_nobody(dir: &TempDir, config: &str) -> Output {
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    // The user may have no access to the directory of the program. (Another process makes the copy:
    // a child that this process is just starting must not have the copy open for writing.)
    let copy = dir.path().join("fathom");
    let mut copying = Command::new("cp");
    copying.arg(env!("CARGO_BIN_EXE_fathom")).arg(&copy);
    assert!(copying.status().unwrap().success());
    let mut command = Command::new(&copy);
    command.args(["serve", "--config", config]);
    command.uid(65534).gid(65534).output().unwrap()
}

pub fn socket(served: &Served, disk: &str) -> String {
    served.arg(&format!("{disk}.s"))
}

fn state(served: &Served, disk: &str) -> Value {
    let client = fathom_client::Client::connect(Path::new(&served.api())).unwrap();
    let shown: Value = client.get(&["v1", "disks", disk]).send().unwrap();
    shown["state"].clone()
}

fn pid(served: &Served, disk: &str) -> u64 {
    state(served, disk)["pid"].as_u64().unwrap()
}

/// Writes and reads all over a disk. `model` has its contents, before and after that.
fn use_disk(served: &Served, disk: &str, model: &mut [u8]) {
    with_disk(&socket(served, disk), 1, |driver| {
        let mut random = Random::new(7);
        (0..3).for_each(|_| exercise(driver, model, &mut random));
    });
}

fn contents(served: &Served, disk: &str) -> Vec<u8> {
    with_disk(&socket(served, disk), 1, |driver| driver.contents())
}

#[test]
fn tenants_are_processes_and_the_supervisor_opens_no_disk() {
    let dir = short_dir();
    let image = dir.path().join("raw");
    fs::write(&image, vec![0; LEN]).unwrap();
    let image = as_arg(&image);
    let shared = "tenant = 'vm'";
    let disks = [
        ("a", &*image, ""),
        ("b", "null:1M", shared),
        ("d", "null:1M", shared),
    ];
    let served = start(dir, &disks);
    let [a, b, d] = ["a", "b", "d"].map(|disk| pid(&served, disk));
    assert!(a != b && b == d, "{a} {b} {d}");
    let supervisor = u64::from(served.child.id());
    assert!(a != supervisor && b != supervisor);
    let has_image = |pid: u64| {
        let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
        { open }.any(|fd| fs::read_link(fd.path()).is_ok_and(|to| as_arg(&to) == image))
    };
    assert!(has_image(a) && !has_image(b) && !has_image(supervisor));
    // The front-end sees the process id of the tenant.
    let info = stdout_of(&[
        "bench",
        "--vhost-user",
        &socket(&served, "a"),
        "--runtime",
        "1",
    ]);
    assert!(info.contains(&format!("(pid {a},")), "{info}");
    // A tenant without disks ends.
    let api = served.api();
    stdout_of(&["disk", "remove", &api, "--disk", "b"]);
    assert_eq!(pid(&served, "d"), d);
    stdout_of(&["disk", "remove", &api, "--disk", "d"]);
    eventually("the tenant ends", || {
        (!Path::new(&format!("/proc/{d}")).exists()).then_some(())
    });
}

#[test]
fn a_tenant_that_dies_is_started_again_and_others_do_not_notice() {
    let dir = short_dir();
    let image = as_arg(&dir.path().join("image.qcow2"));
    qemu_img(dir.path(), &["create", "-q", "-f", "qcow2", &image, "12M"]);
    let disks = [("a", &*image, "format = 'qcow2'"), ("b", "memory:16M", "")];
    let served = start(dir, &disks);
    let mut model = vec![0; LEN];
    let bench = [
        "bench",
        "--vhost-user",
        &socket(&served, "b"),
        "--rw",
        "randrw",
    ];
    let mut load = fathom();
    load.args(bench)
        .args(["--overwrite", "--verify", "--runtime", "600s"]);
    let load = load
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    for _ in 0..3 {
        use_disk(&served, "a", &mut model);
        let before = pid(&served, "a");
        send("KILL", before);
        let came_back = || {
            let client = fathom_client::Client::connect(Path::new(&served.api())).unwrap();
            let shown: Value = client.get(&["v1", "disks", "a"]).send().ok()?;
            (shown["state"]["pid"].as_u64() != Some(before)).then_some(())
        };
        eventually("the server starts it again", came_back);
        assert!(contents(&served, "a") == model);
    }
    send("INT", load.id().into());
    let load = load.wait_with_output().unwrap();
    assert!(
        load.status.success(),
        "{}",
        String::from_utf8_lossy(&load.stderr)
    );
    assert!(
        served
            .log()
            .contains("ended by signal 9; the server starts it again")
    );
}

#[test]
fn every_kind_of_disk_is_had_by_a_tenant() {
    let dir = short_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let base: Vec<u8> = (0..LEN).map(|i| (i / 512) as u8).collect();
    fs::write(path("base"), &base).unwrap();
    fs::write(path("raw"), vec![0; LEN]).unwrap();
    let over = [
        "create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "over",
    ];
    qemu_img(dir.path(), &over);
    let far = Nbd::start("memory:12M", &[]);
    let (raw, under, over, log) = (path("raw"), path("base"), path("over"), path("log"));
    let logged = format!("filters = ['log:file={log}']");
    let scratch = format!("filters = ['cow:dir={}']", as_arg(dir.path()));
    let far_away = far.uri();
    let disks = [
        ("raw", &*raw, &*logged),
        ("over", &over, "format = 'qcow2'"),
        ("cow", &under, &*scratch),
        ("memory", "memory:12M", ""),
        ("far", &far_away, ""),
    ];
    let served = start(dir, &disks);
    for (name, _, _) in disks {
        let mut model = match name {
            "over" | "cow" => base.clone(),
            _ => vec![0; LEN],
        };
        assert!(contents(&served, name) == model, "{name}");
        use_disk(&served, name, &mut model);
        assert!(contents(&served, name) == model, "{name}");
    }
    assert!(fs::read(under).unwrap() == base);
    assert!(fs::metadata(log).unwrap().len() > 0);
    // Requests about a disk reach its tenant.
    let (api, trace) = (served.api(), served.arg("trace"));
    stdout_of(&["trace", "--pid", &api, "--disk", "raw", "--on", &trace]);
    use_disk(&served, "raw", &mut contents(&served, "raw"));
    stdout_of(&["trace", "--pid", &api, "--disk", "raw", "--off"]);
    let traced = stdout_of(&["trace", &trace]);
    assert!(traced.lines().count() > 20, "{traced}");
    stdout_of(&["resize", &api, "--disk", "raw", "24M"]);
    assert_eq!(state(&served, "raw")["size"], 2 * LEN);
    stdout_of(&["set", &api, "--disk", "raw", "log", "format=json"]);
    refused(
        1,
        &["set", &api, "--disk", "raw", "log", "format=x"],
        &["line"],
    );
    stdout_of(&["disk", "freeze", &api, "--disk", "over"]);
    let checked = tool(served.dir.path(), "qemu-img", &["check", "over"]);
    assert!(checked.status.success());
    stdout_of(&["disk", "thaw", &api, "--disk", "over"]);
    contents(&served, "over");
    let log = served.log();
    assert!(!log.contains("was denied"), "{log}");
}

#[test]
fn a_tenant_that_says_nothing_holds_up_nobody() {
    let served = start(short_dir(), &[("a", "null:1M", ""), ("b", "null:1M", "")]);
    let (api, stuck) = (served.api(), pid(&served, "a"));
    send("STOP", stuck);
    let begun = Instant::now();
    stdout_of(&["stats", &api, "--disk", "b"]);
    let all = || {
        let client = fathom_client::Client::connect(Path::new(&api)).unwrap();
        let all: Value = client.get(&["v1", "disks"]).send().unwrap();
        all["disks"].as_array().unwrap().len()
    };
    assert_eq!(all(), 2);
    refused(1, &["stats", &api, "--disk", "a"], &["did not respond"]);
    // (Without a limit, the stopped tenant would never reply.)
    assert!(begun.elapsed() < Duration::from_secs(60));
    send("CONT", stuck);
    stdout_of(&["stats", &api, "--disk", "a"]);
    // A tenant that does not release its disk is killed.
    send("STOP", stuck);
    refused(
        1,
        &["disk", "remove", &api, "--disk", "a", "--force"],
        &["in flight after 3s"],
    );
    eventually("it is gone", || (all() == 1).then_some(()));
    let stuck = format!("/proc/{stuck}");
    eventually("its process ends", || {
        (!Path::new(&stuck).exists()).then_some(())
    });
}

#[test]
fn a_supervisor_that_is_killed_takes_its_tenants_along() {
    let mut served = start(short_dir(), &[("a", "null:1M", "")]);
    let (api, socket) = (served.api(), served.arg("b.s"));
    let add = [
        "disk",
        "add",
        "--server",
        &api,
        "b",
        "memory:12M",
        "--vhost-user",
        &socket,
    ];
    stdout_of(&add);
    let tenants = ["a", "b"].map(|disk| pid(&served, disk));
    served.signal("KILL");
    let _ = served.end();
    for tenant in tenants {
        eventually("it ends", || {
            (!Path::new(&format!("/proc/{tenant}")).exists()).then_some(())
        });
    }
    let dir = std::mem::replace(&mut served.dir, short_dir());
    drop(served);
    let served = start(dir, &[("a", "null:1M", "")]);
    let mut model = vec![0; LEN];
    use_disk(&served, "b", &mut model);
}

#[test]
fn what_cannot_be_had_is_told_and_keeps_nobody_from_the_rest() {
    let gone = "/nonexistent/image";
    let served = start(short_dir(), &[("a", gone, ""), ("b", "memory:12M", "")]);
    assert!(
        served
            .log()
            .contains("disk 'a': /nonexistent/image: no such directory: /nonexistent")
    );
    let (api, socket) = (served.api(), served.arg("d.s"));
    let add = [
        "disk",
        "add",
        "--server",
        &api,
        "d",
        "null:1M",
        "--vhost-user",
        &socket,
    ];
    let pooled = [&add[..], &["--pool", "p"]].concat();
    refused(1, &pooled, &["no pool 'p'"]);
    let inherited = [
        "disk",
        "add",
        "--server",
        &api,
        "d",
        "null:1M",
        "--vhost-user",
        "fd:0",
    ];
    refused(1, &inherited, &["tenants cannot inherit sockets"]);
    stdout_of(&add);
    use_disk(&served, "b", &mut vec![0; LEN]);
}

/// Changed options are persistent, and apply to the process that replaces one that died.
#[test]
fn a_tenants_disk_changes_while_it_is_used() {
    let dir = short_dir();
    let image = dir.path().join("raw");
    fs::write(&image, vec![0; LEN]).unwrap();
    let mut served = start(dir, &[]);
    let api = served.api();
    let add = ["disk", "add", "--server", &api, "a", &as_arg(&image)];
    stdout_of(
        &[
            &add[..],
            &["--format", "raw", "--vhost-user", &socket(&served, "a")],
        ]
        .concat(),
    );
    let change = |option: &str| stdout_of(&["disk", "change", &api, "--disk", "a", option]);
    let mut model = vec![0; LEN];
    with_disk(&socket(&served, "a"), 1, |driver| {
        let mut random = Random::new(7);
        for option in ["cache=writethrough", "iothreads=2", "aio=threads"] {
            exercise(driver, &mut model, &mut random);
            change(option);
        }
        exercise(driver, &mut model, &mut random);
    });
    let kept = fs::read_to_string(served.path("disks/a.toml")).unwrap();
    assert!(
        kept.contains("iothreads = 2") && kept.contains("writethrough"),
        "{kept}"
    );
    let before = pid(&served, "a");
    send("KILL", before);
    served.wait_for("the server starts it again");
    assert!(contents(&served, "a") == model);
    let state = state(&served, "a");
    assert_eq!(state["workers"].as_array().unwrap().len(), 2, "{state}");
    assert_eq!(state["cache"], "writethrough");
}
