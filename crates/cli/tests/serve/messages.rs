//! Checks that errors say what failed, name the object as users know it, and say what to do.

use crate::support::{Served, as_arg, fathom, refused, short_dir};
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::process::Command;

const NOBODY: u32 = 65534;

/// Runs the program as a user without privileges, with a copy that this user can execute.
fn refused_as_nobody(copy: &str, args: &[&str], words: &[&str]) {
    let mut copying = Command::new("cp");
    copying.arg(env!("CARGO_BIN_EXE_fathom")).arg(copy);
    assert!(copying.status().unwrap().success());
    let mut command = Command::new(copy);
    let output = command.args(args).uid(NOBODY).gid(NOBODY).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{args:?}");
    assert!(words.iter().all(|word| said.contains(word)), "{said}");
    assert!(!said.contains("os error"), "{said}");
}

#[test]
fn missing_image_is_reported_with_what_to_do() {
    let dir = short_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let socket = path("s");
    let missing = path("nope.img");
    let create = "nope.img: no such file; create an image with 'fathom img create'";
    refused(1, &["serve", &missing, "--vhost-user", &socket], &[create]);
    refused(1, &["img", "info", &missing], &["nope.img: no such file"]);
    let deeper = path("no/dir/nope.img");
    refused(
        1,
        &["img", "info", &deeper],
        &["no such directory: ", "/no"],
    );
    let config = format!(
        "api = {{ socket = '{}' }}\n\n[[disk]]\nname = 'vm1'\nimage = '{missing}'\nvhost-user = '{socket}'\n",
        path("c")
    );
    fs::write(path("disks.toml"), config).unwrap();
    // A server with a configuration starts, and tries again to open the disk.
    let config = path("disks.toml");
    let mut command = fathom();
    command.args(["serve", "--config", &config]);
    let mut served = Served::spawn(command, dir);
    served.wait_for("no disk is served yet");
    for words in ["disk 'vm1': ", create, "(defined in ", "disks.toml:3)"] {
        assert!(served.log().contains(words), "{}", served.log());
    }
}

#[test]
fn image_without_permission_is_not_offered_read_only() {
    let dir = short_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let image = path("disk.img");
    fs::write(&image, vec![0; 1 << 20]).unwrap();
    let (socket, api) = (path("s"), path("c"));
    let serve = ["serve", &image, "--vhost-user", &socket, "--api", &api];
    fs::set_permissions(&image, fs::Permissions::from_mode(0o600)).unwrap();
    let words = [
        "disk.img: no permission to read the file",
        "change its owner",
    ];
    refused_as_nobody(&path("fathom"), &serve, &words);
    fs::set_permissions(&image, fs::Permissions::from_mode(0o644)).unwrap();
    let words = [
        "disk.img: no permission to write: permission denied",
        "--readonly",
    ];
    refused_as_nobody(&path("fathom"), &serve, &words);
}

