//! Checks raw images that end in the middle of a sector of 512 bytes.

use crate::driver::with_disk;
use crate::kinds::qemu_img;
use crate::support::nbd::{Nbd, prints};
use crate::support::{Served, as_arg, disk_dir, refused, short_dir, stdout_of};
use std::fs;
use std::path::Path;

/// Length of the image in bytes: whole blocks, a whole sector, and a part of a sector.
const LEN: usize = 64 * 1024 + 512 + 100;

/// Writes a raw image of this length to `i`, and the same with zeroes up to a whole sector to
/// `whole`. Returns the bytes of `whole`.
fn images(dir: &Path) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..LEN).map(|i| (i % 251 + 1) as u8).collect();
    fs::write(dir.join("i"), &bytes).unwrap();
    bytes.resize(LEN.next_multiple_of(512), 0);
    fs::write(dir.join("whole"), &bytes).unwrap();
    bytes
}

#[test]
fn read_only_disk_ends_with_zeroes_in_its_last_sector() {
    // In a file system on a disk, and in memory.
    for dir in [disk_dir(), short_dir()] {
        let expected = images(dir.path());
        let image = as_arg(&dir.path().join("i"));
        for args in [
            &["--cache", "none"][..],
            &["--cache", "none", "--aio", "native"],
            &["--cache", "writeback", "--aio", "threads"],
            &["--cache", "writeback"],
            &["--offset", "0"],
            &["--filter", "cow"],
        ] {
            let readonly = if args == ["--filter", "cow"] {
                &[][..]
            } else {
                &["--readonly"]
            };
            let served = Served::start(&image, &[args, readonly].concat());
            with_disk(&served.arg("s"), 1, |disk| {
                assert!(disk.contents() == expected, "{args:?}");
            });
        }
        assert_eq!(fs::metadata(&image).unwrap().len(), LEN as u64);
        // Fathom's tools and QEMU read the image in the same way.
        let args = ["img", "compare", "-f", "raw", "-F", "raw", &image];
        stdout_of(&[&args[..], &[&as_arg(&dir.path().join("whole"))]].concat());
        qemu_img(
            dir.path(),
            &["compare", "-f", "raw", "-F", "raw", "i", "whole"],
        );
    }
}

#[test]
fn read_of_a_sector_that_was_cut_off_fails() {
    let dir = disk_dir();
    images(dir.path());
    let image = as_arg(&dir.path().join("i"));
    let served = Nbd::start(&image, &["--readonly"]);
    fs::OpenOptions::new()
        .write(true)
        .open(&image)
        .unwrap()
        .set_len(64 * 1024)
        .unwrap();
    let said = served.python(
        "import nbd, os\n\
         h = nbd.NBD()\n\
         h.connect_uri(os.environ['URI'])\n\
         h.pread(65536, 0)\n\
         try:\n\
         \x20   h.pread(512, 65536)\n\
         \x20   print('read')\n\
         except nbd.Error as error:\n\
         \x20   print(error.errno)\n",
        &[],
    );
    assert_eq!(said.trim(), "EIO");
}

#[test]
fn writable_disk_needs_whole_sectors() {
    let dir = disk_dir();
    images(dir.path());
    let sockets = short_dir();
    let (image, socket) = (
        as_arg(&dir.path().join("i")),
        as_arg(&sockets.path().join("s")),
    );
    let serve = ["serve", &image, "--vhost-user", &socket];
    for more in [&[][..], &["--offset", "512"]] {
        refused(
            1,
            &[&serve, more].concat(),
            &["not a multiple of 512", "truncate -s %512"],
        );
    }
    // The suggested command helps.
    prints(dir.path(), "truncate", &["-s", "%512", "i"]);
    let served = Served::start(&image, &[]);
    with_disk(&served.arg("s"), 1, |disk| {
        assert_eq!(disk.size(), LEN.next_multiple_of(512) as u64);
    });
}
