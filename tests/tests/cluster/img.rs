//! Tests `fathom img` on images of a cluster, with qemu-img as the reference.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Command;

use fathom_tests::ceph::Cluster;
use fathom_tests::{Ended, Place, run, run_command};

use super::{GIB, QUEUES, STEP, bench, done, serve, wait};

const FORMATS: [&str; 3] = ["raw", "qcow2", "qed"];

fn img(args: &[&str]) -> String {
    let ended = try_img(args);
    let told = format!("{args:?}: {}{}", ended.stdout, ended.stderr);
    assert_eq!(ended.code, Some(0), "{told}");
    ended.stdout
}

fn try_img(args: &[&str]) -> Ended {
    run(&[&["img"], args].concat(), STEP)
}

/// Runs a program of QEMU, which finds the cluster even by names without its configuration.
fn qemu(cluster: &Cluster, name: &str, args: &[&str]) -> String {
    let mut command = Command::new(name);
    command.args(args).env("CEPH_CONF", cluster.conf());
    let ended = run_command(command, STEP);
    let told = format!("{args:?}: {}{}", ended.stdout, ended.stderr);
    assert_eq!(ended.code, Some(0), "{told}");
    ended.stdout
}

/// Asserts that QEMU finds both images equal, and no errors in the second one.
fn alike(cluster: &Cluster, file: (&str, &str), image: (&str, &str)) {
    let (file, file_format) = file;
    let (image, format) = image;
    let args = ["compare", "-f", file_format, "-F", format, file, image];
    qemu(cluster, "qemu-img", &args);
    if format != "raw" {
        qemu(cluster, "qemu-img", &["check", "-q", "-f", format, image]);
    }
}

/// Creates a qcow2 file of 64 MiB with some data.
fn source(place: &Place, cluster: &Cluster) -> String {
    let path = place.path("source").to_str().unwrap().to_owned();
    qemu(
        cluster,
        "qemu-img",
        &["create", "-q", "-f", "qcow2", &path, "64M"],
    );
    let writes = [
        "-c",
        "write -P 1 0 1M",
        "-c",
        "write -P 2 20M 5M",
        "-c",
        "write -z 40M 1M",
        "-c",
        "write -P 3 65535k 1k",
    ];
    let args = [&["-f", "qcow2"], &writes[..], &[&path]].concat();
    qemu(cluster, "qemu-io", &args);
    path
}

#[test]
fn images_are_copied_and_described_as_files_are() {
    let (place, cluster) = (Place::new(), Cluster::start(1, GIB));
    let source = source(&place, &cluster);
    for format in FORMATS {
        let (mine, qemus) = (cluster.image(format), cluster.for_qemu(format));
        // An existing image is overwritten.
        img(&["create", "-q", "-f", "qcow2", &mine, "100M"]);
        img(&["convert", "-q", "-O", format, &source, &mine]);
        alike(&cluster, (&source, "qcow2"), (&qemus, format));
        assert!(img(&["compare", &source, &mine]).contains("identical"));
        // Converts the image back to a file.
        let back = place.path(&format!("{format}.back"));
        let back = back.to_str().unwrap();
        img(&["convert", "-q", "-f", format, "-O", "qed", &mine, back]);
        alike(&cluster, (&source, "qcow2"), (back, "qed"));
        // Reads an image that QEMU has created.
        let (name, of) = (format!("q{format}"), ["-f", format]);
        let qemus = cluster.for_qemu(&name);
        qemu(
            &cluster,
            "qemu-img",
            &["convert", "-O", format, &source, &qemus],
        );
        let theirs = cluster.image(&name);
        assert!(img(&["compare", "-F", format, &source, &theirs]).contains("identical"));
        let of_both = |args: &[&str]| {
            let mine = img(&[args, &of, &[&theirs]].concat());
            let theirs = qemu(&cluster, "qemu-img", &[args, &of, &[&qemus]].concat());
            (mine, theirs)
        };
        let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        let (info, theirs) = of_both(&["info", "--output", "json"]);
        // QEMU reports more of a raw image.
        let fields = ["virtual-size", "format", "cluster-size", "format-specific"];
        let known = if format == "raw" { 2 } else { 4 };
        for field in &fields[..known] {
            assert_eq!(json(&info)[field], json(&theirs)[field], "{format} {field}");
        }
        let (map, theirs) = of_both(&["map", "--output", "json"]);
        assert_eq!(json(&map), json(&theirs), "{format}");
        let (measure, theirs) = of_both(&["measure", "-O", "qcow2", "--output", "json"]);
        assert_eq!(json(&measure), json(&theirs), "{format}");
    }
}

