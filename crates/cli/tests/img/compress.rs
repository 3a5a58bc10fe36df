//! Compares the size of compressed images with those of qemu-img.

use crate::place::{MIB, Place};
use crate::qemu_img;
use crate::support::{eventually, listens, stdout_of};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

/// Size of a disk in bytes.
const LEN: usize = 24 * MIB as usize;

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Returns disks of several kinds, and by how many percent an image may be larger than QEMU's.
fn disks() -> Vec<(&'static str, Vec<u8>, u64)> {
    let mut state = 0x5eed_0bad_cafe_u64;
    let words: Vec<String> = (0..2000)
        .map(|_| {
            let len = 2 + random(&mut state) % 9;
            let letter = |_| char::from(b'a' + (random(&mut state) % 17) as u8);
            (0..len).map(letter).collect()
        })
        .collect();
    let mut text = String::new();
    while text.len() < LEN {
        // Some words are much more frequent than others.
        let n = random(&mut state) % 2000 * (random(&mut state) % 2000) / 2000;
        text += &words[n as usize];
        text.push(if random(&mut state).is_multiple_of(9) {
            '\n'
        } else {
            ' '
        });
    }
    text.truncate(LEN);
    let mut zeroes = vec![0; LEN];
    for at in (0..LEN).step_by(9000) {
        zeroes[at] = random(&mut state) as u8;
    }
    let noise: Vec<u8> = { 0..LEN / 4 }.map(|_| random(&mut state) as u8).collect();
    let mixed = { 0..LEN }.map(|at| match at >> 16 & 1 {
        0 => b"all alike "[at % 10],
        _ => noise[at / 4] & 0x3f,
    });
    vec![
        (
            "repetitive",
            b"all of it is alike, ".repeat(LEN / 20 + 1)[..LEN].to_vec(),
            10,
        ),
        ("text", text.into_bytes(), 4),
        ("almost zeroes", zeroes, 40),
        ("random", noise.repeat(4), 4),
        ("mixed", mixed.collect(), 4),
    ]
}

fn allocated(path: &str) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

#[test]
fn compressed_images_are_about_as_small_as_those_of_qemu_img() {
    let place = Place::new();
    let (disk, mine, theirs) = (place.path("disk"), place.path("mine"), place.path("theirs"));
    for (kind, bytes, percent) in disks() {
        fs::write(&disk, bytes).unwrap();
        for (options, cluster) in [
            ("compression_type=zlib", 64 << 10),
            ("compression_type=zstd", 64 << 10),
            ("compression_type=zlib,cluster_size=2M", 2 << 20),
            ("compression_type=zlib,cluster_size=8k", 8 << 10),
        ] {
            let args = ["convert", "-c", "-O", "qcow2", "-o", options, &disk];
            stdout_of(&[&["img"], &args[..], &[&mine]].concat());
            qemu_img(&[&args[..], &[&theirs]].concat());
            place.same("qcow2", &mine, &disk);
            place.sound("qcow2", &mine);
            let (mine, theirs) = (allocated(&mine), allocated(&theirs));
            eprintln!("{kind} {options}: {mine} of {theirs}");
            // The streams of one write share its last block. More than a hundred clusters are in
            // progress at a time, but on a busy machine only some may be ready together.
            let writes = LEN as u64 / cluster / 32;
            let most = theirs + theirs * percent / 100 + (64 << 10) + writes * 4096;
            assert!(
                mine <= most,
                "{kind} {options}: {mine}, and {theirs} by qemu-img"
            );
        }
    }
}

