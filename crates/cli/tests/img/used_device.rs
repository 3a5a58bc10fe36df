//! Tests new images on block devices that hold another disk's data, and targets that are larger
//! than the data copied to them.

use crate::pair::io;
use crate::place::{MIB, Place};
use crate::qemu_img;
use crate::support::loop_device::Loop;
use crate::support::{refused, run, stdout_of};
use std::fs;
use std::path::Path;

/// Size in bytes of the disks that are copied. The last cluster is incomplete.
const SIZE: u64 = 5 * MIB + 512;

/// A device full of old data. The size of the device is not a multiple of the cluster size.
struct Used {
    device: Loop,
    place: Place,
}

impl Used {
    fn new() -> Used {
        let place = Place::new();
        let file = place.path("device");
        fs::write(&file, vec![0xee; 24 * MIB as usize + 512]).unwrap();
        let device = Loop::of(Path::new(&file));
        Used { device, place }
    }

    fn fill(&self) {
        let file = fs::File::options().write(true).open(&self.device.0);
        let bytes = vec![0xee; MIB as usize];
        let mut file = file.unwrap();
        for _ in 0..24 {
            std::io::Write::write_all(&mut file, &bytes).unwrap();
        }
        std::io::Write::write_all(&mut file, &bytes[..512]).unwrap();
        file.sync_all().unwrap();
    }
}

/// Creates a raw disk that is mostly empty.
fn source(place: &Place) -> String {
    let path = place.path("source");
    let file = fs::File::create(&path).unwrap();
    file.set_len(SIZE).unwrap();
    let at = |at: u64, bytes: &[u8]| {
        std::os::unix::fs::FileExt::write_all_at(&file, bytes, at).unwrap();
    };
    at(0, &[1; 512]);
    at(MIB + 3 * 4096, &[2; 4096]);
    at(3 * MIB - 700, &[3; 100_000]);
    at(4 * MIB, &[0; 200_000]);
    path
}

/// Returns the contents of an image's disk, as QEMU reads it.
fn disk(place: &Place, format: &str, image: &str) -> Vec<u8> {
    let raw = place.path("read");
    qemu_img(&["convert", "-f", format, "-O", "raw", image, &raw]);
    let bytes = fs::read(&raw).unwrap();
    fs::remove_file(raw).unwrap();
    bytes
}

/// Formats and options of images on a device, or with their data on it (`DEV`).
const OPTIONS: &[(&str, &str)] = &[
    ("qcow2", ""),
    ("qcow2", "preallocation=metadata"),
    ("qcow2", "preallocation=full"),
    (
        "qcow2",
        "preallocation=metadata,cluster_size=4k,compat=0.10",
    ),
    ("qcow2", "preallocation=metadata,extended_l2=on"),
    ("qcow2", "data_file=DEV"),
    ("qcow2", "data_file=DEV,preallocation=metadata"),
    ("qcow2", "data_file=DEV,preallocation=full"),
    ("qcow2", "data_file=DEV,data_file_raw=on"),
    ("qcow2", "data_file=DEV,data_file_raw=on,preallocation=full"),
    ("qcow2", "data_file=DEV,data_file_raw=on,extended_l2=on"),
    ("raw", ""),
    ("raw", "preallocation=full"),
];

#[test]
#[ignore = "needs root: loop devices"]
fn copies_on_used_devices_equal_their_sources() {
    let used = Used::new();
    let (place, device) = (&used.place, &*used.device.0);
    let source = source(place);
    stdout_of(&["img", "archive", "-q", &source, &place.path("archive"), "a"]);
    let manifest = place.path("archive/images/a.manifest");
    let copied = fs::read(&source).unwrap();
    for (format, options) in OPTIONS {
        for size in [SIZE, 7 * MIB] {
            for sparse in ["4k", "0"] {
                for command in [
                    &["convert", "-f", "raw", &source][..],
                    &["restore", &manifest],
                ] {
                    used.fill();
                    let image = match options.contains("DEV") {
                        true => place.path("image"),
                        false => device.to_owned(),
                    };
                    let options = format!("{options},size={size}").replace("DEV", device);
                    let options = options.trim_start_matches(',');
                    let how = ["-O", format, "-o", options, "-S", sparse, &image];
                    let args = [&["img"], command, &how].concat();
                    stdout_of(&args);
                    let mut found = disk(place, format, &image);
                    if *format == "raw" {
                        found.truncate(size as usize);
                    }
                    let (own, behind) = found.split_at(copied.len());
                    assert!(own == copied, "{args:?}: another disk");
                    let is_zero = behind.iter().all(|byte| *byte == 0);
                    assert!(is_zero, "{args:?}: old data behind the copy");
                    assert_eq!(found.len() as u64, size, "{args:?}");
                    place.sound(format, &image);
                    let _ = fs::remove_file(place.path("image"));
                }
            }
        }
    }
}

