//! Tests encrypted images: Fathom reads those of QEMU and cryptsetup, and they read Fathom's.

use crate::place::{MIB, Place, raw};
use crate::support::nbd::tool;
use crate::support::{refused, stdout_of};
use crate::{qemu_img, qemu_json};
use std::fs::{self, File};
use std::process::Output;

pub const FORMATS: [&str; 2] = ["luks", "qcow2"];

/// A directory for encrypted images, and the file with their key.
pub struct Locked {
    pub place: Place,
    pub key: String,
}

impl Locked {
    pub fn new() -> Locked {
        let locked = Locked {
            place: Place::new(),
            key: String::new(),
        };
        let key = locked.key("key", "a secret\n");
        Locked { key, ..locked }
    }

    /// Writes another key to a file. Returns the value of the option for it.
    pub fn key(&self, name: &str, key: &str) -> String {
        let path = self.place.path(name);
        fs::write(&path, key).unwrap();
        format!("file:{path}")
    }

    pub fn path(&self, name: &str) -> String {
        self.place.path(name)
    }

    /// Returns QEMU's option for the key in this file.
    pub fn secret(&self, name: &str) -> String {
        format!("secret,id=s,file={}", self.place.path(name))
    }

    /// Returns the options that create such an image, for both tools.
    pub fn options(format: &str) -> &'static str {
        match format {
            "luks" => "iter-time=10",
            _ => "encrypt.format=luks,encrypt.iter-time=10",
        }
    }

    /// Returns the options with which QEMU opens the image.
    pub fn opens(format: &str, image: &str) -> String {
        let key = match format {
            "luks" => "key-secret=s",
            _ => "encrypt.format=luks,encrypt.key-secret=s",
        };
        format!("driver={format},file.filename={image},{key}")
    }

    fn same(&self, format: &str, image: &str, raw: &str) {
        let (opens, raw) = (
            Locked::opens(format, image),
            format!("driver=raw,file.filename={raw}"),
        );
        let secret = self.secret("key");
        qemu_img(&["compare", "--object", &secret, "--image-opts", &opens, &raw]);
        if format == "qcow2" {
            qemu_img(&["check", "-q", "--object", &secret, "--image-opts", &opens]);
            stdout_of(&["img", "check", "-q", image]);
        }
    }

    fn cryptsetup(&self, args: &[&str]) -> Output {
        tool(self.place.0.path(), "cryptsetup", args)
    }

    /// Returns whether cryptsetup opens the image with that key.
    pub fn opens_by(&self, image: &str, key: &str) -> bool {
        let key = self.path(key);
        let args = ["open", "--test-passphrase", "--key-file", &key, image];
        self.cryptsetup(&args).status.success()
    }
}

