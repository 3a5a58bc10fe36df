//! Checks persistent disks, which a server serves again after a restart, as their files say.

use crate::support::{Served, as_arg, eventually, fathom, refused, short_dir, stdout_of};
use serde_json::Value;
use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Starts a server with the directory `disks` for persistent disks. `more` is in its configuration.
pub fn start(dir: TempDir, more: &str) -> Served {
    start_by(fathom(), dir, more)
}

/// Starts such a server by a command to which the arguments of `fathom` can be appended.
pub fn start_by(mut command: Command, dir: TempDir, more: &str) -> Served {
    let path = |name: &str| as_arg(&dir.path().join(name));
    configure(dir.path(), more);
    command.args(["serve", "--config", &path("conf")]);
    let mut served = Served::spawn(command, dir);
    served.wait_for("the API is at");
    served
}

fn configure(dir: &Path, more: &str) {
    let path = |name: &str| as_arg(&dir.join(name));
    let text = format!(
        "disks-dir = 'disks'\napi = {{ socket = '{}' }}\n[nbd]\nlisten = ['unix:{}']\n{more}",
        path("c"),
        path("n")
    );
    fs::write(path("conf"), text).unwrap();
}

/// Stops the server with a signal, and starts it again.
pub fn again(mut served: Served, signal: &str, more: &str) -> Served {
    served.signal(signal);
    let _ = served.end();
    let dir = std::mem::replace(&mut served.dir, short_dir());
    drop(served);
    start(dir, more)
}

pub fn add(served: &Served, name: &str, more: &[&str]) {
    let args = ["disk", "add", "--server", &served.api(), name, "null:1M"];
    stdout_of(&[&args, more].concat());
}

fn disk(served: &Served, args: &[&str]) -> String {
    let (first, rest) = args.split_first().unwrap();
    stdout_of(&[&["disk", first, &*served.api(), "--disk"], rest].concat())
}

/// Returns the disks: for each, its name, whether a restart keeps it, and its filters.
pub fn disks(served: &Served) -> Vec<(String, bool, String)> {
    let client = fathom_client::Client::connect(Path::new(&served.api())).unwrap();
    let all: Value = client.get(&["v1", "disks"]).send().unwrap();
    let mut disks: Vec<_> = all["disks"].as_array().unwrap().iter().map(of).collect();
    disks.sort();
    disks
}

fn of(disk: &Value) -> (String, bool, String) {
    let name = disk["options"]["name"].as_str().unwrap();
    let filters = disk["options"]["filters"].as_array().into_iter().flatten();
    let filters: Vec<_> = filters.map(|one| one.as_str().unwrap()).collect();
    let kept = disk["kept"].as_bool().unwrap();
    (name.into(), kept, filters.join(" "))
}

pub fn seen(name: &str, kept: bool, filters: &str) -> (String, bool, String) {
    (name.into(), kept, filters.into())
}

