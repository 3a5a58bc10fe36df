//! Tests what the cache keeps, and that its data is correct.

use crate::place::{Host, SIZE, STRIPE, Source, compare, qemu_io, same, write_both};
use crate::support::{eventually, refused, stdout_of};
use fathom_testing::SetAtEnd;
use std::fs;
use std::process::Command;
use std::time::Duration;

#[test]
fn two_disks_fetch_an_image_once_and_each_has_its_own_changes() {
    let host = Host::new();
    let source = Source::start(&host, &host.path("base.raw"), 2);
    let uri = source.uri();
    let disks = ["a", "b"].map(|name| {
        let image = host.overlay(name, &uri, "raw");
        let reference = host.path(&format!("{name}.raw"));
        fs::copy(host.path("base.raw"), &reference).unwrap();
        (
            host.serve(&image, &uri, &["--base-fetch", "off"]),
            reference,
        )
    });
    for (index, (disk, reference)) in disks.iter().enumerate() {
        // A part of a cluster; the rest of the cluster is read from the base image.
        write_both(
            &disk.uri(),
            reference,
            (5 + index as u64) << 20 | 512,
            70_000,
        );
        write_both(&disk.uri(), reference, 17 << 20, 1 << 20);
    }
    std::thread::scope(|scope| {
        for (disk, reference) in &disks {
            scope.spawn(|| same(&disk.uri(), &reference.display().to_string()));
        }
    });
    let mut reads = source.reads();
    assert_eq!(host.keepers().len(), 1);
    let all = reads.len();
    reads.sort_unstable();
    reads.dedup();
    assert_eq!(reads.len(), all);
    // Stripes that both disks have overwritten are not read.
    assert!(all >= (SIZE / STRIPE) as usize - 4);
    // Zeroes take no space. The file system may need some blocks for its own metadata.
    assert!(host.kept() <= SIZE - (3 << 20), "{}", host.kept());
    // No stripe is fetched twice, and the keeper ends when no disk needs it.
    drop(disks);
    eventually("the keeper's end", || {
        host.keepers().is_empty().then_some(())
    });
    let disk = host.serve(
        &host.overlay("c", &uri, "raw"),
        &uri,
        &["--cache", "writeback"],
    );
    same(&disk.uri(), &host.arg("base.raw"));
    assert!(source.reads().len() <= (SIZE / STRIPE) as usize);
    assert_eq!(host.listed()["in_use"], true);
    let remove = ["base", "remove", &uri, "--base-cache", &host.arg("cache")];
    refused(1, &remove, &["in use by disks"]);
    drop(disk);
    eventually("the keeper's end", || {
        host.keepers().is_empty().then_some(())
    });
    stdout_of(&remove);
    assert!(host.listed().is_null());
    refused(1, &remove, &["not in the cache"]);
}

/// A base image reads like a file with every engine and cache mode and with several threads.
///
/// The base image has a format of its own, and is also served as a disk by itself.
#[test]
fn a_base_is_read_like_a_file() {
    let host = Host::new();
    let image = host.arg("base.qcow2");
    let raw = host.arg("base.raw");
    let made = ["convert", "-O", "qcow2", &raw, &image];
    assert!(
        Command::new("qemu-img")
            .args(made)
            .status()
            .unwrap()
            .success()
    );
    let source = Source::start(&host, image.as_ref(), 0);
    let uri = source.uri();
    let cases: [&[&str]; 5] = [
        &["--aio", "io_uring", "--cache", "none", "--iothreads", "2"],
        &["--aio", "native", "--cache", "none"],
        &["--aio", "threads", "--cache", "writeback"],
        &[
            "--aio",
            "io_uring",
            "--cache",
            "writethrough",
            "--filter",
            "delay:read=1ms",
        ],
        &["--aio", "io_uring", "--base-fetch", "1M"],
    ];
    for (index, case) in cases.iter().enumerate() {
        let disk = host.overlay(&format!("disk{index}"), &uri, "qcow2");
        let served = host.serve(&disk, &uri, case);
        let reference = host.path("reference");
        fs::copy(&raw, &reference).unwrap();
        write_both(&served.uri(), &reference, 3 << 20 | 4096, 4096);
        same(&served.uri(), &host.arg("reference"));
        served.load(300, &["--rw", "randread"]);
        if index % 2 == 0 {
            host.kill_keepers();
            fs::remove_dir_all(host.path("cache")).unwrap();
        }
    }
    let itself = format!("cached:{uri}");
    let cache = host.arg("cache");
    let nbd = format!("unix:{}", host.arg("n"));
    refused(
        1,
        &["serve", &itself, "--nbd", &nbd, "--base-cache", &cache],
        &["--readonly"],
    );
    let args = ["--base-cache", &cache, "--readonly", "--format", "qcow2"];
    same(&crate::support::nbd::Nbd::start(&itself, &args).uri(), &raw);
}

