//! Tests untrusted images that name files of others.

use crate::place::Place;
use crate::support::{as_arg, refused, run, stdout_of};
use crate::{qemu_img, qemu_json};
use std::fs;

/// Creates an image that names its neighbour as its data file. Also returns the neighbour's
/// contents.
fn stranger(place: &Place, name: &str, args: &[&str]) -> (String, Vec<u8>) {
    let victim = place.path("victim");
    let option = format!("data_file={victim}");
    let options = [&["-o", &option], args].concat();
    let image = place.image(name, "qcow2", &options, &[]);
    fs::write(&victim, vec![0x5a; 20 << 20]).unwrap();
    (image, fs::read(victim).unwrap())
}

#[test]
fn what_only_an_image_calls_its_data_file_is_not_written_to() {
    let place = Place::new();
    let base = place.image("base", "qcow2", &[], &["write -P 1 0 1M"]);
    place.image("other", "qcow2", &[], &["write -P 2 0 1M"]);
    let raw = place.path("raw");
    fs::write(&raw, vec![7; 20 << 20]).unwrap();
    let on_base = ["-b", &base, "-F", "qcow2"];
    let commands: [(&[&str], &[&str]); 5] = [
        (&["resize", "--shrink", "{}", "64k"], &[]),
        (&["resize", "{}", "30M"], &[]),
        (&["convert", "-n", "-O", "qcow2", &raw, "{}"], &[]),
        (&["rebase", "-b", "other", "-F", "qcow2", "{}"], &on_base),
        (&["commit", "top"], &[]),
    ];
    for (command, options) in commands {
        let (image, before) = stranger(&place, "evil", options);
        let top = place.image("top", "qcow2", &["-b", &image, "-F", "qcow2"], &[]);
        place.write("top", "qcow2", &["write -P 3 0 1M"]);
        let header = fs::read(&image).unwrap();
        let victim = place.path("victim");
        let given = |arg: &&str| arg.replace("{}", &image).replace("top", &top);
        let args: Vec<String> = command.iter().map(given).collect();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let advice = format!("--data-file {victim}");
        refused(1, &[&["img"], &args[..]].concat(), &["evil: ", &advice]);
        assert!(fs::read(&victim).unwrap() == before, "{command:?}");
        assert!(fs::read(&image).unwrap() == header, "{command:?}");
        // Allowing a directory is not sufficient; the user must name the file.
        let dir = as_arg(place.0.path());
        let allowed = [&["img", args[0], "--allow-dir", &dir], &args[1..]].concat();
        refused(1, &allowed, &[&advice]);
        let named = [&["img", args[0], "--data-file", &victim], &args[1..]].concat();
        stdout_of(&named);
        assert!(fs::read(&victim).unwrap() != before, "{command:?}");
        place.sound("qcow2", &image);
    }
    let plain = ["img", "resize", "--data-file", &raw, &base, "30M"];
    refused(1, &plain, &["base: ", "no external data file"]);
    let plain = ["img", "rebase", "--data-file", &raw, "-b", "", &base];
    refused(1, &plain, &["base: ", "no external data file"]);
    assert_eq!(fs::read(&raw).unwrap(), vec![7; 20 << 20]);
}

/// The user has named the file, so no other permission is needed.
#[test]
fn a_new_image_has_the_data_file_that_it_is_given() {
    let place = Place::new();
    let source = place.image("source", "qcow2", &[], &["write -P 1 0 1M"]);
    let (target, data) = (place.path("target"), place.path("data"));
    let option = format!("data_file={data}");
    let args = [
        "img", "convert", "-O", "qcow2", "-o", &option, &source, &target,
    ];
    stdout_of(&args);
    qemu_img(&["compare", &source, &target]);
    let stored = fs::read(&data).unwrap();
    assert!(stored.windows(4096).any(|bytes| bytes == [1; 4096]));
}

