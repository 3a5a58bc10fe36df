//! Tests disks whose base image cannot be reached or has been replaced.

use crate::place::{Host, STRIPE, Source, qemu_io, same};
use crate::support::{eventually, refused, stdout_of};
use std::fs;
use std::os::unix::fs::FileExt;

#[test]
fn what_is_cached_is_served_while_the_source_is_away() {
    let host = Host::new();
    let source = Source::start(&host, &host.path("base.raw"), 1);
    let uri = source.uri();
    let more = ["--base-fetch", "off", "--server-reconnect", "2s"];
    let disk = host.serve(&host.overlay("disk", &uri, "raw"), &uri, &more);
    assert!(qemu_io(&disk.uri(), "read 0 1M"));
    drop(source);
    assert!(qemu_io(&disk.uri(), "read 0 1M"));
    // A read of data that is not cached waits, then fails.
    assert!(!qemu_io(&disk.uri(), "read 40M 4k"));
    let log = disk.log();
    assert!(log.contains("cached data is served"), "{log}");
    assert!(qemu_io(&disk.uri(), "read 0 1M"));
    // A server that starts meanwhile serves the cached data as well.
    let other = host.serve(&host.overlay("other", &uri, "raw"), &uri, &more);
    assert!(qemu_io(&other.uri(), "read 0 1M"));
    host.kill_keepers();
    assert!(qemu_io(&other.uri(), "read 0 1M"));
    let source = Source::start(&host, &host.path("base.raw"), 1);
    eventually("it comes", || {
        qemu_io(&disk.uri(), "read 40M 4k").then_some(())
    });
    for disk in [&disk, &other] {
        same(&disk.uri(), &host.arg("base.raw"));
    }
    drop(source);
}

/// Requests wait while the source is away and complete when it returns.
#[test]
fn requests_wait_for_a_source_that_comes_back() {
    let host = Host::new();
    let source = Source::start(&host, &host.path("base.raw"), 1);
    let uri = source.uri();
    let disk = host.serve(
        &host.overlay("disk", &uri, "raw"),
        &uri,
        &["--base-fetch", "off"],
    );
    drop(source);
    std::thread::scope(|scope| {
        let compared = scope.spawn(|| same(&disk.uri(), &host.arg("base.raw")));
        eventually("it is told", || {
            disk.log().contains("the server retries").then_some(())
        });
        let _source = Source::start(&host, &host.path("base.raw"), 1);
        compared.join().unwrap();
    });
    assert!(disk.log().contains("reachable again"));
}

#[test]
fn another_image_in_its_place_is_refused() {
    let host = Host::new();
    let source = Source::start(&host, &host.path("base.raw"), 0);
    let uri = source.uri();
    let image = host.overlay("disk", &uri, "raw");
    let disk = host.serve(&image, &uri, &["--base-fetch", "off"]);
    assert!(qemu_io(&disk.uri(), "read 0 1M"));
    drop(disk);
    drop(source);
    let base = fs::File::options()
        .write(true)
        .open(host.path("base.raw"))
        .unwrap();
    base.set_len(44 << 20).unwrap();
    eventually("the keeper's end", || {
        host.keepers().is_empty().then_some(())
    });
    let _source = Source::start(&host, &host.path("base.raw"), 0);
    let disk = host.serve(
        &image,
        &uri,
        &["--base-fetch", "off", "--server-reconnect", "1s"],
    );
    assert!(!qemu_io(&disk.uri(), "read 40M 4k"));
    let log = disk.log();
    assert!(
        log.contains("the image was replaced") && log.contains("fathom base remove"),
        "{log}"
    );
}

