//! Tests images in formats of other programs, made by qemu-img.

use crate::place::Place;
use crate::support::nbd::tool;
use crate::support::{refused, stdout_of};
use crate::{qemu_img, qemu_json};
use serde_json::Value;
use std::fs;

/// Formats, and options of each.
const KINDS: [(&str, &str); 12] = [
    ("vmdk", "subformat=monolithicSparse"),
    ("vmdk", "subformat=monolithicFlat"),
    ("vmdk", "subformat=twoGbMaxExtentSparse"),
    ("vmdk", "subformat=twoGbMaxExtentFlat"),
    ("vmdk", "subformat=streamOptimized"),
    ("vhdx", "subformat=dynamic"),
    ("vhdx", "subformat=dynamic,block_size=2M"),
    ("vhdx", "subformat=fixed"),
    ("vdi", "static=off"),
    ("vdi", "static=on"),
    ("vpc", "subformat=dynamic,force_size=on"),
    ("vpc", "subformat=fixed,force_size=on"),
];

/// Creates a raw disk and an image with the same data. Returns their paths.
fn pair(place: &Place, format: &str, options: &str) -> (String, String) {
    let writes = [
        "write -P 1 0 3M",
        "write -P 2 7777k 100k",
        "write -P 3 19M 1M",
    ];
    let disk = place.image("disk", "raw", &[], &writes);
    let image = place.path("image");
    let convert = ["convert", "-f", "raw", "-O", format, "-o", options];
    qemu_img(&[&convert[..], &[&disk, &image]].concat());
    (disk, image)
}

#[test]
fn they_are_converted_compared_described_and_measured() {
    for (format, options) in KINDS {
        eprintln!("{format} {options}");
        let place = Place::new();
        let (disk, image) = pair(&place, format, options);
        let is_whole = |got: &str| assert!(fs::read(got).unwrap() == fs::read(&disk).unwrap());
        let out = place.path("out");
        stdout_of(&["img", "convert", "-f", format, "-O", "raw", &image, &out]);
        is_whole(&out);
        let args = ["img", "compare", "-f", format, "-F", "raw", &image, &disk];
        assert_eq!(stdout_of(&args), "Images are identical.\n");
        // The format is detected without `-f` where the image has a signature.
        let qcow2 = place.path("qcow2");
        if options != "subformat=fixed,force_size=on" {
            stdout_of(&["img", "convert", "-O", "qcow2", &image, &qcow2]);
            qemu_img(&["compare", "-f", "qcow2", "-F", "raw", &qcow2, &disk]);
        }
        // QEMU reports the same extents as data.
        let map = |args: &[&str]| -> Vec<(u64, u64)> {
            let map = match args[0] {
                "img" => serde_json::from_str(&stdout_of(args)).unwrap(),
                _ => qemu_json(args),
            };
            let data = map.as_array().unwrap().iter();
            let data = data.filter(|extent| extent["zero"] == false);
            let mut runs: Vec<(u64, u64)> = Vec::new();
            for extent in data {
                let [start, len] = ["start", "length"].map(|name| extent[name].as_u64().unwrap());
                match runs.last_mut().filter(|(_, end)| *end == start) {
                    Some(run) => run.1 += len,
                    None => runs.push((start, start + len)),
                }
            }
            runs
        };
        let ours = map(&["img", "map", "-f", format, "--json", &image]);
        let theirs = map(&["map", "-f", format, "--output", "json", &image]);
        // QEMU does not know the extents of VHDX images, nor of images as large as their disk.
        let knows = ["Sparse", "Optimized", "off", "dynamic,force"];
        if knows.iter().any(|kind| options.contains(kind)) {
            assert_eq!(ours, theirs, "{format} {options}");
        }
        let info: Value =
            serde_json::from_str(&stdout_of(&["img", "info", "-f", format, "--json", &image]))
                .unwrap();
        let known = qemu_json(&["info", "-f", format, "--output", "json", &image]);
        for field in ["format", "virtual-size", "cluster-size"] {
            assert_eq!(info[field], known[field], "{format} {options} {field}");
        }
        if format == "vmdk" {
            assert_eq!(info["format-specific"], known["format-specific"]);
        }
        let measured = stdout_of(&["img", "measure", "-f", format, "-O", "raw", &image]);
        assert!(measured.contains("20971520"), "{measured}");
    }
}

#[test]
fn they_are_below_other_images() {
    for (format, options) in [KINDS[2], KINDS[5], KINDS[8], KINDS[10]] {
        let place = Place::new();
        let (disk, image) = pair(&place, format, options);
        let top = place.path("top");
        let create = [
            "img", "create", "-q", "-f", "qcow2", "-b", &image, "-F", format,
        ];
        stdout_of(&[&create[..], &[&top]].concat());
        qemu_img(&["compare", "-f", "qcow2", "-F", "raw", &top, &disk]);
        let out = place.path("out");
        stdout_of(&["img", "convert", "-f", "qcow2", &top, &out]);
        assert!(fs::read(&out).unwrap() == fs::read(&disk).unwrap());
        // Ranges that the new backing image lacks read as zeroes, like ranges that the old one
        // lacks.
        stdout_of(&["img", "rebase", "-q", "-f", "qcow2", "-b", "", &top]);
        qemu_img(&["compare", "-f", "qcow2", "-F", "raw", &top, &disk]);
    }
}

