//! Tests base images on web servers and in S3, as plain files and in archives.

use crate::place::{Host, qemu_io, same};
use crate::support::nbd::Nbd;
use crate::support::s3::S3;
use crate::support::{Kept, eventually, run, stdout_of};
use std::fs::{self, File};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};

/// Starts a web server for this directory; it supports range requests.
fn web(dir: &Path) -> (Kept, String) {
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let python = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../venv/bin/python3");
    let mut server = Command::new(python);
    server.args([
        "-m",
        "RangeHTTPServer",
        "--bind",
        "127.0.0.1",
        &port.to_string(),
    ]);
    let server = Kept::spawn(server.current_dir(dir));
    eventually("it listens", || {
        TcpStream::connect(("127.0.0.1", port)).ok()
    });
    (server, format!("http://127.0.0.1:{port}"))
}

/// Serves a disk on top of the image with this command, and reads the whole image.
fn try_it(host: &Host, fathom: Command, base: &str, format: &str) -> Nbd {
    let disk = host.overlay("disk", base, format);
    let cache = host.arg("cache");
    let args = ["--format", "qcow2", "--base", base, "--base-cache", &cache];
    let disk = Nbd::start_by(fathom, &disk, &args);
    same(&disk.uri(), &host.arg("base.raw"));
    disk
}

#[test]
fn an_image_comes_from_a_bucket_and_from_an_archive_there() {
    let host = Host::new();
    let s3 = S3::start(&[]);
    s3.curl(&["-T", &host.arg("base.raw")], "bucket/base.raw");
    let disk = try_it(&host, s3.fathom(), "s3://bucket/base.raw", "raw");
    drop(disk);
    let archive = ["img", "archive", "-q", "-f", "raw", "--stripe-size", "1M"];
    let mut archive_it = s3.fathom();
    archive_it
        .args(archive)
        .args([&host.arg("base.raw"), "s3://bucket/archive", "base"]);
    assert!(archive_it.status().unwrap().success());
    let manifest = "s3://bucket/archive/images/base.manifest";
    let disk = try_it(&host, s3.fathom(), manifest, "raw");
    // All data is cached, so the source is no longer needed.
    drop(s3);
    same(&disk.uri(), &host.arg("base.raw"));
    assert!(!disk.log().contains("ERROR"), "{}", disk.log());
}

#[test]
fn an_image_comes_from_a_web_server_until_it_is_another_one() {
    let host = Host::new();
    let www = host.path("www");
    fs::create_dir(&www).unwrap();
    let image = www.join("base.qcow2");
    let convert = ["convert", "-O", "qcow2", &host.arg("base.raw")];
    assert!(
        Command::new("qemu-img")
            .args(convert)
            .arg(&image)
            .status()
            .unwrap()
            .success()
    );
    let (_server, url) = web(&www);
    let url = format!("{url}/base.qcow2");
    let disk = host.overlay("disk", &url, "qcow2");
    let more = ["--base-fetch", "off", "--server-reconnect", "1s"];
    let disk = host.serve(&disk, &url, &more);
    assert!(qemu_io(&disk.uri(), "read 0 1M"));
    // The new image has the same size; only the server's metadata shows the change.
    let modified = File::options().write(true).open(&image).unwrap();
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(10);
    modified.set_modified(later).unwrap();
    assert!(!qemu_io(&disk.uri(), "read 40M 4k"));
    assert!(qemu_io(&disk.uri(), "read 0 1M"));
    assert!(disk.log().contains("changed since"), "{}", disk.log());
    // The keeper still detects the change after the cached data was removed.
    drop(disk);
    eventually("the keeper's end", || {
        host.keepers().is_empty().then_some(())
    });
    let place = host.listed()["directory"].as_str().unwrap().to_owned();
    for name in ["data", "live", "durable"] {
        fs::remove_file(Path::new(&place).join(name)).unwrap();
    }
    let (disk, cache) = (host.arg("disk"), host.arg("cache"));
    let nbd = format!("unix:{}", host.arg("n"));
    let args = ["serve", &disk, "--format", "qcow2", "--base", &url];
    let args = [&args, &["--base-cache", &cache, "--nbd", &nbd][..], &more].concat();
    let output = run(&args);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && said.contains("the image was replaced since"),
        "{said}"
    );
}