#[test]
fn images_are_made_and_changed_as_files_are() {
    let (place, cluster) = (Place::new(), Cluster::start(1, GIB));
    for format in FORMATS {
        let (mine, qemus) = (cluster.image(format), cluster.for_qemu(format));
        img(&["create", "-q", "-f", format, &mine, "20M"]);
        let write = ["-f", format, "-c", "write -P 7 10M 6M", &qemus];
        qemu(&cluster, "qemu-io", &write);
        for (size, bytes) in [("+30M", 50 << 20), ("12M", 12 << 20)] {
            let shrink: &[&str] = match size {
                "12M" if format == "qed" => continue,
                "12M" => &["--shrink"],
                _ => &[],
            };
            img(&[&["resize", "-q", "-f", format], shrink, &[&mine, size]].concat());
            let info = qemu(
                &cluster,
                "qemu-img",
                &["info", "--output", "json", "-f", format, &qemus],
            );
            let info: serde_json::Value = serde_json::from_str(&info).unwrap();
            assert_eq!(info["virtual-size"], bytes, "{format}");
        }
        let end = if format == "qed" { "6M" } else { "2M" };
        let read = format!("read -P 7 10M {end}");
        qemu(&cluster, "qemu-io", &["-f", format, "-c", &read, &qemus]);
    }
    // Snapshots and bitmaps in a qcow2 image.
    let (mine, qemus) = (cluster.image("qcow2"), cluster.for_qemu("qcow2"));
    img(&["snapshot", "-q", "-c", "before", &mine]);
    let write = ["-f", "qcow2", "-c", "write -P 8 0 12M", &qemus];
    qemu(&cluster, "qemu-io", &write);
    let list = qemu(&cluster, "qemu-img", &["snapshot", "-l", &qemus]);
    assert_eq!(img(&["snapshot", "-l", &mine]), list);
    img(&["snapshot", "-q", "-a", "before", &mine]);
    let read = ["-f", "qcow2", "-c", "read -P 0 0 10M", &qemus];
    qemu(&cluster, "qemu-io", &read);
    img(&["snapshot", "-q", "-d", "before", &mine]);
    img(&["bitmap", "--add", &mine, "changes"]);
    let info = qemu(&cluster, "qemu-img", &["info", "-f", "qcow2", &qemus]);
    assert!(info.contains("name: changes"), "{info}");
    qemu(&cluster, "qemu-img", &["check", "-q", &qemus]);
    // Leaked clusters are found and freed.
    let leaky = place.path("leaky");
    let path = leaky.to_str().unwrap();
    img(&["create", "-q", "-f", "qcow2", path, "1M"]);
    let file = File::options().read(true).write(true).open(&leaky).unwrap();
    let cluster_of = file.metadata().unwrap().len().div_ceil(64 << 10);
    file.set_len((cluster_of + 1) << 16).unwrap();
    let number = |at| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    };
    let refcounts = number(number(48));
    file.write_all_at(&[0, 1], refcounts + 2 * cluster_of)
        .unwrap();
    cluster.rbd(&["import", "--no-progress", path, "rbd/leaky"]);
    let mine = cluster.image("leaky");
    assert_eq!(try_img(&["check", &mine]).code, Some(3));
    img(&["check", "-q", "--repair", "all", &mine]);
    let qemus = cluster.for_qemu("leaky");
    qemu(&cluster, "qemu-img", &["check", "-q", &qemus]);
}