/// All commands read the files that an image names only where the user allows it.
#[test]
fn backing_files_elsewhere_are_not_even_looked_at() {
    let (place, elsewhere) = (Place::new(), Place::new());
    let far = elsewhere.image("far", "qcow2", &[], &["write -P 1 0 1M"]);
    let mid = place.image("mid", "qcow2", &["-b", &far, "-F", "qcow2"], &[]);
    let top = place.image(
        "top",
        "qcow2",
        &["-b", "mid", "-F", "qcow2"],
        &["write -P 2 0 64k"],
    );
    let alone = place.image("alone", "qcow2", &[], &["write -P 2 0 64k"]);
    let target = place.path("target");
    let before = fs::read(&mid).unwrap();
    let (dir, hidden) = (as_arg(elsewhere.0.path()), elsewhere.path("hidden"));
    let commands: [&[&str]; 5] = [
        &["info", "--backing-chain", &top],
        &["commit", &top],
        &[
            "convert", "-O", "qcow2", "-B", &mid, "-F", "qcow2", &alone, &target,
        ],
        &["rebase", "-b", &mid, "-F", "qcow2", &alone],
        &["map", &top],
    ];
    for command in commands {
        let all = [&["img"], command].concat();
        let words = ["mid: ", &format!("--allow-dir {dir}")];
        refused(1, &all, &words);
        // The error does not reveal whether the file exists.
        fs::rename(&far, &hidden).unwrap();
        refused(1, &all, &words);
        fs::rename(&hidden, &far).unwrap();
        assert!(fs::read(&mid).unwrap() == before, "{command:?}");
        let allowed = [&["img", command[0], "--allow-dir", &dir], &command[1..]].concat();
        stdout_of(&allowed);
        qemu_img(&[
            "create", "-q", "-f", "qcow2", "-b", &far, "-F", "qcow2", &mid, "20M",
        ]);
        let _ = fs::remove_file(&target);
    }
    // `info` of the image alone opens no file that the image names.
    stdout_of(&["img", "info", &mid]);
}

#[test]
fn a_chain_is_described_as_by_qemu_img() {
    let place = Place::new();
    place.image("raw", "raw", &[], &[]);
    fs::create_dir(place.path("sub")).unwrap();
    let on = |name: &str, format: &str, below: &str, is: &str| {
        place.image(name, format, &["-b", below, "-F", is], &[])
    };
    let raw = place.path("raw");
    on("sub/qed", "qed", &raw, "raw");
    on("mid", "qcow2", "sub/qed", "qed");
    let top = on("top", "qcow2", "mid", "qcow2");
    let theirs = qemu_json(&["info", "--backing-chain", "--output=json", &top]);
    let mine = stdout_of(&["img", "info", "--backing-chain", "--json", &top]);
    let mine: serde_json::Value = serde_json::from_str(&mine).unwrap();
    let told = |all: &serde_json::Value| -> Vec<_> {
        let names = ["filename", "format", "virtual-size", "backing-filename"];
        let all = all.as_array().unwrap().iter();
        all.map(|one| names.map(|name| one[name].clone())).collect()
    };
    assert_eq!(told(&mine), told(&theirs));
    assert_eq!(told(&mine).len(), 4);
    let (one, two) = (place.path("one"), place.path("two"));
    for (image, below) in [(&one, "two"), (&two, "one")] {
        qemu_img(&[
            "create", "-q", "-u", "-f", "qcow2", "-b", below, "-F", "qcow2", image, "1M",
        ]);
    }
    refused(
        1,
        &["img", "info", "--backing-chain", &one],
        &["one: ", "twice"],
    );
}

/// Names in images are printed with their control characters escaped.
#[test]
fn names_cannot_play_with_the_terminal() {
    let place = Place::new();
    let odd = "a\x1b]0;b\x07c\nd";
    let base = place.image(odd, "qcow2", &[], &["write -P 1 0 64k"]);
    let option = format!("data_file={}", place.path("data\x1b[2J"));
    place.image("data", "qcow2", &["-o", &option], &[]);
    let on = ["-b", &base, "-F", "qcow2"];
    let image = place.image("image", "qcow2", &on, &["write -P 1 1M 64k"]);
    qemu_img(&["snapshot", "-c", odd, &image]);
    qemu_img(&["bitmap", "--add", &image, odd]);
    let lost = place.path("lost");
    let on = ["-u", "-b", "c\x1b[31md", "-F", "qcow2", &lost, "1M"];
    qemu_img(&[&["create", "-q", "-f", "qcow2"], &on[..]].concat());
    let data = place.path("data");
    let commands: [&[&str]; 10] = [
        &["info", "--backing-chain", &image],
        &["info", &lost],
        &["info", &data],
        &["snapshot", "-l", &image],
        &["bitmap", "--list", &image],
        &["map", &image],
        &["info", "--backing-chain", &lost],
        &["compare", &lost, &image],
        &["measure", "-O", "qcow2", &lost],
        &["resize", &data, "30M"],
    ];
    for command in commands {
        let output = run(&[&["img"], command].concat());
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8(said).unwrap();
        let plays = said.chars().any(|c| c.is_control() && c != '\n');
        assert!(!plays, "{command:?}: {said:?}");
        assert!(said.contains("\\u{1b}"), "{command:?}: {said:?}");
    }
}
