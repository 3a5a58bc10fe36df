//! Tests behaviour of qemu-img that scripts rely on.

use crate::place::Place;
use crate::qemu_img;
use crate::support::nbd::tool;
use crate::support::{fathom, run, stdout_of};
use std::fs;

/// Returns the exit statuses of both tools, whose messages may differ.
fn statuses(place: &Place, args: &[&str]) -> [Option<i32>; 2] {
    let mine = fathom()
        .arg("img")
        .args(args)
        .current_dir(place.0.path())
        .output();
    let theirs = tool(place.0.path(), "qemu-img", args);
    [mine.unwrap().status.code(), theirs.status.code()]
}

#[test]
fn a_base_is_named_as_seen_from_its_image() {
    let chain = || {
        let place = Place::new();
        fs::create_dir(place.path("sub")).unwrap();
        place.image("sub/bottom", "qcow2", &[], &[]);
        place.image("sub/mid", "qcow2", &["-b", "bottom", "-F", "qcow2"], &[]);
        let on = ["-b", "mid", "-F", "qcow2"];
        place.image("sub/top", "qcow2", &on, &["write -P 1 0 1M"]);
        // Another image of that name, in the directory where the command runs.
        place.image("bottom", "qcow2", &[], &[]);
        place
    };
    let absolute = chain();
    let bottom = absolute.path("sub/bottom");
    for (place, name, status) in [
        (chain(), "bottom", 0),
        (chain(), "./bottom", 0),
        (chain(), "sub/bottom", 1),
        (absolute, &bottom, 0),
    ] {
        let args = ["commit", "-b", name, "sub/top"];
        assert_eq!(statuses(&place, &args), [Some(status); 2], "{name}");
        if status == 0 {
            qemu_img(&["compare", &place.path("sub/bottom"), &place.path("sub/top")]);
        }
    }
}

/// A format given with `-o`, options given twice, and sizes with a decimal point.
#[test]
fn options_are_taken_as_qemu_img_takes_them() {
    let place = Place::new();
    let base = place.image("base", "qcow2", &[], &["write -P 1 0 1M"]);
    let on = ["-b", &base, "-F", "qcow2"];
    let top = place.image("top", "qcow2", &on, &["write -P 2 0 64k"]);
    let converted = ["convert", "-O", "qcow2"];
    let all: [&[&str]; 7] = [
        &[
            &converted[..],
            &["-B", &base, "-o", "backing_fmt=qcow2", &top],
        ]
        .concat(),
        &[
            &converted[..],
            &["-B", &base, "-F", "raw", "-F", "qcow2", &top],
        ]
        .concat(),
        &[
            &converted[..],
            &["-m", "2", "-m", "4", "-S", "0", "-S", "4k", &top],
        ]
        .concat(),
        &[
            "create", "-q", "-f", "raw", "-f", "qcow2", "-b", &base, "-F", "raw", "-F", "qcow2",
        ],
        &[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            "cluster_size=4096.0,size=1024.0",
        ],
        &["create", "-q", "-f", "qcow2", "-o", "size=1.50k"],
        &["create", "-q", "-f", "qcow2", "-o", "size=512b"],
    ];
    for args in all {
        let (mine, theirs) = (place.path("mine"), place.path("theirs"));
        stdout_of(&[&["img"], args, &[&mine]].concat());
        qemu_img(&[args, &[&theirs]].concat());
        let told = |image: &str| {
            let info = crate::qemu_json(&["info", "--output=json", image]);
            let names = ["virtual-size", "backing-filename-format", "cluster-size"];
            names.map(|name| info[name].clone())
        };
        assert_eq!(told(&mine), told(&theirs), "{args:?}");
        qemu_img(&["compare", &mine, &theirs]);
    }
    // A size must be a whole number of bytes.
    let odd = ["create", "-q", "-f", "qcow2", "odd", "1024.5"];
    assert!(!statuses(&place, &odd).contains(&Some(0)));
}

/// Returns where the header extension of this kind has its data, and where all extensions end.
fn extensions(image: &[u8], kind: u32) -> (Option<usize>, usize) {
    let word = |at: usize| u32::from_be_bytes(image[at..at + 4].try_into().unwrap());
    let mut at = word(100) as usize;
    let mut found = None;
    while word(at) != 0 {
        if word(at) == kind {
            found = Some(at + 8);
        }
        at += 8 + (word(at + 4) as usize).next_multiple_of(8);
    }
    (found, at)
}

