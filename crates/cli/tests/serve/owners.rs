//! Checks the owners of disks' names: the configuration, a file in disks-dir, or the API.

use crate::keep::{add, again, disks, seen, start};
use crate::kinds::qemu_img;
use crate::support::{
    Served, as_arg, disk_dir, eventually, fathom, refused, run, short_dir, stdout_of,
};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Command;

fn static_disk(name: &str, image: &str, more: &str) -> String {
    format!("[[disk]]\nname = '{name}'\nimage = '{image}'\n{more}\n")
}

fn shown(served: &Served, name: &str) -> Value {
    let client = fathom_client::Client::connect(Path::new(&served.api())).unwrap();
    client.get(&["v1", "disks", name]).send().unwrap()
}

fn put(served: &Served, name: &str, options: &Value) -> Value {
    let client = fathom_client::Client::connect(Path::new(&served.api())).unwrap();
    let put = client.put(&["v1", "disks", name]).json(options);
    put.patiently().send().unwrap()
}

/// Runs a command that must succeed; returns what it printed on standard error.
fn stderr_of(args: &[&str]) -> String {
    let output = run(args);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{args:?}: {stderr}");
    stderr
}

/// Writes `more` to the configuration, and makes the server reload it.
fn reload(served: &Served, more: &str) {
    let conf = fs::read_to_string(served.path("conf")).unwrap();
    let head = conf.split("[[disk]]").next().unwrap();
    fs::write(served.path("conf"), format!("{head}{more}")).unwrap();
    let words = "configuration: reloaded";
    let before = served.log().matches(words).count();
    let pid = shown_pid(served).to_string();
    let kill = Command::new("kill").args(["-s", "HUP", &pid]).status();
    assert!(kill.unwrap().success());
    eventually("a reload", || {
        (served.log().matches(words).count() > before).then_some(())
    });
}

/// Returns the process id of the server, which may be a successor.
fn shown_pid(served: &Served) -> u64 {
    let client = fathom_client::Client::connect(Path::new(&served.api())).unwrap();
    let server: Value = client.get(&["v1", "server"]).send().unwrap();
    server["pid"].as_u64().unwrap()
}

fn names(served: &Served) -> Vec<String> {
    disks(served).into_iter().map(|one| one.0).collect()
}

fn files(served: &Served) -> usize {
    fs::read_dir(served.path("disks")).unwrap().count()
}

#[test]
fn static_disk_is_changed_until_the_restart_only() {
    let listed = static_disk("listed", "null:1M", "filters = ['delay:read=1us']")
        + &static_disk("other", "null:1M", "");
    let served = start(short_dir(), &listed);
    add(&served, "kept", &[]);
    add(&served, "now", &["--transient"]);
    let owners = [
        ("listed", "static"),
        ("kept", "persistent"),
        ("now", "transient"),
    ];
    for (name, owner) in owners {
        assert_eq!(shown(&served, name)["owner"], owner, "{name}");
        let info = stdout_of(&["info", &served.api(), "--disk", name]);
        assert!(info.contains(&format!("owner:      {owner}")), "{info}");
    }
    let api = served.api();
    let of = |name: &'static str| [&*api, "--disk", name];
    let says = |args: &[&str], lasts: bool| {
        let said = stderr_of(args).contains("until the server restarts");
        assert_eq!(said, lasts, "{args:?}");
    };
    says(
        &[&["disk", "change"], &of("listed")[..], &["cache=writeback"]].concat(),
        true,
    );
    says(
        &[&["disk", "set"], &of("listed")[..], &["delay", "read=9us"]].concat(),
        true,
    );
    says(
        &[&["disk", "resize"], &of("listed")[..], &["2M"]].concat(),
        true,
    );
    says(&[&["disk", "remove"], &of("other")[..]].concat(), true);
    says(
        &[&["disk", "change"], &of("kept")[..], &["cache=writeback"]].concat(),
        false,
    );
    assert_eq!(files(&served), 1, "a static disk has no file");
    let options = &shown(&served, "listed")["options"];
    assert_eq!(options["filters"], json!(["delay:read=9us"]));
    assert_eq!(
        (&options["cache"], &options["image"]),
        (&json!("writeback"), &json!("null:2097152"))
    );
    // A static disk that was removed and added again is still static.
    add(&served, "other", &["--filter", "delay"]);
    assert_eq!(shown(&served, "other")["owner"], "static");
    assert_eq!(files(&served), 1);
    let served = again(served, "TERM", &listed);
    let now = [
        seen("kept", true, ""),
        seen("listed", true, "delay:read=1us"),
        seen("other", true, ""),
    ];
    assert_eq!(disks(&served), now);
    assert_eq!(shown(&served, "listed")["options"]["cache"], Value::Null);
    assert_eq!(shown(&served, "kept")["options"]["cache"], "writeback");
}