#[test]
fn what_is_changed_is_so_again() {
    let listed = "[[disk]]\nname = 'listed'\nimage = 'null:1M'\n";
    let served = start(short_dir(), listed);
    add(&served, "a", &["--filter", "delay:read=1ms"]);
    add(&served, "b", &["--filter", "delay", "--filter", "delay"]);
    add(&served, "gone", &[]);
    add(&served, "back", &[]);
    add(&served, "now", &["--transient"]);
    disk(&served, &["set", "b", "delay#2", "read=2us", "write=3us"]);
    disk(&served, &["set", "b", "delay#2", "write="]);
    disk(&served, &["set", "a", "delay", "read=7ms", "--transient"]);
    disk(&served, &["remove", "gone"]);
    disk(&served, &["resize", "b", "3M"]);
    disk(&served, &["remove", "back", "--transient"]);
    let now = [
        seen("a", true, "delay:read=7ms"),
        seen("b", true, "delay delay:read=2us"),
        seen("listed", true, ""),
        seen("now", false, ""),
    ];
    assert_eq!(disks(&served), now);
    let then = [
        seen("a", true, "delay:read=1ms"),
        seen("b", true, "delay delay:read=2us"),
        seen("back", true, ""),
        seen("listed", true, ""),
    ];
    // After a normal end of the server, and after a kill.
    let served = again(served, "TERM", listed);
    assert_eq!(disks(&served), then);
    let served = again(served, "KILL", listed);
    assert_eq!(disks(&served), then);
    // Clients can use the disks as soon as the server is ready.
    let uri = format!("nbd+unix:///a?socket={}", served.arg("n"));
    stdout_of(&["bench", "--nbd", &uri, "--number-ios", "10"]);
    let size = |name: &str| {
        let info = stdout_of(&["info", &served.api(), "--disk", name, "--json"]);
        let info: Value = serde_json::from_str(&info).unwrap();
        info["size"].as_u64()
    };
    assert_eq!([size("a"), size("b")], [Some(1 << 20), Some(3 << 20)]);
    // A file has the same options as the configuration would have.
    let text = fs::read_to_string(served.path("disks/b.toml")).unwrap();
    assert!(
        text.contains("filters = [\"delay\", \"delay:read=2us\"]"),
        "{text}"
    );
    // A transient disk becomes persistent if a request asks for that.
    add(&served, "now", &["--transient"]);
    let put = |query: &str| {
        let output = Command::new("curl")
            .args(["--silent", "--fail", "--unix-socket", &served.api()])
            .args(["-X", "PUT", "-d", r#"{"image": "null:1048576"}"#])
            .arg(format!("http://fathom/v1/disks/now{query}"))
            .output();
        assert!(output.unwrap().status.success());
        disks(&served).last().unwrap().1
    };
    assert!(!put("?temporary"));
    assert!(put(""));
    assert!(put("?temporary=true"), "it is kept still");
}

#[test]
fn what_cannot_be_served_again_keeps_nothing_else_from_it() {
    let dir = short_dir();
    let image = as_arg(&dir.path().join("image"));
    fs::write(&image, vec![0; 1 << 20]).unwrap();
    let served = start(dir, "");
    let args = ["disk", "add", "--server", &served.api(), "image"];
    stdout_of(&[&args[..], &[&image]].concat());
    add(&served, "good", &[]);
    fs::rename(&image, served.path("elsewhere")).unwrap();
    fs::write(served.path("disks/bad.toml"), "image = 7\n").unwrap();
    let mut served = again(served, "TERM", "");
    assert_eq!(disks(&served), [seen("good", true, "")]);
    let log = served.log();
    assert!(
        log.contains("disk 'image': ") && log.contains("no such file"),
        "{log}"
    );
    assert!(log.contains("bad.toml:1: "), "{log}");
    // A reload tries to serve the disk again.
    fs::rename(served.path("elsewhere"), &image).unwrap();
    served.signal("HUP");
    served.wait_for("serving /");
    assert_eq!(disks(&served).len(), 2);
    // Only one server can use the directory.
    let second = short_dir();
    configure(second.path(), "");
    let conf = fs::read_to_string(second.path().join("conf")).unwrap();
    let theirs = conf.replace("'disks'", &format!("'{}'", served.arg("disks")));
    fs::write(second.path().join("conf"), theirs).unwrap();
    let conf = as_arg(&second.path().join("conf"));
    refused(1, &["serve", "--config", &conf], &["another server keeps"]);
}

#[test]
fn what_has_changed_in_the_files_is_changed_on_demand() {
    let one =
        |name: &str, more: &str| format!("[[disk]]\nname = '{name}'\nimage = 'null:1M'\n{more}");
    let mut served = start(
        short_dir(),
        &[one("a", ""), one("b", "filters = ['delay']\n")].concat(),
    );
    add(&served, "kept", &[]);
    add(&served, "now", &["--transient"]);
    let reload = |served: &mut Served| {
        let words = "configuration: reloaded";
        let before = served.log().matches(words).count();
        served.signal("HUP");
        eventually("a reload", || {
            (served.log().matches(words).count() > before).then_some(())
        });
    };
    let serving = |served: &Served| served.log().matches("serving null").count();
    let before = serving(&served);
    reload(&mut served);
    assert_eq!(serving(&served), before, "nothing has changed");
    let changed = [one("b", "filters = ['delay:read=5us']\n"), one("c", "")].concat();
    configure(served.dir.path(), &changed);
    fs::write(served.path("disks/hand.toml"), "image = 'null:1M'\n").unwrap();
    fs::remove_file(served.path("disks/kept.toml")).unwrap();
    reload(&mut served);
    let wanted = [
        seen("b", true, "delay:read=5us"),
        seen("c", true, ""),
        seen("hand", true, ""),
        seen("now", false, ""),
    ];
    eventually("the changes", || (disks(&served) == wanted).then_some(()));
    assert_eq!(serving(&served), before + 2, "b and now were let alone");
    // A change that is not possible is reported, and changes no disk.
    configure(served.dir.path(), "[[disk]\n");
    served.signal("HUP");
    served.wait_for("no disk was changed");
    let text = [one("b", "queues = 2\n"), one("c", "")].concat();
    configure(served.dir.path(), &text);
    fs::write(served.path("disks/hand.toml"), "image = \n").unwrap();
    reload(&mut served);
    served.wait_for("disk 'b': already served with other options (queues)");
    assert_eq!(disks(&served), wanted);
    // The server removes a disk in use only when it is no longer in use.
    let uri = format!("nbd+unix:///c?socket={}", served.arg("n"));
    let load = ["bench", "--nbd", &uri, "--runtime", "10m"];
    let mut bench = fathom();
    let mut bench = bench.args(load).stdout(Stdio::null()).spawn().unwrap();
    eventually("a client", || {
        stdout_of(&["info", &served.api(), "--disk", "c"])
            .contains("connection:")
            .then_some(())
    });
    configure(
        served.dir.path(),
        &one("b", "filters = ['delay:read=5us']\n"),
    );
    served.signal("HUP");
    served.wait_for("disk 'c': in use by an NBD client");
    bench.kill().unwrap();
    bench.wait().unwrap();
    eventually("it goes", || {
        served.signal("HUP");
        std::thread::sleep(std::time::Duration::from_millis(200));
        disks(&served).iter().all(|one| one.0 != "c").then_some(())
    });
}

#[test]
fn a_service_manager_is_told_of_a_reload() {
    let dir = short_dir();
    configure(dir.path(), "");
    let notified = UnixDatagram::bind(dir.path().join("notify")).unwrap();
    let patience = Some(crate::support::PATIENCE);
    notified.set_read_timeout(patience).unwrap();
    let mut command = fathom();
    let conf = dir.path().join("conf");
    command.args(["serve", "--config"]).arg(conf);
    command.env("NOTIFY_SOCKET", dir.path().join("notify"));
    let served = Served::spawn(command, dir);
    let told = || {
        let mut state = [0; 100];
        let len = notified.recv(&mut state).unwrap();
        String::from_utf8(state[..len].to_vec()).unwrap()
    };
    assert_eq!(told(), "READY=1\n");
    served.signal("HUP");
    let reloading = told();
    let usec = reloading.strip_prefix("RELOADING=1\nMONOTONIC_USEC=");
    assert!(
        usec.is_some_and(|n| n.trim().parse::<u64>().is_ok()),
        "{reloading}"
    );
    assert_eq!(told(), "READY=1\n");
}

/// Needs root, to mount a small file system.
#[test]
fn a_full_disk_loses_nothing() {
    let dir = short_dir();
    fs::create_dir(dir.path().join("disks")).unwrap();
    let mount = |args: &[&str]| {
        let status = Command::new(args[0]).args(&args[1..]).status();
        assert!(status.unwrap().success(), "{args:?}");
    };
    let path = as_arg(&dir.path().join("disks"));
    mount(&["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", &path]);
    let served = start(dir, "");
    add(&served, "a", &["--filter", "delay:read=1ms"]);
    let before = fs::read(served.path("disks/a.toml")).unwrap();
    let full = fs::write(served.path("disks/filler"), vec![1; 1 << 20]);
    assert!(full.is_err(), "the file system is full");
    let args = ["disk", "add", "--server", &served.api(), "b", "null:1M"];
    refused(
        1,
        &args,
        &["b.toml: cannot write the file", "no space left"],
    );
    let set = [
        "disk",
        "set",
        &served.api(),
        "--disk",
        "a",
        "delay",
        "read=9ms",
    ];
    refused(1, &set, &["until the server restarts", "no space left"]);
    // The same change again is not mistaken for one that was written.
    refused(1, &set, &["until the server restarts", "no space left"]);
    assert_eq!(disks(&served), [seen("a", true, "delay:read=9ms")]);
    assert_eq!(fs::read(served.path("disks/a.toml")).unwrap(), before);
    // The disk that was refused can be added once there is space again.
    fs::remove_file(served.path("disks/filler")).unwrap();
    add(&served, "b", &[]);
    let mut served = again(served, "KILL", "");
    let kept = [seen("a", true, "delay:read=1ms"), seen("b", true, "")];
    assert_eq!(disks(&served), kept);
    // A change that could not be written is written when it is repeated.
    fs::write(served.path("disks/filler"), vec![1; 1 << 20]).unwrap_err();
    let set = [
        "disk",
        "set",
        &served.api(),
        "--disk",
        "a",
        "delay",
        "read=9ms",
    ];
    refused(1, &set, &["no space left"]);
    fs::remove_file(served.path("disks/filler")).unwrap();
    stdout_of(&set);
    served = again(served, "KILL", "");
    assert_eq!(disks(&served)[0], seen("a", true, "delay:read=9ms"));
    let dir = served.path("disks");
    drop(served);
    mount(&["umount", "--lazy", &as_arg(&dir)]);
}

/// A server that is killed at any time keeps the changes that it has acknowledged. The server keeps
/// the change in flight as a whole, or not at all.
#[test]
fn a_crash_leaves_each_disk_as_it_was_or_as_it_was_to_be() {
    let mut served = start(short_dir(), "");
    add(&served, "a", &["--filter", "delay:read=0us"]);
    let (mut answered, mut asked) = (0, 0);
    for round in 0..40u64 {
        let (pid, api) = (served.child.id(), served.api());
        let killer = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_micros(1500 * (round % 20)));
            send_to("KILL", pid);
        });
        // Sends changes as fast as possible, until the server is killed.
        let client = fathom_client::Client::connect(Path::new(&api)).unwrap();
        loop {
            asked += 1;
            let options = serde_json::json!({ "read": format!("{asked}us") });
            let place = ["v1", "disks", "a", "filters", "delay"];
            if client.patch(&place).json(&options).send::<Value>().is_err() {
                break;
            }
            answered = asked;
        }
        killer.join().unwrap();
        served = again(served, "KILL", "");
        let [(_, true, filters)] = &disks(&served)[..] else {
            panic!("{:?}", disks(&served));
        };
        let is = filters
            .trim_start_matches("delay:read=")
            .trim_end_matches("us");
        let is: u64 = is.parse().unwrap_or_else(|_| panic!("{filters}"));
        assert!(
            is == answered || is == asked,
            "{is}, not {answered} or {asked}"
        );
        (answered, asked) = (is, asked);
        let names = fs::read_dir(served.path("disks")).unwrap();
        assert_eq!(names.count(), 1, "leftovers");
    }
    assert!(asked > 50, "it was killed too soon");
}