/// Data that does not match the manifest never reaches a guest.
#[test]
fn what_comes_is_checked_by_a_manifest() {
    let host = Host::new();
    let manifest = host.arg("base.manifest");
    stdout_of(&["img", "manifest", "-q", &host.arg("base.raw"), &manifest]);
    let changed = host.path("changed.raw");
    fs::copy(host.path("base.raw"), &changed).unwrap();
    let file = fs::File::options().write(true).open(&changed).unwrap();
    file.write_all_at(&[1], 7 << 20 | 77).unwrap();
    let source = Source::start(&host, &changed, 0);
    let uri = source.uri();
    let more = ["--base-manifest", &manifest];
    let disk = host.serve(&host.overlay("disk", &uri, "raw"), &uri, &more);
    assert!(qemu_io(&disk.uri(), "read 6M 1M"));
    assert!(!qemu_io(&disk.uri(), "read 7M 4k"));
    assert!(
        disk.log().contains("does not match --base-manifest"),
        "{}",
        disk.log()
    );
    // The stripe is fetched again when it is requested again.
    let original = fs::File::open(host.path("base.raw")).unwrap();
    let mut bytes = vec![0; STRIPE as usize];
    original.read_exact_at(&mut bytes, 7 << 20).unwrap();
    file.write_all_at(&bytes, 7 << 20).unwrap();
    same(&disk.uri(), &host.arg("base.raw"));
}

/// Data that was cached before a manifest was given has not been checked.
#[test]
fn a_cache_that_was_not_checked_is_refused_with_a_manifest() {
    let host = Host::new();
    let manifest = host.arg("base.manifest");
    stdout_of(&["img", "manifest", "-q", &host.arg("base.raw"), &manifest]);
    let base = host.arg("base.raw");
    let image = host.overlay("disk", &base, "raw");
    let disk = host.serve(&image, &base, &[]);
    same(&disk.uri(), &base);
    drop(disk);
    eventually("the keeper's end", || {
        host.keepers().is_empty().then_some(())
    });
    let (cache, nbd) = (host.arg("cache"), format!("unix:{}", host.arg("n")));
    let args = ["serve", &image, "--format", "qcow2", "--base", &base];
    let more = ["--base-cache", &cache, "--base-manifest", &manifest];
    let args = [&args, &more[..], &["--nbd", &nbd]].concat();
    refused(1, &args, &["was not checked by this --base-manifest"]);
    host.kill_keepers();
    stdout_of(&["base", "remove", &base, "--base-cache", &cache]);
    let disk = host.serve(&image, &base, &["--base-manifest", &manifest]);
    same(&disk.uri(), &base);
}

/// A keeper started by another disk does not check data against this disk's manifest.
#[test]
fn keeper_without_a_manifest_is_refused_by_a_disk_with_one() {
    let host = Host::new();
    let manifest = host.arg("base.manifest");
    stdout_of(&["img", "manifest", "-q", &host.arg("base.raw"), &manifest]);
    let base = host.arg("base.raw");
    let first = host.serve(&host.overlay("first", &base, "raw"), &base, &[]);
    assert!(qemu_io(&first.uri(), "read 0 1M"));
    let (cache, nbd) = (host.arg("cache"), format!("unix:{}", host.arg("n")));
    let second = host.overlay("second", &base, "raw");
    let args = ["serve", &second, "--format", "qcow2", "--base", &base];
    let more = ["--base-cache", &cache, "--base-manifest", &manifest];
    let args = [&args, &more[..], &["--nbd", &nbd]].concat();
    refused(
        1,
        &args,
        &[
            "does not use this --base-manifest",
            "the same --base-manifest",
        ],
    );
    assert!(qemu_io(&first.uri(), "read 1M 1M"));
    drop(first);
    host.kill_keepers();
    stdout_of(&["base", "remove", &base, "--base-cache", &cache]);
    // The keeper also checks what it fetches for disks that name no manifest.
    let more = ["--base-manifest", &manifest];
    let second = host.serve(&second, &base, &more);
    let third = host.serve(&host.overlay("third", &base, "raw"), &base, &more);
    let fourth = host.serve(&host.overlay("fourth", &base, "raw"), &base, &[]);
    for disk in [&second, &third, &fourth] {
        same(&disk.uri(), &base);
    }
}