#[test]
fn each_reads_what_the_other_has_encrypted() {
    let locked = Locked::new();
    let plain = raw(&locked.place, "plain");
    let (theirs, ours, back) = (
        locked.path("theirs"),
        locked.path("ours"),
        locked.path("back"),
    );
    for format in FORMATS {
        let options = Locked::options(format);
        let convert = ["img", "convert", "-q", "--key", &locked.key];
        stdout_of(
            &[
                &convert[..],
                &["-f", "raw", "-O", format, "-o", options, &plain, &ours],
            ]
            .concat(),
        );
        locked.same(format, &ours, &plain);
        let secret = locked.secret("key");
        let with_key = match format {
            "luks" => format!("{options},key-secret=s"),
            _ => format!("{options},encrypt.key-secret=s"),
        };
        let args = [
            "convert", "--object", &secret, "-f", "raw", "-O", format, "-o", &with_key,
        ];
        qemu_img(&[&args[..], &[&plain, &theirs]].concat());
        for image in [&theirs, &ours] {
            stdout_of(&[&convert[..], &["-f", format, "-O", "raw", image, &back]].concat());
            assert!(
                fs::read(&back).unwrap() == fs::read(&plain).unwrap(),
                "{format}"
            );
            let compare = [
                "img",
                "compare",
                "--key",
                &locked.key,
                "-F",
                "raw",
                image,
                &plain,
            ];
            stdout_of(&compare);
            let mine: serde_json::Value =
                serde_json::from_str(&stdout_of(&["img", "info", "--json", image])).unwrap();
            assert_eq!(
                mine,
                qemu_json(&["info", "--output=json", image]),
                "{format}"
            );
            assert_eq!(
                stdout_of(&["img", "info", image]),
                qemu_img(&["info", image])
            );
        }
    }
    // An encrypted overlay is created and then committed.
    let top = locked.path("top");
    let on = [
        "-b",
        &ours,
        "-F",
        "qcow2",
        "-f",
        "qcow2",
        "-o",
        Locked::options("qcow2"),
    ];
    stdout_of(
        &[
            &["img", "create", "-q", "--key", &locked.key],
            &on[..],
            &[&top],
        ]
        .concat(),
    );
    let opens = format!(
        "{},backing.encrypt.key-secret=s",
        Locked::opens("qcow2", &top)
    );
    let write = ["--object", &locked.secret("key"), "--image-opts", &opens];
    let done = tool(
        locked.place.0.path(),
        "qemu-io",
        &[
            &write[..],
            &["-c", "write -P 5 1000k 100k", "-c", "write -P 6 5M 512"],
        ]
        .concat(),
    );
    assert!(done.status.success(), "{done:?}");
    let mut expected = fs::read(&plain).unwrap();
    expected[1000 << 10..1100 << 10].fill(5);
    expected[5 << 20..(5 << 20) + 512].fill(6);
    fs::write(&plain, expected).unwrap();
    stdout_of(&["img", "commit", "-q", "--key", &locked.key, &top]);
    locked.same("qcow2", &ours, &plain);
}

#[test]
fn what_cryptsetup_has_made_is_read_and_written() {
    let locked = Locked::new();
    let plain = locked.path("plain");
    let image = locked.path("image");
    for (kind, sector) in [("luks1", "512"), ("luks2", "512"), ("luks2", "4096")] {
        let file = File::create(&image).unwrap();
        file.set_len(24 * MIB).unwrap();
        let key = locked.path("key");
        let mut args = vec!["luksFormat", "-q", "--type", kind, "--iter-time", "10"];
        if kind == "luks2" {
            args.extend(["--sector-size", sector, "--pbkdf-memory", "1024"]);
        }
        args.extend([&*image, &*key]);
        let made = locked.cryptsetup(&args);
        assert!(made.status.success(), "{made:?}");
        let info: serde_json::Value =
            serde_json::from_str(&stdout_of(&["img", "info", "--json", &image])).unwrap();
        let size = info["virtual-size"].as_u64().unwrap();
        let bytes: Vec<u8> = (0..size)
            .map(|at| (at / 512 * 7 + at % 251) as u8)
            .collect();
        fs::write(&plain, bytes).unwrap();
        let both = ["--key", &locked.key, "-f", "raw"];
        stdout_of(
            &[
                &["img", "convert", "-q", "-n"],
                &both[..],
                &["-O", "luks", &plain, &image],
            ]
            .concat(),
        );
        // The decrypted data is what was written.
        stdout_of(
            &[
                &["img", "compare"],
                &both[..],
                &["-F", "luks", &plain, &image],
            ]
            .concat(),
        );
        let decrypt = [
            "reencrypt",
            "-q",
            "--force-offline-reencrypt",
            "--decrypt",
            "--key-file",
            &key,
        ];
        if kind == "luks2" {
            let header = locked.path("header");
            let _ = fs::remove_file(&header);
            let done = locked.cryptsetup(&[&decrypt[..], &["--header", &header, &image]].concat());
            assert!(done.status.success(), "{done:?}");
            let decrypted = fs::read(&image).unwrap();
            assert!(
                decrypted[..size as usize] == fs::read(&plain).unwrap(),
                "{kind} {sector}"
            );
        }
    }
}