#[test]
#[ignore = "needs root: loop devices"]
fn space_of_a_device_cannot_be_reserved() {
    let used = Used::new();
    let (place, device) = (&used.place, &*used.device.0);
    let (source, image) = (source(place), place.path("image"));
    let before = fs::read(place.path("device")).unwrap();
    let words = [
        "preallocation=falloc",
        "a block device cannot reserve space",
    ];
    let data_file = format!("data_file={device},preallocation=falloc");
    for (format, options, image) in [
        ("raw", "preallocation=falloc", device),
        ("qcow2", "preallocation=falloc", device),
        ("qcow2", &data_file, &image),
    ] {
        let how = ["-o", options, image];
        let args = [&["img", "create", "-f", format][..], &how, &["1M"]].concat();
        refused(1, &args, &words);
        let args = ["img", "convert", "-f", "raw", "-O", format];
        refused(
            1,
            &[&args[..], &["-o", options, &source, image]].concat(),
            &words,
        );
        assert!(!Path::new(&place.path("image")).exists());
    }
    assert!(fs::read(place.path("device")).unwrap() == before);
    stdout_of(&["img", "create", "-q", "-f", "qcow2", device, "1M"]);
    let before = fs::read(place.path("device")).unwrap();
    let args = ["img", "resize", "--preallocation=falloc", device, "2M"];
    refused(1, &args, &words);
    assert!(fs::read(place.path("device")).unwrap() == before);
}

/// `create` reports where the new disk reads as the device's old data.
#[test]
#[ignore = "needs root: loop devices"]
fn create_says_whether_a_new_disk_has_old_data() {
    let used = Used::new();
    let (place, device) = (&used.place, &*used.device.0);
    for (format, options) in OPTIONS.iter().filter(|(format, _)| *format == "qcow2") {
        used.fill();
        let image = match options.contains("DEV") {
            true => place.path("image"),
            false => device.to_owned(),
        };
        let options = format!("size=5M,{options}").replace("DEV", device);
        let made = run(&["img", "create", "-f", format, "-o", &options, &image]);
        assert!(made.status.success(), "{options}: {made:?}");
        let said = String::from_utf8(made.stderr).unwrap();
        let is_old = disk(place, format, &image).contains(&0xee);
        assert_eq!(said.contains("old contents"), is_old, "{options}: {said}");
        assert_eq!(said.contains(device), is_old, "{options}: {said}");
        let _ = fs::remove_file(place.path("image"));
    }
}

/// The part by which a disk grows reads as zeroes.
#[test]
#[ignore = "needs root: loop devices"]
fn disks_grow_by_zeroes_on_used_devices() {
    let used = Used::new();
    let (place, device) = (&used.place, &*used.device.0);
    for options in ["", "data_file=DEV"] {
        for how in ["off", "metadata", "full"] {
            used.fill();
            let image = match options.contains("DEV") {
                true => place.path("image"),
                false => device.to_owned(),
            };
            let options = format!("size=1M,{options}").replace("DEV", device);
            stdout_of(&["img", "create", "-q", "-f", "qcow2", "-o", &options, &image]);
            io(&image, "qcow2", &["write -P 7 1000k 24k"]);
            let how = format!("--preallocation={how}");
            let resize = ["img", "resize", &how, "-q", &image, "3M"];
            match options.contains("data_file") {
                true => {
                    let more = ["--data-file", device];
                    stdout_of(&[&resize[..], &more].concat());
                }
                false => {
                    stdout_of(&resize);
                }
            }
            let found = disk(place, "qcow2", &image);
            let mut expected = vec![0; 3 << 20];
            expected[1000 << 10..1 << 20].fill(7);
            assert!(found == expected, "{options} {how}");
            let _ = fs::remove_file(place.path("image"));
        }
    }
}

/// Behind the end of the copied data, a backing file would be visible.
#[test]
fn larger_target_on_a_backing_file_ends_in_zeroes() {
    let place = Place::new();
    let base = place.path("base");
    fs::write(&base, vec![9; 4 * MIB as usize]).unwrap();
    let (source, target) = (place.path("source"), place.path("target"));
    let on = ["-b", &base, "-F", "raw"];
    let create = ["create", "-q", "-f", "qcow2"];
    let size = (MIB + 512).to_string();
    qemu_img(&[&create[..], &on, &[&source, &size]].concat());
    io(
        &source,
        "qcow2",
        &["write -P 5 100k 4k", "write -P 6 1M 512"],
    );
    let mut expected = disk(&place, "qcow2", &source);
    expected.resize(3 << 20, 0);
    for options in [
        &["-o", "size=3M"][..],
        &["-o", "size=3M,compat=0.10"],
        &["-o", "size=3M,extended_l2=on"],
        &["-o", "size=3M", "-c"],
        &["-o", "size=3M", "-S", "0"],
        &["-o", "size=3M,extended_l2=on,preallocation=metadata"],
    ] {
        let how = ["img", "convert", "-O", "qcow2", "-B", &base, "-F", "raw"];
        stdout_of(&[&how, options, &[&source, &target]].concat());
        assert!(disk(&place, "qcow2", &target) == expected, "{options:?}");
        place.sound("qcow2", &target);
        fs::remove_file(&target).unwrap();
    }
}