#[test]
fn chains_are_followed_in_their_pool_and_locks_respected() {
    let (place, cluster) = (Place::new(), Cluster::start(1, GIB));
    let source = source(&place, &cluster);
    let [base, top, other] = ["base", "top", "other"].map(|name| cluster.image(name));
    img(&["convert", "-q", "-O", "qed", &source, &base]);
    img(&["convert", "-q", "-O", "raw", &source, &other]);
    let args = ["-b", "rbd:rbd/base", "-F", "qed", &top];
    img(&[&["create", "-q", "-f", "qcow2"], &args[..]].concat());
    let chain = img(&["info", "--backing-chain", &top]);
    assert!(chain.contains(&format!("image: {base}")), "{chain}");
    let write = ["-f", "qcow2", "-c", "write -P 9 4M 1M", "rbd:rbd/top"];
    qemu(&cluster, "qemu-io", &write);
    // The disk stays the same with another backing image, without one, and after a commit.
    let copy = place.path("copy");
    let copy = copy.to_str().unwrap();
    img(&["convert", "-q", "-O", "raw", &top, copy]);
    for (below, format) in [("rbd:rbd/other", "raw"), ("rbd:rbd/base", "qed")] {
        img(&["rebase", "-q", "-b", below, "-F", format, &top]);
        alike(&cluster, (copy, "raw"), ("rbd:rbd/top", "qcow2"));
    }
    img(&["commit", "-q", &top]);
    alike(&cluster, (copy, "raw"), ("rbd:rbd/base", "qed"));
    alike(&cluster, (copy, "raw"), ("rbd:rbd/top", "qcow2"));
    img(&["rebase", "-q", "-b", "", &top]);
    alike(&cluster, (copy, "raw"), (&cluster.for_qemu("top"), "qcow2"));
    // Impossible commands are rejected and change nothing.
    let new = cluster.image("new");
    let refused = |args: &[&str], words: &[&str]| try_img(args).refused_with(words);
    let create = ["create", "-f", "qcow2", &new, "1M"];
    let elsewhere = ["-b", "/etc/hostname", "-F", "raw"];
    refused(&[&create[..], &elsewhere].concat(), &["in the same place"]);
    let data = ["-o", "data_file=rbd:rbd/d"];
    refused(&[&create[..], &data].concat(), &["omit data_file"]);
    let snapshot = new.replace('?', "@s?");
    refused(&["create", &snapshot, "1M"], &["a snapshot"]);
    refused(&["info", &new], &["cannot open the image", "no such file"]);
    let again = format!("{base}&user=admin");
    refused(&["convert", &base, &again], &["also a source"]);
    let all = ["-o", "preallocation=falloc"];
    refused(&[&["create"], &all[..], &[&new, "1M"]].concat(), &["full"]);
    let images = cluster.rbd(&["ls"]);
    assert_eq!(images.split_whitespace().count(), 3, "{images}");
    cluster.rbd(&["lock", "add", "rbd/top", "mine"]);
    refused(&["resize", &top, "+1M"], &["by hand"]);
    // Commands are rejected while a server has the image.
    let server = serve(&place, &cluster, "other", QUEUES);
    let state = place.path("state");
    let load = bench(&server, &state, &["--rw=randwrite", "--runtime=6s"]);
    wait("the server's lock", || {
        cluster.rbd(&["lock", "ls", "rbd/other"]).contains("auto")
    });
    refused(&["resize", &other, "+1M"], &["has locked the image"]);
    refused(&["create", &other, "1M"], &["has locked the image"]);
    refused(
        &["info", &other],
        &["has locked the image", "--force-share"],
    );
    img(&["info", "-U", &other]);
    done(load);
    server.stop().unwrap();
    img(&["resize", "-q", "-f", "raw", &other, "+1M"]);
}