#[test]
fn put_of_a_static_disk_keeps_options_that_it_does_not_name() {
    let pool = "[pool.p]\nthreads = 1\n";
    let listed = static_disk("a", "null:1M", "pool = 'p'\nexport-description = 'x'");
    let served = start(short_dir(), &(pool.to_owned() + &listed));
    let disk = put(
        &served,
        "a",
        &json!({ "image": "null:1M", "readonly": true }),
    );
    assert_eq!(disk["options"]["pool"], "p", "{disk}");
    assert_eq!(disk["options"]["readonly"], true);
    // Options that the request names with null or a default get their default.
    let named = json!({ "image": "null:1M", "pool": null, "readonly": false });
    let disk = put(&served, "a", &named);
    let now = json!({ "name": "a", "image": "null:1048576", "export-description": "x" });
    assert_eq!(disk["options"], now);
    let api = served.api();
    stderr_of(&[
        "disk",
        "change",
        &api,
        "--disk",
        "a",
        "export-description=",
        "pool=p",
    ]);
    let options = &shown(&served, "a")["options"];
    let now = json!({ "name": "a", "image": "null:1048576", "pool": "p" });
    assert_eq!(*options, now);
    // Options of other disks get their default if the request does not name them.
    add(&served, "b", &["--readonly"]);
    let disk = put(&served, "b", &json!({ "image": "null:1M" }));
    assert_eq!(
        disk["options"],
        json!({ "name": "b", "image": "null:1048576" })
    );
}

#[test]
fn static_disk_is_not_switched_to_an_image_a_restart_undoes() {
    let images = disk_dir();
    let path = |name: &str| as_arg(&images.path().join(name));
    fs::write(path("root"), vec![1; 1 << 20]).unwrap();
    let listed = static_disk("a", &path("root"), "");
    let served = start(short_dir(), &listed);
    let api = served.api();
    let snapshot = ["snapshot", &*api, "--disk", "a", &path("top")];
    refused(1, &snapshot, &["--transient"]);
    stderr_of(&["disk", "change", &api, "--disk", "a", "cache=writethrough"]);
    refused(1, &snapshot, &["--transient"]);
    assert_eq!(files(&served), 0);
    stderr_of(&[&snapshot[..], &["--transient"]].concat());
    assert_eq!(files(&served), 0);
    let top = json!(path("top"));
    assert_eq!(shown(&served, "a")["options"]["image"], top);
    // A reload does not bring the old image back, neither while the disk is served nor later.
    reload(&served, &listed);
    assert_eq!(shown(&served, "a")["options"]["image"], top);
    stderr_of(&["disk", "remove", &api, "--disk", "a"]);
    reload(&served, &listed);
    reload(&served, &static_disk("a", &path("root"), "readonly = true"));
    eventually("an error", || {
        served
            .log()
            .contains("has been switched away from")
            .then_some(())
    });
    assert_eq!(names(&served), [""; 0]);
    // An entry that names the disk's newer image is used.
    let followed = static_disk("a", &path("top"), "format = 'qcow2'");
    reload(&served, &followed);
    eventually("the disk", || (names(&served) == ["a"]).then_some(()));
}

