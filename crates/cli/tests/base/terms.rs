//! Tests the options of base images, and profiles of what boots read.

use crate::place::{Host, Source, qemu_io};
use crate::support::{eventually, refused, stdout_of};
use std::fs;

#[test]
fn options_that_do_not_go_together_are_told() {
    let host = Host::new();
    let image = host.overlay("disk", "/x", "raw");
    let whole = host.arg("whole");
    stdout_of(&["img", "create", "-q", "-f", "qcow2", &whole, "1M"]);
    let nbd = format!("unix:{}", host.arg("n"));
    let cases: [(&str, &[&str], &str); 5] = [
        (&image, &["--base", "/x"], "--base: applies only to qcow2"),
        (
            &image,
            &["--format", "qcow2", "--base-fetch", "1M"],
            "apply only to --base",
        ),
        (
            &image,
            &[
                "--format",
                "qcow2",
                "--base",
                "/x",
                "--base-cache-size",
                "1M",
            ],
            "minimum of 64M",
        ),
        (
            &image,
            &["--format", "qcow2", "--base", "/x", "--base-fetch", "0"],
            "off",
        ),
        (
            &whole,
            &["--format", "qcow2", "--base", "/x"],
            "no backing file",
        ),
    ];
    for (image, more, words) in cases {
        let args = [&["serve", image, "--nbd", &nbd][..], more].concat();
        let output = crate::support::run(&args);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && said.contains(words),
            "{args:?}: {said}"
        );
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    // A remote image is not opened only because another image names it as its backing file.
    refused(
        1,
        &[
            "serve",
            &host.overlay("far", "https://host/x", "raw"),
            "--format",
            "qcow2",
            "--nbd",
            &nbd,
        ],
        &["https", "--base"],
    );
}

/// The reads of a boot are recorded in a profile. With that profile, they are fetched first.
#[test]
fn what_boots_read_is_fetched_first() {
    let host = Host::new();
    let source = Source::start(&host, &host.path("base.raw"), 0);
    let uri = source.uri();
    let disk = host.serve(
        &host.overlay("a", &uri, "raw"),
        &uri,
        &["--base-fetch", "off"],
    );
    let read = [0, 40, 30, 44, 8, 22, 12, 35, 27, 5];
    for at in read {
        assert!(qemu_io(&disk.uri(), &format!("read {at}M 4k")));
        // The pause makes the reads reach the keeper in this order.
        std::thread::sleep(std::time::Duration::from_millis(300));
    }
    drop(disk);
    let profile = ["base", "profile", &uri, "--base-cache", &host.arg("cache")];
    let text = eventually("a profile", || {
        let output = crate::support::run(&profile);
        output
            .status
            .success()
            .then(|| String::from_utf8(output.stdout).unwrap())
    });
    let first = |line: &str| line.split(' ').next().unwrap().parse::<u64>().unwrap();
    let order: Vec<u64> = text.lines().map(first).collect();
    assert_eq!(order, read.map(|at| at << 20));
    eventually("the keeper's end", || {
        host.keepers().is_empty().then_some(())
    });
    stdout_of(&["base", "remove", &uri, "--base-cache", &host.arg("cache")]);
    fs::write(host.path("profile"), text).unwrap();
    let before = source.reads().len();
    let more = ["--base-profile", &host.arg("profile"), "--base-fetch", "8M"];
    let disk = host.serve(&host.overlay("b", &uri, "raw"), &uri, &more);
    eventually("all", || {
        (source.reads().len() >= before + 100).then_some(())
    });
    let mut reads = source.reads().split_off(before);
    reads.truncate(read.len());
    // Reads that are in flight together may arrive in any order.
    reads.sort_unstable();
    let mut wanted = order;
    wanted.sort_unstable();
    assert_eq!(reads, wanted);
    drop(disk);
}
