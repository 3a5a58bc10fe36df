//! Checks that `fathom img map` prints the same as `qemu-img map`.

use crate::pair::{io, sample};
use crate::support::{as_arg, disk_dir, refused, run, stdout_of};
use crate::{create, qemu_img};
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// Options of the top image; those that permit backing files get a chain of three images.
const OPTIONS: &[&str] = &[
    "cluster_size=64k",
    "extended_l2=on,cluster_size=16k",
    "preallocation=metadata",
    "preallocation=metadata,extended_l2=on",
    "cluster_size=512",
    "cluster_size=4k,refcount_bits=64",
    "extended_l2=on",
    "compat=0.10",
    "preallocation=falloc",
    "preallocation=full",
    "preallocation=metadata,cluster_size=512",
    "data_file={dir}/data,data_file_raw=on",
    "data_file={dir}/data",
    "cluster_size=2M",
];

struct Images(TempDir);

impl Images {
    fn path(&self, name: &str) -> String {
        as_arg(&self.0.path().join(name))
    }

    /// Creates a raw file with holes, a longer image on top of it, and on top a still longer one
    /// with these options.
    fn new(options: &str) -> Images {
        let images = Images(disk_dir());
        let base = images.path("base");
        create(&base, &["-q", "-osize=3M"]);
        io(&base, "raw", &["write -P 1 64k 100k", "write -P 2 1M 512k"]);
        images.add(
            "mid",
            &["-f", "qcow2", "-b", "base", "-F", "raw", "-osize=6M"],
        );
        let writes = [
            "write -P 3 2M 300k",
            "write -z 100k 100k",
            "write -P 4 4M 64k",
        ];
        io(&images.path("mid"), "qcow2", &writes);
        let below: &[&str] = match options.contains("allocation") || options.contains("data_file") {
            true => &[],
            false => &["-b", "mid", "-F", "qcow2"],
        };
        let options = options.replace("{dir}", &images.path(""));
        let options = format!("size=8M,{options}");
        images.add("top", &[&["-f", "qcow2", "-o", &options], below].concat());
        images
    }

    fn add(&self, name: &str, args: &[&str]) {
        create(&self.path(name), &[&["-q"], args].concat());
    }

    /// Compares the output of both tools for programs and for people.
    ///
    /// The output for people fails for images with compressed clusters.
    fn compare(&self, name: &str, args: &[&str]) {
        let path = self.path(name);
        for output in ["--output=json", "--output=human"] {
            let args = [&["map", output], args, &[&path]].concat();
            let mine = run(&[&["img"], &args[..]].concat());
            let theirs = Command::new("qemu-img").args(&args).output();
            let theirs = theirs.expect("qemu-img is installed by `make setup`");
            let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("UTF-8");
            assert_eq!(text(&mine.stdout), text(&theirs.stdout), "{args:?}");
            assert_eq!(mine.status.code(), theirs.status.code(), "{args:?}");
        }
    }
}

#[test]
fn maps_are_those_of_qemu_img() {
    for options in sample(OPTIONS, 4) {
        let images = Images::new(options);
        images.compare("top", &[]);
        let writes = [
            "write -P 5 0 5k",
            "write -P 5 1500k 200k",
            "write -z 3M 1M",
            "write -P 7 7M 256k",
            "discard 7M 64k",
            "write -zu 5M 128k",
        ];
        io(&images.path("top"), "qcow2", &writes);
        images.compare("top", &[]);
        // Allocated clusters cannot be written compressed.
        let never = ["data_file", "allocation", "2M"];
        if !never.iter().any(|word| options.contains(word)) {
            io(&images.path("top"), "qcow2", &["write -c -P 7 6M 256k"]);
        }
        for part in [
            &[][..],
            &["--start-offset=1M", "--max-length=3M"],
            &["--start-offset=64513", "--max-length=1"],
            &["--start-offset=9M"],
            &["-U", "--max-length=0"],
        ] {
            images.compare("top", part);
        }
        images.compare("mid", &["-f", "qcow2"]);
        images.compare("base", &["-f", "raw"]);
    }
}

#[test]
fn other_images_are_mapped_too() {
    let images = Images::new("");
    images.add(
        "qed",
        &["-f", "qed", "-b", "base", "-F", "raw", "-osize=5M"],
    );
    let writes = ["write -P 5 0 5k", "write -P 5 1500k 200k", "write -z 3M 1M"];
    io(&images.path("qed"), "qed", &writes);
    images.add(
        "on-qed",
        &["-f", "qcow2", "-b", "qed", "-F", "qed", "-osize=9M"],
    );
    images.add("large", &["-f", "qcow2", "-osize=8T"]);
    io(&images.path("large"), "qcow2", &["write 7T 1M"]);
    images.add("empty", &["-f", "qcow2", "-osize=0"]);
    std::fs::write(images.path("odd"), [1; 700]).expect("a file");
    // Clusters that are reserved, also behind the end of the backing file.
    let reserved = "size=8M,extended_l2=on,preallocation=metadata";
    let below = ["-f", "qcow2", "-b", "base", "-F", "raw"];
    images.add("reserved", &[&below[..], &["-o", reserved]].concat());
    for name in ["qed", "on-qed", "large", "empty", "odd", "reserved"] {
        images.compare(name, &[]);
    }
    // A table of the image in the middle that cannot be followed.
    let corrupt = std::fs::OpenOptions::new()
        .write(true)
        .open(images.path("mid"));
    let at = mid_l1(&images.path("mid"));
    use std::os::unix::fs::FileExt;
    corrupt
        .expect("mid")
        .write_all_at(&[1], at)
        .expect("written");
    refused(
        1,
        &["img", "map", "--json", &images.path("mid")],
        &["mid: ", "entry"],
    );
}

/// Where its L1 table is.
fn mid_l1(path: &str) -> u64 {
    let bytes = std::fs::read(path).expect("the image");
    u64::from_be_bytes(bytes[40..48].try_into().expect("8 bytes"))
}

#[test]
fn only_allowed_files_are_looked_at() {
    let images = Images::new("");
    let elsewhere = disk_dir();
    let below = as_arg(&elsewhere.path().join("below"));
    create(&below, &["-q", "-osize=1M"]);
    images.add("far", &["-f", "qcow2", "-b", &below, "-F", "raw"]);
    let far = images.path("far");
    refused(1, &["img", "map", &far], &["below", "--allow-dir"]);
    let dir = as_arg(Path::new(elsewhere.path()));
    let mine = stdout_of(&["img", "map", "--json", "--allow-dir", &dir, &far]);
    assert_eq!(mine, qemu_img(&["map", "--output=json", &far]));
}