#[test]
fn reload_changes_only_what_has_changed_in_the_configuration() {
    let one = |read: &str| static_disk("a", "null:1M", &format!("filters = ['delay:read={read}']"));
    let gone = static_disk("gone", "null:1M", "");
    let mut served = start(short_dir(), &(one("1us") + &gone));
    add(&served, "kept", &["--filter", "delay:read=1us"]);
    add(&served, "away", &[]);
    let api = served.api();
    let change = |args: &[&str]| drop(stderr_of(&[&["disk"], args].concat()));
    change(&["set", &api, "--disk", "a", "delay", "read=2us"]);
    change(&[
        "set",
        &api,
        "--disk",
        "kept",
        "delay",
        "read=2us",
        "--transient",
    ]);
    change(&["remove", &api, "--disk", "gone"]);
    change(&["remove", &api, "--disk", "away", "--transient"]);
    let now = [
        seen("a", true, "delay:read=2us"),
        seen("kept", true, "delay:read=2us"),
    ];
    reload(&served, &(one("1us") + &gone));
    assert_eq!(disks(&served), now);
    // A successor knows about these changes, too.
    served.upgrade();
    reload(&served, &(one("1us") + &gone));
    assert_eq!(disks(&served), now);
    // A change of the configuration, or of a file, takes effect.
    let text = "image = 'null:1M'\nnbd = true\n";
    fs::write(served.path("disks/away.toml"), text).unwrap();
    reload(&served, &(one("3us") + &static_disk("gone", "null:2M", "")));
    let then = [
        seen("a", true, "delay:read=3us"),
        seen("away", true, ""),
        seen("gone", true, ""),
        seen("kept", true, "delay:read=2us"),
    ];
    eventually("the changes", || (disks(&served) == then).then_some(()));
    served.wait_for("serving null");
}

#[test]
fn name_has_one_owner() {
    let listed = |image: &str| static_disk("a", image, "");
    let served = start(short_dir(), &static_disk("b", "null:1M", ""));
    add(&served, "a", &["--filter", "delay:read=1us"]);
    add(&served, "now", &["--transient"]);
    // A reload does not change the owner of a name.
    let both =
        listed("null:1M") + &static_disk("b", "null:1M", "") + &static_disk("now", "null:1M", "");
    fs::write(served.path("disks/b.toml"), "image = 'null:2M'\n").unwrap();
    reload(&served, &both);
    let now = [
        seen("a", true, "delay:read=1us"),
        seen("b", true, ""),
        seen("now", false, ""),
    ];
    for words in [
        "a.toml, so the entry in the configuration is ignored",
        "defined by the configuration, so ",
        "added by the API",
    ] {
        assert!(served.log().contains(words), "{words}: {}", served.log());
    }
    assert_eq!(disks(&served), now);
    let owners = ["persistent", "static", "transient"];
    for (name, owner) in ["a", "b", "now"].into_iter().zip(owners) {
        assert_eq!(shown(&served, name)["owner"], owner, "{name}");
    }
    // At a restart, the server does not know which of two images is newer.
    let mut served = again(served, "TERM", &both);
    assert_eq!(disks(&served), [seen("a", true, ""), seen("now", true, "")]);
    let log = served.log();
    let (error, warning) = (
        "disk 'b': defined by the configuration and by ",
        "disk 'a': defined by the configuration and by ",
    );
    let line = |words: &str| {
        log.lines()
            .find(|line| line.contains(words))
            .unwrap()
            .to_owned()
    };
    assert!(
        line(error).contains("ERROR") && line(error).contains("differ in image"),
        "{log}"
    );
    assert!(line(warning).contains("WARN"), "{log}");
    // No file is lost. The server uses the definition once only one of the two files exists.
    assert_eq!(files(&served), 2);
    fs::remove_file(served.path("disks/b.toml")).unwrap();
    reload(&served, &both);
    served.wait_for("serving null");
    eventually("the disk", || {
        (names(&served) == ["a", "b", "now"]).then_some(())
    });
    assert_eq!(shown(&served, "b")["owner"], "static");
    // An invalid file may name any image, so the server serves no disk of this name.
    fs::write(served.path("disks/b.toml"), "image = \n").unwrap();
    let served = again(served, "TERM", &both);
    assert_eq!(names(&served), ["a", "now"]);
}