#[test]
fn what_cannot_be_encrypted_is_told_first() {
    let locked = Locked::new();
    let image = locked.path("image");
    let plain = raw(&locked.place, "plain");
    let create = |format: &str, options: &str, words: &[&str]| {
        let args = [
            "img",
            "create",
            "--key",
            &locked.key,
            "-f",
            format,
            "-o",
            options,
            &image,
            "1M",
        ];
        refused(1, &args, words);
        assert!(!fs::exists(&image).unwrap(), "{options}");
    };
    let qcow2 = |more: &str| format!("{},{more}", Locked::options("qcow2"));
    create("qcow2", &qcow2("preallocation=full"), &["preallocated"]);
    create("qcow2", &qcow2("data_file=data"), &["data_file"]);
    create("qcow2", "encrypt.iter-time=10", &["encrypt.format=luks"]);
    create("qcow2", "encrypt.format=aes", &["luks"]);
    create("luks", "cipher-alg=serpent-256", &["aes-256"]);
    create("luks", "iter-time=0", &["iter-time"]);
    create("luks", "sector-size=4096", &["LUKS2"]);
    create("luks", "version=2,sector-size=1000", &["sectors"]);
    let convert = ["img", "convert", "--key", &locked.key, "-f", "raw"];
    let compressed = [
        "-c",
        "-O",
        "qcow2",
        "-o",
        Locked::options("qcow2"),
        &plain,
        &image,
    ];
    refused(1, &[&convert[..], &compressed].concat(), &["compressed"]);
    let streamed = ["-O", "qcow2", "-o", Locked::options("qcow2"), &plain, "-"];
    refused(1, &[&convert[..], &streamed].concat(), &["stream"]);
    refused(
        63,
        &["img", "check", "-f", "luks", &plain],
        &["only the metadata"],
    );
    // The size is not a whole number of sectors.
    let odd = [
        "-O",
        "luks",
        "-o",
        "version=2,sector-size=4096,iter-time=10",
        &plain,
        &image,
    ];
    refused(1, &[&convert[..], &odd].concat(), &["sector size"]);
    for (args, words) in [
        (["img", "info", "-f", "luks", &plain], "not a luks image"),
        (["img", "map", "-f", "luks", &plain], "not a luks image"),
    ] {
        refused(1, &args, &[words]);
    }
    // LUKS2 with large sectors, and a disk that grows.
    let image = locked.path("large");
    let args = [
        "img",
        "create",
        "-q",
        "--key",
        &locked.key,
        "-f",
        "luks",
        "-o",
    ];
    stdout_of(
        &[
            &args[..],
            &["version=2,sector-size=4096,iter-time=10", &image, "1M"],
        ]
        .concat(),
    );
    refused(
        1,
        &["img", "resize", "-f", "luks", &image, "1049088"],
        &["sector size"],
    );
    stdout_of(&["img", "resize", "-q", "-f", "luks", &image, "2M"]);
    let info: serde_json::Value =
        serde_json::from_str(&stdout_of(&["img", "info", "--json", &image])).unwrap();
    assert_eq!(info["virtual-size"], 2 * MIB);
    assert_eq!(info["format-specific"]["data"]["sector-size"], 4096);
}

