//! QEMU's tools, with which these tests compare Fathom.

pub mod sim;
pub mod steps;

use fathom_files::ImageFile;
use fathom_formats::offline::check::{Options, Repair, Report, check};
use fathom_formats::offline::create;
use fathom_formats::offline::info::{Info, Protocol};
use fathom_formats::served::Keys;
use fathom_formats::{Error, Format};
use fathom_luks::Passphrase;
use serde_json::Value;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use tempfile::TempDir;

/// Creates a directory for images, in memory if possible, because QEMU's tools flush everything.
pub fn dir() -> TempDir {
    let memory = Path::new("/dev/shm");
    let made = match memory.is_dir() {
        true => tempfile::tempdir_in(memory),
        false => tempfile::tempdir(),
    };
    made.expect("a directory")
}

/// Returns the number in this environment variable.
pub fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    let number = text.parse();
    Some(number.unwrap_or_else(|_| panic!("{name} is no number: {text}")))
}

/// Returns FATHOM_ROUNDS times the usual number of rounds.
pub fn rounds(usual: u64) -> u64 {
    usual * number("FATHOM_ROUNDS").unwrap_or(1)
}

/// Runs one of QEMU's tools in `dir`, whether it succeeds or not.
pub fn run(dir: &Path, program: &str, args: &[&str]) -> Output {
    let run = Command::new(program).args(args).current_dir(dir).output();
    run.unwrap_or_else(|e| panic!("{program} is installed by `make setup`: {e}"))
}

/// Runs qemu-img, which must succeed. Returns its output.
pub fn qemu_img(dir: &Path, args: &[&str]) -> String {
    let output = run(dir, "qemu-img", args);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "qemu-img {args:?}: {errors}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Runs qemu-io commands on an image. Each must succeed.
pub fn qemu_io(dir: &Path, image: &str, format: &str, commands: &[&str]) {
    let mut args = vec!["-f", format];
    for command in commands {
        args.extend(["-c", command]);
    }
    args.push(image);
    let output = run(dir, "qemu-io", &args);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && !said.contains("failed"),
        "qemu-io {args:?}: {said} {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Runs `qemu-img check`. Returns the exit status and the JSON output, if any.
pub fn qemu_check(dir: &Path, image: &str, format: &str) -> (i32, Option<Value>) {
    qemu_checks(dir, &["-f", format, image].map(str::to_owned))
}

/// Runs `qemu-img check` with these arguments for opening the image.
pub fn qemu_checks(dir: &Path, opens: &[String]) -> (i32, Option<Value>) {
    let mut args = vec!["check", "--output=json"];
    args.extend(opens.iter().map(String::as_str));
    let output = run(dir, "qemu-img", &args);
    let json = serde_json::from_slice(&output.stdout).ok();
    (output.status.code().expect("no signal"), json)
}

/// Runs `qemu-img info`.
pub fn qemu_info(dir: &Path, image: &str) -> Value {
    serde_json::from_str(&qemu_img(dir, &["info", "--output=json", image])).expect("JSON")
}

/// Runs Fathom's check.
pub fn check_file(path: &Path, format: Format, repair: Repair) -> Result<Report, Error> {
    let file = OpenOptions::new()
        .read(true)
        .write(repair != Repair::Nothing)
        .open(path)
        .expect("the image");
    let options = Options {
        repair,
        ..Options::default()
    };
    check(&file, format, &options, &mut |_| {})
}

/// Runs Fathom's `info` on an image in `dir` as if `dir` were the current directory.
pub fn info(dir: &Path, image: &str) -> Info {
    let file = File::open(dir.join(image)).expect("the image");
    let mut info = Info::read(Path::new(image), &file, Protocol::File, None).expect("an image");
    // Names are relative to the image, which is in the current directory.
    info.path = PathBuf::from(image);
    info
}

/// The key of encrypted images, as QEMU's option.
pub const SECRET: &str = "secret,id=s,data=secret";

/// The key of encrypted images, for Fathom. Derived keys are cached.
pub fn keys() -> Keys {
    static KEYS: OnceLock<Keys> = OnceLock::new();
    let keys = || {
        Keys::new(vec![
            Passphrase::new(b"secret".to_vec()).expect("a passphrase"),
        ])
    };
    KEYS.get_or_init(keys).clone()
}

/// QEMU's arguments for opening an image, encrypted or not, after the command's name.
pub fn qemu_opens(image: &str, format: &str, encrypted: bool) -> Vec<String> {
    let key = match (encrypted, format) {
        (false, _) => "",
        (true, "luks") => ",key-secret=s",
        (true, _) => ",encrypt.format=luks,encrypt.key-secret=s",
    };
    let options = format!("driver={format},file.filename={image}{key}");
    ["--object", SECRET, "--image-opts", &options]
        .map(str::to_owned)
        .into()
}

/// Runs Fathom's `create` with options as on the command line.
pub fn create_file(dir: &Path, image: &str, format: &str, options: &[(&str, &str)], size: u64) {
    let mut parsed = create::Options::new(Format::from_name(format).expect("a format"));
    for (name, value) in options {
        parsed.set(name, value, parse_size).expect("an option");
    }
    let open = |name: &str| {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        options.open(dir.join(name)).expect("a file")
    };
    let data = parsed.qcow2.data_file.as_deref().map(open);
    let data = data.as_ref().map(|f| f as &dyn ImageFile);
    create::create(&open(image), data, &parsed, size, keys().first()).expect("an image");
}

pub fn parse_size(text: &str) -> Result<u64, String> {
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'k') => (&text[..text.len() - 1], 1 << 10),
        Some(b'M') => (&text[..text.len() - 1], 1 << 20),
        _ => (text, 1),
    };
    let number: u64 = digits.parse().map_err(|_| text.to_owned())?;
    Ok(number * unit)
}

/// Splits `name=value,...` into pairs.
pub fn pairs(options: &str) -> Vec<(&str, &str)> {
    let given = options.split(',').filter(|o| !o.is_empty());
    given
        .map(|o| o.split_once('=').expect("name=value"))
        .collect()
}

/// Many combinations of options of qcow2 images.
pub const QCOW2: &[&str] = &[
    "",
    "compat=0.10",
    "compat=0.10,cluster_size=512",
    "cluster_size=512",
    "cluster_size=512,refcount_bits=1",
    "cluster_size=1k,refcount_bits=64",
    "cluster_size=4k,refcount_bits=2,lazy_refcounts=on",
    "cluster_size=4k,refcount_bits=4",
    "cluster_size=8k,refcount_bits=8,compression_type=zstd",
    "cluster_size=16k,extended_l2=on",
    "cluster_size=32k,extended_l2=on,refcount_bits=32,compression_type=zstd",
    "cluster_size=2M",
    "cluster_size=2M,extended_l2=on,lazy_refcounts=on",
    "preallocation=metadata",
    "preallocation=metadata,cluster_size=512,refcount_bits=64",
    "preallocation=metadata,extended_l2=on",
    "preallocation=falloc,cluster_size=4k",
    "preallocation=full,cluster_size=2M",
    "data_file=data.raw",
    "data_file=data.raw,data_file_raw=on",
    "data_file=data.raw,extended_l2=on,cluster_size=16k,preallocation=metadata",
    "data_file=data.raw,data_file_raw=on,extended_l2=on,preallocation=falloc",
];

/// Combinations of options of QED images.
pub const QED: &[&str] = &[
    "",
    "cluster_size=4k",
    "cluster_size=4k,table_size=2",
    "cluster_size=128k,table_size=16",
    "cluster_size=1M,table_size=2",
];
