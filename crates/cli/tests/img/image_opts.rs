//! Tests `--image-opts`: the same options give the same results with both tools.

use crate::encryption::{FORMATS, Locked};
use crate::place::{MIB, Place};
use crate::support::{refused, stdout_of};
use crate::{qemu_img, qemu_json};
use serde_json::{Value, json};
use std::fs;

fn ours(args: &[&str]) -> Value {
    serde_json::from_str(&stdout_of(&[&["img"], args].concat())).expect("JSON")
}

#[test]
fn images_are_told_of_as_qemu_has_it() {
    let place = Place::new();
    for (format, name) in [("qcow2", "a,b"), ("raw", "nbd:x"), ("qed", "c d")] {
        let path = place.path(name);
        let create = ["create", "-q", "-f", format, &format!("file:{path}"), "8M"];
        qemu_img(&create);
        let path = path.replace(',', ",,");
        let opts = format!("driver={format},file.driver=file,file.filename={path}");
        let io = ["-c", "write -P 7 1M 1M", "--image-opts", &opts];
        let written = std::process::Command::new("qemu-io").args(io).output();
        assert!(written.expect("qemu-io").status.success());
        for command in ["info", "map", "measure"] {
            let args = [command, "--output=json", "--image-opts", &opts];
            let (ours, theirs) = (ours(&args), qemu_json(&args));
            match command {
                // Other tests compare the rest of the output.
                "info" => assert_eq!(ours["filename"], theirs["filename"], "{opts}"),
                _ => assert_eq!(ours, theirs, "{command} {opts}"),
            }
        }
        // The image is opened with the driver that the options name.
        let bytes = format!("driver=file,filename={path}");
        let args = ["info", "--output=json", "--image-opts", &bytes];
        assert_eq!(
            ours(&args)["virtual-size"],
            qemu_json(&args)["virtual-size"]
        );
        let (copy, target) = (place.path("copy"), place.path("raw"));
        stdout_of(&[
            "img",
            "convert",
            "--image-opts",
            "-O",
            "qcow2",
            &opts,
            &copy,
        ]);
        let copied = format!("file.filename={copy}");
        stdout_of(&["img", "compare", "--image-opts", &opts, &copied]);
        qemu_img(&["compare", "--image-opts", &opts, &copied]);
        fs::write(&target, vec![0; 8 * MIB as usize]).unwrap();
        let onto = ["img", "convert", "-n", "--target-image-opts", &copy];
        let target_opts = format!("driver=raw,file.driver=file,file.filename={target}");
        stdout_of(&[&onto[..], &[&target_opts]].concat());
        qemu_img(&["compare", "-F", "raw", &copy, &target]);
        let of = format!("of={}", place.path("part"));
        let part = format!("if={opts}");
        stdout_of(&["img", "dd", "--image-opts", &part, &of, "bs=1M", "count=2"]);
        let part = fs::read(place.path("part")).unwrap();
        let is = |range: &[u8], byte: u8| range.iter().all(|b| *b == byte);
        assert!(part.len() == 2 << 20 && is(&part[..1 << 20], 0) && is(&part[1 << 20..], 7));
        for name in ["copy", "raw", "part"] {
            fs::remove_file(place.path(name)).unwrap();
        }
    }
}

#[test]
fn json_names_mean_the_same_image_as_for_qemu() {
    let place = Place::new();
    let path = place.path("a,b c");
    qemu_img(&["create", "-q", "-f", "qcow2", &path, "8M"]);
    for name in [
        json!({"driver": "qcow2", "file": {"driver": "file", "filename": &path}}),
        json!({"driver": "raw", "file.driver": "file", "file.filename": &path}),
        json!({"file": {"filename": &path}}),
    ] {
        let name = format!("json:{name}");
        for command in ["info", "map", "measure"] {
            let args = [command, "--output=json", &name];
            let (ours, theirs) = (ours(&args), qemu_json(&args));
            match command {
                "info" => assert_eq!(ours["virtual-size"], theirs["virtual-size"], "{name}"),
                _ => assert_eq!(ours, theirs, "{command} {name}"),
            }
        }
        let copy = place.path("copy");
        stdout_of(&["img", "convert", "-O", "qcow2", &name, &copy]);
        qemu_img(&["compare", "-F", "qcow2", &name, &copy]);
        fs::remove_file(copy).unwrap();
    }
    let with_format = [
        "img",
        "info",
        "-f",
        "raw",
        "json:{\"file.filename\": \"x\"}",
    ];
    refused(2, &with_format, &["omit -f"]);
    refused(2, &["img", "info", "json:{"], &["./json:"]);
    refused(2, &["img", "info", "json:{\"driver\": [1]}"], &["'driver'"]);
    // The backing file name in an image must name nothing but a file.
    let overlay = place.path("overlay");
    let below = format!("json:{}", json!({"driver": "raw", "file.filename": &path}));
    stdout_of(&[
        "img", "create", "-f", "qcow2", "-u", "-b", &below, "-F", "raw", &overlay, "8M",
    ]);
    refused(2, &["img", "compare", &overlay, &path], &["json:"]);
}