#[test]
fn mirrored_persistent_disk_is_unlocked_again_after_a_restart() {
    let images = disk_dir();
    let path = |name: &str| as_arg(&images.path().join(name));
    let content: Vec<u8> = (0..1 << 20).map(|n: u32| (n / 512) as u8).collect();
    fs::write(path("plain"), &content).unwrap();
    fs::write(path("k"), "secret").unwrap();
    fs::write(path("k2"), "another").unwrap();
    let served = start(short_dir(), "");
    let api = served.api();
    stdout_of(&["disk", "add", "--server", &api, "a", &path("plain")]);
    let is_content = |served: &Served| {
        // Deriving its keys may take longer than the server waits for a disk.
        eventually("the disk", || (names(served) == ["a"]).then_some(()));
        let uri = format!("nbd+unix:///a?socket={}", served.arg("n"));
        let compare = ["compare", "-f", "raw", "-F", "raw", &path("plain"), &uri];
        qemu_img(images.path(), &compare);
    };
    let to = |served: &Served, target: &str, more: &[&str]| {
        let api = served.api();
        let start = ["mirror", "start", &api, "--disk", "a", target, "--wait"];
        stdout_of(&[&start, more].concat());
        stdout_of(&["mirror", "complete", &api, "--disk", "a"]);
    };
    // Switches to an encrypted image, to one with another key, and to an encrypted overlay of that
    // one.
    let key = |name: &str| format!("file:{}", path(name));
    to(
        &served,
        &path("luks"),
        &["-O", "luks", "-o", "iter-time=10", "--key", &key("k")],
    );
    let served = again(served, "TERM", "");
    is_content(&served);
    to(
        &served,
        &path("luks2"),
        &["-O", "luks", "-o", "iter-time=10", "--key", &key("k2")],
    );
    stdout_of(&["snapshot", &served.api(), "--disk", "a", &path("top")]);
    let served = again(served, "KILL", "");
    is_content(&served);
    let options = &shown(&served, "a")["options"];
    assert_eq!(options["keys"], json!([key("k2")]));
    assert_eq!(options["image"], json!(path("top")));
}