fn send_to(signal: &str, pid: u32) {
    let status = Command::new("kill")
        .args(["-s", signal, &pid.to_string()])
        .status();
    assert!(status.unwrap().success());
}

/// A guest may write data to its raw disk that looks like an image. For example, it writes a LUKS
/// header if it encrypts the whole disk.
#[test]
fn a_raw_disk_stays_raw_whatever_its_guest_writes_to_it() {
    let served = start(short_dir(), "");
    let image = served.arg("image");
    fs::write(&image, vec![0; 1 << 20]).unwrap();
    stdout_of(&["disk", "add", "--server", &served.api(), "raw", &image]);
    let definition = fs::read_to_string(served.path("disks/raw.toml")).unwrap();
    assert!(definition.contains("format = \"raw\""), "{definition}");

    let container = served.arg("container");
    let mut served = served;
    for (start, signal) in [
        (b"LUKS\xba\xbe\0\x02", "TERM"),
        (b"QFI\xfb\0\0\0\x03", "KILL"),
    ] {
        fs::write(&container, start.repeat(64)).unwrap();
        let uri = format!("nbd+unix:///raw?socket={}", served.arg("n"));
        let copied = Command::new("nbdcopy").args([&container, &uri]).status();
        assert!(copied.unwrap().success());
        served = again(served, signal, "");
        assert_eq!(disks(&served), [seen("raw", true, "")]);
        // A request describes the same disk whether it names the format or not.
        for format in ["", r#", "format": "raw""#] {
            let output = Command::new("curl")
                .args(["--silent", "--show-error", "--fail-with-body"])
                .args(["--unix-socket", &served.api(), "-X", "PUT", "-d"])
                .arg(format!(r#"{{"image": "{image}"{format}}}"#))
                .arg("http://fathom/v1/disks/raw")
                .output();
            let output = output.unwrap();
            assert!(output.status.success(), "{output:?}");
        }
        let written = fs::read_to_string(served.path("disks/raw.toml")).unwrap();
        assert_eq!(written, definition);
    }
}