#[test]
fn process_that_uses_an_address_is_named() {
    let dir = short_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let own = format!("(process {})", std::process::id());
    let _socket = UnixListener::bind(path("s")).unwrap();
    let serve = ["serve", "null:1M", "--vhost-user", &path("s")];
    refused(1, &serve, &["/s: in use by ", &own, "choose another path"]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let nbd = format!("tcp:{address}");
    let serve = ["serve", "null:1M", "--api", &path("c"), "--nbd", &nbd];
    let words = [&*format!("{nbd}: in use by "), &own, "choose another port"];
    refused(1, &serve, &words);
    let http = address.to_string();
    let args = [
        "serve",
        "null:1M",
        "--vhost-user",
        &path("t"),
        "--api",
        &path("c"),
    ];
    let words = [&*format!("--http {http}: in use by "), &own];
    refused(1, &[&args[..], &["--http", &http]].concat(), &words);
}

#[test]
fn port_without_a_host_is_explained() {
    let dir = short_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let words = ["names no host", "write 'tcp::10820'"];
    refused(2, &["serve", "null:1M", "--nbd", "tcp:10820"], &words);
    let args = [
        "serve",
        "null:1M",
        "--vhost-user",
        &path("t"),
        "--api",
        &path("c"),
        "--http",
    ];
    for port in [":9825", "9825"] {
        let words = ["--http", "names no host", "'[::]:9825'", "'127.0.0.1:9825'"];
        refused(1, &[&args[..], &[port]].concat(), &words);
    }
}

#[test]
fn unknown_names_get_the_nearest_one() {
    let dir = short_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let socket = path("x");
    let serve = ["serve", "null:1M", "--vhost-user", &socket, "--filter"];
    let filter = |spec| [&serve[..], &[spec]].concat();
    refused(
        2,
        &filter("throtle"),
        &["unknown filter 'throtle'; did you mean 'throttle'?"],
    );
    let words = [
        "unknown option of filter 'delay': 'raed'; did you mean 'read'?",
        "fathom filters",
    ];
    refused(2, &filter("delay:raed=1ms"), &words);
    let words = ["'paralel'", "did you mean 'parallel'?"];
    refused(2, &["lab", "run", "paralel"], &words);
    fs::write(path("conf"), "[[disk]]\nname = 'a'\nimgae = 'null:1M'\n").unwrap();
    let words = [
        "conf:3: unknown key 'imgae'; did you mean 'image'?",
        "configuration.md",
    ];
    refused(1, &["serve", "--config", &path("conf")], &words);
    let words = ["unknown format 'qcw2'; did you mean 'qcow2'?"];
    refused(
        2,
        &["img", "create", "-f", "qcw2", &path("i"), "1M"],
        &words,
    );
    let words = ["unknown option of qcow2 images: 'clustersize'; did you mean 'cluster_size'?"];
    refused(
        1,
        &[
            "img",
            "create",
            "-f",
            "qcow2",
            "-o",
            "clustersize=64k",
            &path("i"),
            "1M",
        ],
        &words,
    );
}

#[test]
fn unknown_disk_gets_the_nearest_one_and_a_list() {
    let mut command = fathom();
    let dir = short_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let config = format!(
        "api = {{ socket = '{}' }}\n[[disk]]\nname = 'vm1'\nimage = 'null:1M'\nvhost-user = '{}'\n",
        path("c"),
        path("s")
    );
    fs::write(path("conf"), config).unwrap();
    command.args(["serve", "--config", &path("conf")]);
    command.env("XDG_RUNTIME_DIR", dir.path());
    let mut served = Served::spawn(command, dir);
    served.wait_for("the API is at");
    let api = served.api();
    let find = |args: &[&str]| {
        let mut command = fathom();
        command.env("XDG_RUNTIME_DIR", served.path(""));
        let output = command.args(args).output().unwrap();
        String::from_utf8(output.stderr).unwrap()
    };
    let said = find(&["stats", "wm1"]);
    // (Other tests' servers may be listed, too.)
    let words = [
        "no disk or server 'wm1'; did you mean 'vm1'? disks are ",
        "; servers are ",
    ];
    assert!(words.iter().all(|word| said.contains(word)), "{said}");
    let words = ["no disk 'wm1'; did you mean 'vm1'?"];
    refused(1, &["stats", &api, "--disk", "wm1"], &words);
    let add = [
        "disk",
        "add",
        "vm1",
        "null:1M",
        "--vhost-user",
        &served.arg("t"),
    ];
    let words =
        ["a disk named 'vm1' already exists; use 'fathom disk change', or choose another name"];
    refused(1, &[&add[..], &["--server", &api]].concat(), &words);
    let words = ["the disk has no filters", "filters=[\"delay\"]"];
    let set = ["set", &api, "delay", "read=1ms"];
    refused(1, &set, &words);
}

#[test]
fn missing_directory_of_a_new_file_is_named() {
    let dir = short_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let new = path("nodir/x.part");
    let words = [
        "x.part: cannot create the file: no such directory: ",
        "/nodir; create it first",
    ];
    refused(1, &["img", "create", "-q", &new, "1M"], &words);
    fs::write(path("i"), vec![0; 4096]).unwrap();
    refused(1, &["img", "convert", "-q", &path("i"), &new], &words);
    let words = ["formats that can be written are raw, qcow2, qed and luks"];
    for format in ["vmdk", "vhdx", "vdi", "vpc"] {
        let args = ["img", "convert", "-q", "-O", format, &path("i"), &path("o")];
        refused(1, &args, &words);
    }
}