#[test]
fn what_grows_holds_what_it_held() {
    let locked = Locked::new();
    let key = ["--key", &*locked.key];
    let image = locked.path("image");
    let size = 10 * MIB + 512;
    let plain = locked.path("plain");
    fs::write(&plain, vec![7; size as usize]).unwrap();
    let convert = |format: &str, options: &str| {
        let _ = fs::remove_file(&image);
        let args = ["-f", "raw", "-O", format, "-o", options, &plain, &image];
        stdout_of(&[&["img", "convert", "-q"], &key[..], &args].concat());
    };
    // Only the owner of the key can clear the rest of the last cluster, so nothing is changed.
    convert("qcow2", Locked::options("qcow2"));
    let before = fs::read(&image).unwrap();
    let resize = ["img", "resize", "-q"];
    refused(
        1,
        &[&resize[..], &[&image, "+1M"]].concat(),
        &["while it is served"],
    );
    let preallocated = ["--preallocation", "full", &image, "+1M"];
    refused(1, &[&resize[..], &preallocated].concat(), &["preallocated"]);
    assert!(fs::read(&image).unwrap() == before);
    // With whole clusters, no key is needed.
    convert(
        "qcow2",
        "cluster_size=512,encrypt.format=luks,encrypt.iter-time=10",
    );
    stdout_of(&[&resize[..], &[&image, "+1M"]].concat());
    let file = File::options().write(true).open(&plain).unwrap();
    file.set_len(size + MIB).unwrap();
    locked.same("qcow2", &image, &plain);
    // The backing image may be encrypted.
    let top = locked.path("top");
    let create = ["-f", "qcow2", "-b", &image, "-F", "qcow2", &top];
    stdout_of(&[&["img", "create", "-q"], &key[..], &create].concat());
    refused(1, &[&resize[..], &[&top, "+1M"]].concat(), &["--key"]);
    stdout_of(&[&resize[..], &key, &[&top, "+1M"]].concat());
    // A LUKS image would grow by bytes that decrypt to arbitrary data.
    let base = locked.path("base");
    let luks = [
        "-f",
        "raw",
        "-O",
        "luks",
        "-o",
        "iter-time=10",
        &plain,
        &base,
    ];
    stdout_of(&[&["img", "convert", "-q"], &key[..], &luks].concat());
    let create = ["-f", "qcow2", "-b", &base, "-F", "luks", &top, "20M"];
    stdout_of(&[&["img", "create", "-q"], &key[..], &create].concat());
    refused(
        1,
        &[&["img", "commit", "-q"], &key[..], &[&top]].concat(),
        &["smaller"],
    );
    locked.same("luks", &base, &plain);
    let map = ["img", "map", "--output", "json", "--key", &locked.key];
    let mapped: serde_json::Value =
        serde_json::from_str(&stdout_of(&[&map[..], &[&base]].concat())).unwrap();
    assert!(
        mapped[0]["data"] == true && mapped[0].get("offset").is_none(),
        "{mapped}"
    );
}

#[test]
fn what_is_written_in_large_sectors_takes_small_ones() {
    let locked = Locked::new();
    let key = ["--key", &*locked.key];
    let (base, top, plain) = (
        locked.path("base"),
        locked.path("top"),
        locked.path("plain"),
    );
    let luks = "version=2,sector-size=4096,iter-time=10";
    let zeroes = locked.path("zeroes");
    fs::write(&zeroes, vec![0; 4 << 20]).unwrap();
    let convert = ["img", "convert", "-q", "--key", &locked.key];
    let to_luks = ["-f", "raw", "-O", "luks", "-o", luks, &zeroes, &base];
    stdout_of(&[&convert[..], &to_luks].concat());
    let create = [
        "-f",
        "qcow2",
        "-o",
        "cluster_size=512",
        "-b",
        &base,
        "-F",
        "luks",
        &top,
    ];
    stdout_of(&[&["img", "create", "-q"], &key[..], &create].concat());
    let mut expected = vec![0; 4 << 20];
    let source = locked.path("source");
    for sector in [1, 2, 9, 700, 8191_usize] {
        expected[sector * 512..(sector + 1) * 512].fill(sector as u8 | 1);
    }
    fs::write(&plain, &expected).unwrap();
    // The images differ in sectors that are data in one and zeroes in the other.
    let small = [
        "-f",
        "raw",
        "-O",
        "qcow2",
        "-o",
        "cluster_size=512",
        &plain,
        &source,
    ];
    stdout_of(&[&convert[..], &small].concat());
    let into = ["-n", "-O", "luks", &source, &base];
    stdout_of(&[&convert[..], &into].concat());
    stdout_of(&[
        "img",
        "compare",
        "--key",
        &locked.key,
        "-F",
        "raw",
        &base,
        &plain,
    ]);
    expected[3 * 512..4 * 512].fill(77);
    fs::write(&plain, &expected).unwrap();
    let rebase = ["img", "rebase", "-q", "-u", "-b", "", &top];
    stdout_of(&rebase);
    let done = tool(
        locked.place.0.path(),
        "qemu-io",
        &["-f", "qcow2", "-c", "write -P 77 1536 512", &top],
    );
    assert!(done.status.success());
    stdout_of(&["img", "rebase", "-q", "-u", "-b", &base, "-F", "luks", &top]);
    stdout_of(&[&["img", "commit", "-q"], &key[..], &[&top]].concat());
    stdout_of(&[
        "img",
        "compare",
        "--key",
        &locked.key,
        "-F",
        "raw",
        &base,
        &plain,
    ]);
}