/// Clusters that arrive one by one share blocks as well: from a remote disk, or at a limited rate.
#[test]
fn a_slow_source_makes_no_larger_image() {
    let place = Place::new();
    let (disk, mine, theirs) = (place.path("disk"), place.path("mine"), place.path("theirs"));
    let (_, bytes, _) = disks().swap_remove(0);
    fs::write(&disk, &bytes[..8 << 20]).unwrap();
    let options = "compression_type=zlib,cluster_size=8k";
    let args = ["convert", "-c", "-O", "qcow2", "-o", options];
    qemu_img(&[&args[..], &[&disk, &theirs]].concat());
    let most = 2 * allocated(&theirs) + (64 << 10);

    let socket = place.path("s");
    let uri = format!("nbd+unix:///?socket={socket}");
    let mut nbdkit = Command::new("nbdkit")
        .args([
            "-f",
            "--exit-with-parent",
            "-U",
            &socket,
            "-t4",
            "--filter=delay",
            "file",
            &disk,
            "rdelay=1ms",
        ])
        .spawn()
        .expect("nbdkit is installed by `make setup`");
    eventually("nbdkit listens", || listens(socket.as_ref()).then_some(()));
    for (source, more) in [(&uri, &[][..]), (&disk, &["--rate=10M"])] {
        stdout_of(&[&["img"], &args[..], more, &[source, &mine]].concat());
        place.same("qcow2", &mine, &disk);
        let mine = allocated(&mine);
        assert!(mine <= most, "of {source}: {mine}, and at most {most}");
    }
    nbdkit.kill().unwrap();
    nbdkit.wait().unwrap();
}

/// The old base image of the chains has all data, and the new one has none.
#[test]
fn what_rebase_copies_takes_as_little() {
    let place = Place::new();
    let base = place.path("base");
    let new = place.image("new", "qcow2", &[], &[]);
    for (kind, bytes, percent) in disks() {
        fs::write(&base, &bytes[..20 << 20]).unwrap();
        let [mine, theirs] = ["mine", "theirs"].map(|name| {
            place.image(
                name,
                "qcow2",
                &["-b", &base, "-F", "raw"],
                &["write -P 7 1M 4k"],
            )
        });
        let before = place.path("before");
        qemu_img(&["convert", "-O", "raw", &mine, &before]);
        let args = ["rebase", "-c", "-b", &new, "-F", "qcow2"];
        stdout_of(&[&["img"], &args[..], &[&mine]].concat());
        qemu_img(&[&args[..], &[&theirs]].concat());
        place.same("qcow2", &mine, &before);
        place.sound("qcow2", &mine);
        let (mine, theirs) = (allocated(&mine), allocated(&theirs));
        eprintln!("{kind}: {mine} of {theirs}");
        let most = theirs + theirs * percent / 100 + (64 << 10);
        assert!(mine <= most, "{kind}: {mine}, and {theirs} by qemu-img");
    }
}

/// Only the subclusters that differ are copied.
#[test]
fn rebase_copies_subclusters() {
    let place = Place::new();
    let writes: Vec<String> = (0..16)
        .map(|n| format!("write -P 5 {}k 2k", n * 1024 + 34))
        .collect();
    let writes: Vec<&str> = writes.iter().map(String::as_str).collect();
    let base = place.image("base", "raw", &[], &writes);
    let new = place.image("new", "qcow2", &[], &[]);
    let options = [
        "-b",
        &base,
        "-F",
        "raw",
        "-o",
        "extended_l2=on,cluster_size=1M",
    ];
    let [mine, theirs] = ["mine", "theirs"].map(|name| place.image(name, "qcow2", &options, &[]));
    let before = place.path("before");
    qemu_img(&["convert", "-O", "raw", &mine, &before]);
    let args = ["rebase", "-b", &new, "-F", "qcow2"];
    stdout_of(&[&["img"], &args[..], &[&mine]].concat());
    qemu_img(&[&args[..], &[&theirs]].concat());
    place.same("qcow2", &mine, &before);
    place.sound("qcow2", &mine);
    let copied = |image: &str| -> u64 {
        let map = crate::qemu_json(&["map", "--output=json", image]);
        let all = map.as_array().unwrap().iter();
        let own = all.filter(|extent| extent["depth"] == 0 && extent["data"] == true);
        own.map(|extent| extent["length"].as_u64().unwrap()).sum()
    };
    assert_eq!(copied(&mine), copied(&theirs));
    assert_eq!(copied(&mine), (16 * 32) << 10);
}