#[test]
fn what_changes_an_image_finds_it_so_too() {
    let place = Place::new();
    let base = place.image("base", "qcow2", &[], &["write -P 1 0 4M"]);
    let writes = ["write -P 2 1M 1M"];
    let top = place.image("top", "qcow2", &["-b", &base, "-F", "qcow2"], &writes);
    let opts = format!("driver=qcow2,file.filename={top}");
    let img = |command: &[&str], more: &[&str]| {
        let image = ["--image-opts", &opts];
        stdout_of(&[&["img"], command, &image, more].concat())
    };
    img(&["bitmap", "--add"], &["b"]);
    assert!(img(&["bitmap", "--list"], &[]).contains('b'));
    img(&["snapshot", "-c", "s"], &[]);
    img(&["check", "-q"], &[]);
    img(&["amend", "-o", "refcount_bits=64"], &[]);
    img(&["resize", "-q"], &["24M"]);
    img(&["snapshot", "-d", "s"], &[]);
    img(&["bitmap", "--remove"], &["b"]);
    img(&["commit", "-q"], &[]);
    img(&["rebase", "-b", ""], &[]);
    let found = qemu_json(&["info", "--output=json", &top]);
    assert_eq!(found["virtual-size"], 24 * MIB);
    assert_eq!(found["format-specific"]["data"]["refcount-bits"], 64);
    assert_eq!(found.get("backing-filename"), None);
    place.sound("qcow2", &top);
    // Options with a meaning that the command does not support are rejected, and nothing is
    // changed.
    let before = fs::read(&top).unwrap();
    for (more, why) in [
        ("force-share=on", "-U"),
        ("read-only=on", "read-only"),
        ("backing.driver=raw", "backing file"),
        ("file.locking=off", "file.locking"),
    ] {
        let opts = format!("{opts},{more}");
        refused(2, &["img", "resize", "--image-opts", &opts, "25M"], &[why]);
    }
    let both = ["img", "resize", "-f", "qcow2", "--image-opts", &opts, "25M"];
    refused(2, &both, &["driver=FORMAT"]);
    let target = ["img", "convert", "-n", "--target-image-opts", &base];
    let no_driver = format!("file.filename={top}");
    refused(
        1,
        &[&target[..], &[&no_driver]].concat(),
        &["driver=FORMAT"],
    );
    assert!(fs::read(&top).unwrap() == before);
}

#[test]
fn keys_are_told_of_by_objects() {
    let locked = Locked::new();
    for format in FORMATS {
        let image = locked.path(format);
        let args = ["create", "-q", "-f", format, "-o", Locked::options(format)];
        stdout_of(&[&["img"], &args[..], &["--key", &locked.key, &image, "4M"]].concat());
        let opts = Locked::opens(format, &image);
        let (secret, raw) = (locked.secret("key"), locked.path("raw"));
        let from = ["img", "convert", "--image-opts", &opts, &raw];
        refused(1, &from, &["'s'", "--object secret,id=s,file=PATH"]);
        stdout_of(&[&from[..], &["--object", &secret]].concat());
        let plain = format!("driver=raw,file.filename={raw}");
        let compare = [
            "img",
            "compare",
            "--object",
            &secret,
            "--image-opts",
            &opts,
            &plain,
        ];
        stdout_of(&compare);
        for command in ["measure", "info"] {
            let command = ["img", command, "--object", &secret, "--image-opts", &opts];
            stdout_of(&command);
        }
        let resize = [
            "img",
            "resize",
            "--object",
            &secret,
            "--image-opts",
            &opts,
            "5M",
        ];
        stdout_of(&resize);
        fs::remove_file(raw).unwrap();
    }
}
