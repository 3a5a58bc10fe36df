//! Compares `fathom img compare` with `qemu-img compare`.

use crate::place::{Place, raw};
use crate::qemu_img;
use crate::support::nbd::tool;
use crate::support::run;
use std::fs;

#[test]
fn disks_are_compared_as_qemu_img_does() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    let bytes = fs::read(&disk).unwrap();
    let image = place.path("image");
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", &disk, &image]);
    let other = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = bytes.clone();
        change(&mut bytes);
        let path = place.path(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let others = [
        disk.clone(),
        other("first", &|b| b[0] ^= 1),
        other("last", &|b| *b.last_mut().unwrap() ^= 1),
        other("hole", &|b| b[5 << 20] = 1),
        other("two", &|b| {
            b[10_000_000] ^= 4;
            b[4_000_000] ^= 4;
        }),
        other("first-and-longer", &|b| {
            b[0] ^= 1;
            b.resize(14 << 20, 0);
        }),
        other("longer", &|b| b.resize(14 << 20, 0)),
        other("longer-data", &|b| b.resize(14 << 20, 3)),
        other("shorter", &|b| b.truncate(11 << 20)),
        place.path("none"),
    ];
    for (n, other) in others.iter().enumerate() {
        // In strict mode, the differences that QEMU finds depend on how it queried the file system.
        let strict = ["-s", "-f", "raw", "-F", "raw"];
        let strict = if matches!(n, 0 | 5 | 6 | 8) {
            &strict[..]
        } else {
            &strict[1..]
        };
        for (one, two, args) in [
            (&image, other, &["-f", "qcow2", "-F", "raw"][..]),
            (other, &image, &["-f", "raw", "-F", "qcow2"]),
            (&disk, other, strict),
        ] {
            let args = [&["compare"], args, &[one, two]].concat();
            let theirs = tool(place.0.path(), "qemu-img", &args);
            let mine = run(&[&["img"], &args[..]].concat());
            assert_eq!(mine.status.code(), theirs.status.code(), "{args:?}");
            let text =
                |output: &std::process::Output| String::from_utf8(output.stdout.clone()).unwrap();
            assert_eq!(text(&mine), text(&theirs), "{args:?}");
        }
    }
}