const BACKING_FORMAT: u32 = 0xe279_2aca;
const BITMAPS: u32 = 0x2385_2875;
const CRYPTO: u32 = 0x0537_be77;

#[test]
fn of_two_extensions_of_a_kind_the_last_counts() {
    let place = Place::new();
    let base = place.image("base", "qcow2", &[], &["write -P 1 0 1M"]);
    let image = place.image("image", "qcow2", &["-b", &base, "-F", "raw"], &[]);
    let mut bytes = fs::read(&image).unwrap();
    // The name of the backing file is stored behind the extensions.
    let (_, end) = extensions(&bytes, BACKING_FORMAT);
    let name_at = u64::from_be_bytes(bytes[8..16].try_into().unwrap()) as usize;
    let name_len = base.len();
    bytes.copy_within(name_at..name_at + name_len, 4096);
    bytes[8..16].copy_from_slice(&4096_u64.to_be_bytes());
    bytes[end..4096].fill(0);
    bytes[end..end + 4].copy_from_slice(&BACKING_FORMAT.to_be_bytes());
    bytes[end + 4..end + 8].copy_from_slice(&5_u32.to_be_bytes());
    bytes[end + 8..end + 13].copy_from_slice(b"qcow2");
    fs::write(&image, bytes).unwrap();
    assert_eq!(
        stdout_of(&["img", "info", &image]),
        qemu_img(&["info", &image])
    );
    let (mine, theirs) = (place.path("mine"), place.path("theirs"));
    stdout_of(&["img", "convert", &image, &mine]);
    qemu_img(&["convert", "-O", "raw", &image, &theirs]);
    place.same("raw", &mine, &theirs);
}

#[test]
fn what_contradicts_itself_is_not_described() {
    let place = Place::new();
    let image = place.image("image", "qcow2", &[], &[]);
    qemu_img(&["bitmap", "--add", &image, "b0"]);
    let bitmaps = fs::read(&image).unwrap();
    let at = extensions(&bitmaps, BITMAPS).0.unwrap() + 16;
    let directory = u64::from_be_bytes(bitmaps[at..at + 8].try_into().unwrap()) as usize;
    let table = u64::from_be_bytes(bitmaps[directory..directory + 8].try_into().unwrap()) as usize;
    let secret = [
        "--object",
        "secret,id=s,data=abc",
        "-q",
        "-f",
        "qcow2",
        "-o",
    ];
    let luks = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    let encrypted = place.path("encrypted");
    qemu_img(&[&["create"], &secret[..], &[luks, &encrypted, "1M"]].concat());
    let encrypted = fs::read(encrypted).unwrap();
    let crypto = extensions(&encrypted, CRYPTO).0.unwrap();
    let header = u64::from_be_bytes(encrypted[crypto..crypto + 8].try_into().unwrap()) as usize;
    let broken = place.path("broken");
    // The name of the case, the image, the offset and the bytes to write, and the status of `info`.
    type Broken<'a> = (&'a str, &'a [u8], usize, &'a [u8], i32);
    let cases: [Broken; 12] = [
        ("bitmaps", &bitmaps, 0, b"", 0),
        ("directory's place", &bitmaps, at, &[0, 0, 0, 1], 1),
        ("table's size", &bitmaps, directory + 8, &[0, 0, 0, 5], 1),
        ("table's place", &bitmaps, directory, &[0, 0, 0, 1], 0),
        ("table's entry", &bitmaps, table, &[0x80], 1),
        ("encryption", &encrypted, 0, b"", 0),
        ("its header's place", &encrypted, crypto, &[0, 0, 0, 1], 1),
        ("no whole cluster", &encrypted, crypto + 7, &[8], 1),
        ("its header's length", &encrypted, crypto + 8, &[0; 8], 1),
        ("its header", &encrypted, header, b"SKUL", 1),
        ("its version", &encrypted, header + 7, &[9], 1),
        ("no place for it", &encrypted, crypto - 8, &[7; 4], 1),
    ];
    for (what, image, at, change, status) in cases {
        let mut image = image.to_vec();
        image[at..at + change.len()].copy_from_slice(change);
        fs::write(&broken, image).unwrap();
        let told = statuses(&place, &["info", &broken]);
        assert_eq!(told, [Some(status); 2], "{what}");
        let mine = run(&["img", "info", &broken]);
        let lines = String::from_utf8(mine.stderr).unwrap().lines().count();
        assert_eq!(lines, usize::from(status == 1), "{what}");
    }
}