/// A signed address gives anybody access to the image.
#[test]
fn signature_in_an_address_is_shown_nowhere() {
    const SECRET: &str = "s3cr3t";
    let host = Host::new();
    let (server, url) = web(host.dir.path());
    let url = format!("{url}/base.raw?signature={SECRET}");
    let hides = |what: &str, text: &str| {
        assert!(!text.contains(SECRET), "{what}: {text}");
        assert!(text.contains("base.raw?***"), "{what}: {text}");
    };
    let more = ["--base-fetch", "off", "--server-reconnect", "1s"];
    let disk = host.serve(&host.overlay("disk", &url, "raw"), &url, &more);
    assert!(qemu_io(&disk.uri(), "read 0 1M"));
    let cache = host.arg("cache");
    let direct = [
        &format!("cached:{url}"),
        "--readonly",
        "--base-cache",
        &cache,
    ]
    .map(String::from);
    let args: Vec<&str> = direct[1..].iter().map(String::as_str).collect();
    let direct = Nbd::start(&direct[0], &[&args, &more[..]].concat());
    assert!(qemu_io(&direct.uri(), "read 0 1M"));
    hides("info", &stdout_of(&["info", &direct.api(), "--json"]));
    hides(
        "list",
        &stdout_of(&["base", "list", "--base-cache", &cache]),
    );
    hides(
        "list",
        &stdout_of(&["base", "list", "--json", "--base-cache", &cache]),
    );
    drop(server);
    assert!(!qemu_io(&direct.uri(), "read 40M 4k"));
    assert!(!qemu_io(&disk.uri(), "read 40M 4k"));
    hides("log", &direct.log());
    hides("log", &disk.log());
    let nbd = format!("unix:{}", host.arg("n"));
    let other = format!("{url}&more={SECRET}");
    let args = ["serve", &format!("cached:{other}"), "--readonly"].map(String::from);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let output = run(&[&args[..], &["--base-cache", &cache, "--nbd", &nbd]].concat());
    assert!(!output.status.success());
    hides("error", &String::from_utf8_lossy(&output.stderr));
}

/// An archive in a directory, all of whose stripes are damaged.
#[test]
fn stripes_that_are_damaged_never_reach_a_guest() {
    let host = Host::new();
    let archive = host.arg("archive");
    stdout_of(&[
        "img",
        "archive",
        "-q",
        "-f",
        "raw",
        &host.arg("base.raw"),
        &archive,
        "base",
    ]);
    let base = format!("{archive}/images/base.manifest");
    let disk = host.overlay("disk", &base, "raw");
    let find = |script: &str| {
        let mut find = Command::new("sh");
        find.args(["-ec", script])
            .current_dir(&archive)
            .stdin(Stdio::null());
        assert!(find.status().unwrap().success());
    };
    // Every second stripe is truncated; each of the others has one changed byte.
    find(
        "n=0; for f in stripes/*/*; do n=$((n + 1)); cp \"$f\" \"$f.kept\"
         if [ $((n % 2)) = 0 ]; then truncate -s -1 \"$f\"
         else printf X | dd of=\"$f\" bs=1 seek=5000 conv=notrunc 2>/dev/null; fi; done",
    );
    let more = ["--base-fetch", "off", "--server-reconnect", "1s"];
    let disk = host.serve(&disk, &base, &more);
    for at in [0, 1, 25, 47] {
        assert!(!qemu_io(&disk.uri(), &format!("read {at}M 4k")));
    }
    // Zeroes need no stripe.
    assert!(qemu_io(&disk.uri(), "read -P 0 17M 1M"));
    assert!(
        disk.log().contains("damaged, so not used"),
        "{}",
        disk.log()
    );
    find("for f in stripes/*/*.kept; do mv \"$f\" \"${f%.kept}\"; done");
    same(&disk.uri(), &host.arg("base.raw"));
}