/// The missing part of an image that is being rewritten must not read as zeroes.
#[test]
fn an_image_that_becomes_shorter_is_away_there() {
    let host = Host::new();
    let base = host.arg("base.raw");
    let more = ["--base-fetch", "off", "--server-reconnect", "1s"];
    let disk = host.serve(&host.overlay("disk", &base, "raw"), &base, &more);
    assert!(qemu_io(&disk.uri(), "read 0 64k"));
    let kept = fs::read(&base).unwrap();
    let file = fs::File::options().write(true).open(&base).unwrap();
    file.set_len(8 << 20).unwrap();
    assert!(!qemu_io(&disk.uri(), "read 40M 4k"));
    assert!(!qemu_io(&disk.uri(), "read 17M 4k"));
    fs::write(&base, kept).unwrap();
    eventually("it comes", || {
        qemu_io(&disk.uri(), "read 40M 4k").then_some(())
    });
    same(&disk.uri(), &base);
}

/// The file system of the cache has no space until it is enlarged.
#[test]
fn a_full_disk_makes_requests_wait() {
    let host = Host::new();
    let source = Source::start(&host, &host.path("base.raw"), 0);
    let (uri, image) = (source.uri(), host.overlay("disk", &source.uri(), "raw"));
    fs::create_dir(host.path("cache")).unwrap();
    let cache = host.arg("cache");
    let mount = |args: &[&str]| {
        let status = std::process::Command::new("mount")
            .args(args)
            .status()
            .unwrap();
        assert!(status.success(), "the test needs root: {args:?}");
    };
    mount(&["-t", "tmpfs", "-o", "size=16M", "tmpfs", &cache]);
    let disk = host.serve(&image, &uri, &["--base-fetch", "off"]);
    // The keeper drops cached data to make room for the data that is requested.
    same(&disk.uri(), &host.arg("base.raw"));
    mount(&["-o", "remount,size=64M", &cache]);
    same(&disk.uri(), &host.arg("base.raw"));
    drop(disk);
    host.kill_keepers();
    eventually("it is let go of", || {
        let status = std::process::Command::new("umount")
            .arg(&cache)
            .status()
            .unwrap();
        status.success().then_some(())
    });
}

#[test]
fn what_cannot_be_had_is_told_at_once() {
    let host = Host::new();
    let cache = host.arg("cache");
    let refuse = |base: &str, more: &[&str], words: &[&str]| {
        let image = host.overlay("disk", base, "raw");
        let address = format!("unix:{}", host.arg("n"));
        let args = ["serve", &image, "--format", "qcow2", "--base", base];
        let args = [
            &args,
            &["--base-cache", &cache, "--nbd", &address][..],
            more,
        ]
        .concat();
        refused(1, &args, words);
        host.kill_keepers();
    };
    refuse(
        "nbd+unix:///?socket=/nonexistent/s",
        &[],
        &["cannot connect"],
    );
    refuse("http://127.0.0.1:9/x", &[], &["http://127.0.0.1:9/x"]);
    refuse("/nonexistent/image", &[], &["/nonexistent/image"]);
    refuse("ftp://x/y", &[], &["ftp"]);
    refuse("memory:1M", &[], &["must be remote"]);
    refuse(
        "/nonexistent/images/x.manifest",
        &[],
        &["/nonexistent/images/x.manifest"],
    );
    let base = host.arg("base.raw");
    refuse(
        &base,
        &["--base-manifest", "/nonexistent/m"],
        &["/nonexistent/m"],
    );
    // The cache directory cannot be created.
    host.kill_keepers();
    fs::remove_dir_all(host.path("cache")).unwrap();
    fs::write(host.path("cache"), "").unwrap();
    refuse(&base, &[], &["cache"]);
}