#[test]
fn name_with_a_leading_dot_is_refused() {
    let served = start(short_dir(), "");
    let api = served.api();
    let args = ["disk", "add", "--server", &*api, ".a", "null:1M"];
    refused(1, &args, &["does not begin with a dot", "'a'"]);
    let output = Command::new("curl")
        .args(["--silent", "--unix-socket", &api, "-X", "PUT", "-d"])
        .args([r#"{"image": "null:1M"}"#, "http://fathom/v1/disks/.a"])
        .output();
    let said = String::from_utf8(output.unwrap().stdout).unwrap();
    assert!(said.contains("does not begin with a dot"), "{said}");
    assert_eq!((names(&served), files(&served)), (vec![], 0));
    // The server reports and keeps such a file of an earlier server.
    fs::write(served.path("disks/.a.toml"), "image = 'null:1M'\n").unwrap();
    let served = again(served, "TERM", "");
    assert!(
        served
            .log()
            .contains(".a.toml: not a disk's name, which does not begin"),
        "{}",
        served.log()
    );
    assert_eq!(files(&served), 1);
    let dir = short_dir();
    let conf = as_arg(&dir.path().join("conf"));
    for (text, words) in [
        (
            static_disk(".a", "null:1M", "vhost-user = '/run/x'"),
            "disk '.a': not a disk's name, which does not begin with a dot",
        ),
        ("[pool.'.p']\nthreads = 1\n".into(), "[pool..p]: "),
        (
            "tenants = true\n[tenant.'.t']\nmemory-max = '1G'\n".into(),
            "[tenant..t]: ",
        ),
    ] {
        fs::write(&conf, &text).unwrap();
        refused(1, &["serve", "--config", &conf], &[words]);
    }
}

#[test]
fn added_disk_is_not_exported_where_nobody_is_authenticated() {
    let served = |listen: &str| {
        let dir = short_dir();
        let conf = dir.path().join("conf");
        let api = as_arg(&dir.path().join("c"));
        let listed = static_disk("listed", "null:1M", "");
        let text = format!("api = {{ socket = '{api}' }}\n[nbd]\nlisten = [{listen}]\n{listed}");
        fs::write(&conf, text).unwrap();
        let mut command = fathom();
        command.args(["serve", "--config"]).arg(conf);
        let mut served = Served::spawn(command, dir);
        served.wait_for("the API is at");
        served
    };
    let exported = |served: &Served, name: &str| !shown(served, name)["state"]["nbd"].is_null();
    let dir = short_dir();
    let unix = format!("'unix:{}'", as_arg(&dir.path().join("n")));
    // The permissions of a Unix socket decide who may connect.
    let closed = served(&unix);
    add(&closed, "a", &[]);
    assert!(exported(&closed, "a"));
    drop(closed);
    let open = served(&format!("{unix}, 'tcp:127.0.0.1:0'"));
    assert!(exported(&open, "listed"));
    let api = open.api();
    let socket = open.arg("s");
    let bare = ["disk", "add", "--server", &*api, "a", "null:1M"];
    refused(
        1,
        &bare,
        &["tcp:127.0.0.1:", "authenticates no client", "--nbd"],
    );
    add(&open, "a", &["--vhost-user", &socket]);
    assert!(!exported(&open, "a"));
    assert!(
        open.log().contains("disk 'a': not exported"),
        "{}",
        open.log()
    );
    // Neither the same request again nor a change of other options changes this.
    let same = json!({ "image": "null:1M", "vhost-user": socket, "readonly": true });
    assert_eq!(put(&open, "a", &same)["options"]["nbd"], false);
    stdout_of(&["disk", "change", &api, "--disk", "a", "readonly=false"]);
    assert!(!exported(&open, "a"));
    add(&open, "b", &["--nbd"]);
    assert!(exported(&open, "b"));
    stdout_of(&["disk", "change", &api, "--disk", "listed", "readonly=true"]);
    assert!(exported(&open, "listed"));
}

/// Returns the disks that are defined but not served.
fn failed(served: &Served) -> Vec<Value> {
    let client = fathom_client::Client::connect(Path::new(&served.api())).unwrap();
    let all: Value = client.get(&["v1", "disks"]).send().unwrap();
    all["failed"].as_array().unwrap().clone()
}

#[test]
fn persistent_disk_that_cannot_be_opened_is_shown_and_retried() {
    let images = disk_dir();
    let image = as_arg(&images.path().join("i"));
    let dir = short_dir();
    fs::create_dir(dir.path().join("disks")).unwrap();
    let definition = format!("image = '{image}'\n");
    fs::write(dir.path().join("disks/a.toml"), &definition).unwrap();
    fs::write(dir.path().join("disks/b.toml"), "image = \n").unwrap();
    let served = start(dir, "");
    let [a, b] = &failed(&served)[..] else {
        panic!("{:?}", failed(&served));
    };
    assert_eq!(
        (&a["name"], &a["owner"]),
        (&json!("a"), &json!("persistent"))
    );
    assert_eq!(
        (&a["retried"], &a["options"]["image"]),
        (&json!(true), &json!(image))
    );
    assert!(
        a["problem"].as_str().unwrap().contains("no such file"),
        "{a}"
    );
    assert_eq!((&b["name"], &b["retried"]), (&json!("b"), &json!(false)));
    assert!(b["problem"].as_str().unwrap().contains("b.toml:1"), "{b}");
    // The command reports the cause. The name stays in use.
    let api = served.api();
    refused(
        1,
        &["show", &api, "--disk", "a"],
        &["'a': not served", "no such file"],
    );
    refused(
        1,
        &["disk", "add", "--server", &api, "a", "null:1M"],
        &["already exists", "no such file"],
    );
    refused(
        1,
        &["disk", "add", "--server", &api, "b", "null:1M"],
        &["b.toml:1"],
    );
    let listed = stderr_of(&["list"]);
    assert!(listed.contains("disk 'a' is not served"), "{listed}");
    assert_eq!(
        fs::read_to_string(served.path("disks/a.toml")).unwrap(),
        definition
    );
    // The server tries again without a request.
    fs::write(&image, vec![0; 1 << 20]).unwrap();
    eventually("the disk", || (names(&served) == ["a"]).then_some(()));
    assert_eq!(failed(&served).len(), 1);
    // A successor knows which disks its predecessor could not open.
    fs::write(served.path("disks/c.toml"), "image = '/none'\n").unwrap();
    reload(&served, "");
    eventually("the failure", || (failed(&served).len() == 2).then_some(()));
    served.upgrade();
    assert!(failed(&served).iter().any(|one| one["name"] == "c"));
    stdout_of(&["disk", "remove", "--server", &api, "c"]);
    assert!(!served.path("disks/c.toml").exists());
}

#[test]
fn failed_static_disk_does_not_affect_other_disks() {
    let images = disk_dir();
    let image = as_arg(&images.path().join("i"));
    let late = static_disk("late", &image, "");
    let served = start(
        short_dir(),
        &format!("{}{late}", static_disk("a", "null:1M", "")),
    );
    assert_eq!(names(&served), ["a"]);
    let [one] = &failed(&served)[..] else {
        panic!("{:?}", failed(&served));
    };
    assert_eq!(
        (&one["name"], &one["owner"], &one["retried"]),
        (&json!("late"), &json!("static"), &json!(true))
    );
    let problem = one["problem"].as_str().unwrap();
    assert!(
        problem.contains("no such file") && problem.contains("conf:"),
        "{one}"
    );
    fs::write(&image, vec![0; 1 << 20]).unwrap();
    eventually("the disk", || (names(&served).len() == 2).then_some(()));
    assert!(failed(&served).is_empty());
    assert_eq!(shown(&served, "late")["owner"], "static");
    // A disk of the command line must open, or the server ends.
    refused(
        1,
        &["serve", "/none", "--vhost-user", &served.arg("t")],
        &["no such file"],
    );
}

#[test]
fn adopted_disk_is_persistent() {
    let listed = static_disk("a", "null:1M", "");
    let served = start(short_dir(), &listed);
    let api = served.api();
    add(&served, "now", &["--transient"]);
    stdout_of(&["disk", "change", "--server", &api, "now", "cache=writeback"]);
    assert_eq!(shown(&served, "now")["owner"], "transient");
    stdout_of(&["disk", "adopt", "--server", &api, "now"]);
    assert_eq!(shown(&served, "now")["owner"], "persistent");
    // The configuration must no longer contain the name.
    stderr_of(&["disk", "change", "--server", &api, "a", "cache=writeback"]);
    let differs = "changed:    cache, until the server restarts";
    assert!(stdout_of(&["show", &api, "--disk", "a"]).contains(differs));
    assert_eq!(shown(&served, "a")["definition"].get("cache"), None);
    refused(
        1,
        &["disk", "adopt", "--server", &api, "a"],
        &["still defined in", "remove it there"],
    );
    let conf = fs::read_to_string(served.path("conf")).unwrap();
    fs::write(served.path("conf"), conf.split("[[disk]]").next().unwrap()).unwrap();
    stdout_of(&["disk", "adopt", "--server", &api, "a"]);
    assert_eq!(shown(&served, "a")["owner"], "persistent");
    reload(&served, "");
    let served = again(served, "TERM", "");
    for name in ["a", "now"] {
        assert_eq!(shown(&served, name)["owner"], "persistent");
        assert_eq!(shown(&served, name)["definition"]["cache"], "writeback");
    }
    refused(
        1,
        &["disk", "adopt", "--server", &served.api(), "none"],
        &["no disk 'none'"],
    );
}