/// A cache with room for only a part of the image.
#[test]
fn what_was_not_used_for_longest_goes_when_there_is_no_room() {
    let host = Host::new();
    let large = host.path("large.raw");
    let file = fs::File::create(&large).unwrap();
    file.set_len(160 << 20).unwrap();
    let base = fs::read(host.path("base.raw")).unwrap();
    for part in 0..3 {
        std::os::unix::fs::FileExt::write_all_at(&file, &base, part * SIZE + part * 512).unwrap();
    }
    let source = Source::start(&host, &large, 1);
    let itself = format!("cached:{}", source.uri());
    let args = [
        "--base-cache",
        &host.arg("cache"),
        "--base-cache-size",
        "64M",
        "--readonly",
    ];
    let disk = crate::support::nbd::Nbd::start(&itself, &args);
    for _ in 0..2 {
        same(&disk.uri(), large.to_str().unwrap());
        assert!(host.kept() <= 64 << 20, "{}", host.kept());
    }
    // Data that is read again and again stays in the cache.
    let first = |reads: Vec<u64>| reads.iter().filter(|&&at| at == 0).count();
    let before = first(source.reads());
    for at in (0..160).step_by(2) {
        assert!(qemu_io(&disk.uri(), "read 0 4k"));
        assert!(qemu_io(&disk.uri(), &format!("read {at}M 64k")));
        // The keeper learns of a read within this time.
        std::thread::sleep(Duration::from_millis(30));
    }
    assert!(first(source.reads()) <= before + 1);
}

/// Two images together need more space than the cache has.
#[test]
fn images_in_use_share_the_room() {
    let host = Host::new();
    let other = host.arg("other.raw");
    fs::copy(host.path("base.raw"), &other).unwrap();
    let bases = [host.arg("base.raw"), other];
    let more = ["--base-cache-size", "64M", "--base-fetch", "1G"];
    let disks = [0, 1].map(|n| {
        let image = host.overlay(&format!("disk{n}"), &bases[n], "raw");
        host.serve(&image, &bases[n], &more)
    });
    let same_all = || {
        for (disk, base) in disks.iter().zip(&bases) {
            same(&disk.uri(), base);
        }
    };
    same_all();
    let cache = host.arg("cache");
    let kept = || -> Vec<u64> {
        let all = stdout_of(&["base", "list", "--json", "--base-cache", &cache]);
        let all: serde_json::Value = serde_json::from_str(&all).unwrap();
        let all = all["bases"].as_array().unwrap();
        all.iter()
            .map(|base| base["taken"].as_u64().unwrap())
            .collect()
    };
    // Each keeper checks from time to time how much space the others use.
    eventually("there is room", || {
        (kept().iter().sum::<u64>() <= 64 << 20).then_some(())
    });
    assert!(kept().iter().all(|kept| *kept >= 24 << 20), "{:?}", kept());
    same_all();
}

#[test]
fn keepers_that_are_killed_lose_nothing() {
    let host = Host::new();
    let source = Source::sturdy(&host, &host.path("base.raw"), 5);
    let uri = source.uri();
    let disk = host.serve(
        &host.overlay("disk", &uri, "raw"),
        &uri,
        &["--base-fetch", "2M"],
    );
    let done = std::sync::atomic::AtomicBool::new(false);
    let kills = std::thread::scope(|scope| {
        let killer = scope.spawn(|| {
            let mut kills = 0;
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(250));
                kills += host.kill_keepers();
            }
            kills
        });
        let end = SetAtEnd(&done);
        for _ in 0..6 {
            same(&disk.uri(), &host.arg("base.raw"));
        }
        drop(end);
        killer.join().unwrap()
    });
    assert!(kills >= 3, "{kills}");
    // Stripes that were in flight when a keeper was killed are fetched again.
    assert!(
        source.reads().len() < 2 * (SIZE / STRIPE) as usize,
        "{}",
        source.reads().len()
    );
    assert!(!disk.log().contains("ERROR"), "{}", disk.log());
}

/// The server is upgraded and its options change under a load that verifies what it reads.
#[test]
fn the_server_changes_while_the_image_comes() {
    let host = Host::new();
    let source = Source::sturdy(&host, &host.path("base.raw"), 3);
    let uri = source.uri();
    let disk = host.serve(
        &host.overlay("disk", &uri, "raw"),
        &uri,
        &["--base-fetch", "4M"],
    );
    std::thread::scope(|scope| {
        let compared = scope.spawn(|| {
            for _ in 0..4 {
                // A client whose handshake is in progress is disconnected, and connects again.
                eventually("a comparison", || {
                    let compared = compare(&disk.uri(), &host.arg("base.raw"));
                    let said = String::from_utf8_lossy(&compared.stderr);
                    let is_hung_up = said.contains("Failed to read option reply");
                    assert!(compared.status.success() || is_hung_up, "{compared:?}");
                    (!is_hung_up).then_some(())
                });
            }
        });
        disk.upgrade();
        host.kill_keepers();
        compared.join().unwrap();
    });
    same(&disk.uri(), &host.arg("base.raw"));
}