#[test]
fn nothing_is_written_to_them() {
    let place = Place::new();
    let (disk, image) = pair(&place, "vdi", "static=off");
    let before = fs::read(&image).unwrap();
    let only_read = ["vdi images can only be read", "convert"];
    let new = place.path("new");
    refused(1, &["img", "create", "-f", "vdi", &new, "1M"], &only_read);
    refused(1, &["img", "convert", "-O", "vdi", &disk, &new], &only_read);
    refused(
        1,
        &["img", "convert", "-O", "vdi", &disk, &image],
        &only_read,
    );
    refused(
        1,
        &["img", "convert", "-n", "-O", "vdi", &disk, &image],
        &only_read,
    );
    refused(
        1,
        &["img", "resize", "-f", "vdi", &image, "30M"],
        &only_read,
    );
    refused(
        63,
        &["img", "check", "-f", "vdi", &image],
        &["qcow2 and qed"],
    );
    refused(
        1,
        &["img", "snapshot", "-c", "a", "-f", "vdi", &image],
        &["only qcow2"],
    );
    refused(
        1,
        &[
            "img", "rebase", "-u", "-f", "vdi", "-b", &disk, "-F", "raw", &image,
        ],
        &["vdi"],
    );
    refused(
        1,
        &["img", "amend", "-f", "vdi", "-o", "compat=1.1", &image],
        &["vdi"],
    );
    refused(
        1,
        &["serve", &image, "--format", "vdi", "--nbd", "unix:s"],
        &only_read,
    );
    assert!(fs::read(&image).unwrap() == before && !place.names().contains(&"new".to_owned()));
}

/// An image must not choose which of the host's files are read.
#[test]
fn names_in_them_lead_nowhere_else() {
    let place = Place::new();
    let (_, image) = pair(&place, "vmdk", "subformat=monolithicFlat");
    let descriptor = fs::read_to_string(&image).unwrap();
    let out = place.path("out");
    let is_refused = |name: &str, why: &[&str]| {
        fs::write(&image, descriptor.replace("image-flat", name)).unwrap();
        refused(1, &["img", "convert", "-f", "vmdk", &image, &out], why);
        refused(1, &["img", "info", "-f", "vmdk", &image], why);
    };
    is_refused("/etc/passwd", &["/etc/passwd"]);
    is_refused("../x", &["../x"]);
    is_refused("not-there", &["not-there"]);
    std::os::unix::fs::symlink("/etc/passwd", place.path("link")).unwrap();
    fs::rename(place.path("image-flat"), place.path("gone")).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", place.path("image-flat")).unwrap();
    is_refused("image-flat", &["image-flat"]);
    assert!(!place.names().contains(&"out".to_owned()));
}

/// With -U the source is not locked, but its parts are still recognized.
#[test]
fn a_part_of_a_source_is_no_target() {
    for options in ["subformat=monolithicFlat", "subformat=twoGbMaxExtentSparse"] {
        let place = Place::new();
        let (_, image) = pair(&place, "vmdk", options);
        let names = place.names();
        let part = names.iter().find(|name| name.starts_with("image-"));
        let part = place.path(part.unwrap());
        let before = fs::read(&part).unwrap();
        for more in [&[][..], &["-U"], &["-n", "-U"]] {
            let convert = ["img", "convert", "-f", "vmdk", "-O", "raw"];
            let args = [&convert[..], more, &[&image, &part]].concat();
            refused(1, &args, &["also a source"]);
        }
        let data_file = format!("data_file={part}");
        let convert = ["img", "convert", "-U", "-f", "vmdk", "-O", "qcow2"];
        let args = ["-o", &data_file, &image, &place.path("new")];
        refused(1, &[&convert[..], &args].concat(), &["also a source"]);
        assert!(fs::read(&part).unwrap() == before);
    }
}

/// A part that was cut off must not read as zeroes.
#[test]
fn files_that_are_cut_are_errors() {
    for (format, options) in KINDS {
        let place = Place::new();
        let (_, image) = pair(&place, format, options);
        let data = place
            .names()
            .into_iter()
            .find(|name| name.starts_with("image-"));
        let file = data.map_or(image.clone(), |name| place.path(&name));
        let len = fs::metadata(&file).unwrap().len();
        let cut = fs::File::options().write(true).open(&file).unwrap();
        cut.set_len(len / 2 / 512 * 512).unwrap();
        let out = place.path("out");
        let args = ["img", "convert", "-f", format, &image, &out];
        let failed = tool(place.0.path(), env!("CARGO_BIN_EXE_fathom"), &args);
        let said = String::from_utf8_lossy(&failed.stderr).into_owned();
        assert_eq!(failed.status.code(), Some(1), "{format} {options}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}
