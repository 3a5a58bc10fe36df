//! Tests `fathom img` as users run it, and compares it with qemu-img.

mod amend;
mod archive;
mod bitmap;
mod bucket;
mod compare;
mod compress;
mod convert;
mod encryption;
mod exports;
mod foreign;
mod habits;
mod image_opts;
mod keys;
mod making;
mod map;
mod measure;
mod pair;
mod place;
mod rebase;
mod resize;
mod snapshot;
mod strangers;
mod streams;
#[path = "../support/mod.rs"]
mod support;
mod used_device;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use support::stdout_of;

fn qemu_img(args: &[&str]) -> String {
    let output = Command::new("qemu-img").args(args).output();
    let output = output.expect("qemu-img is installed by `make setup`");
    assert!(output.status.success(), "qemu-img {args:?}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn qemu_json(args: &[&str]) -> serde_json::Value {
    serde_json::from_str(&qemu_img(args)).expect("JSON")
}

fn create(path: &str, args: &[&str]) -> String {
    stdout_of(&[&["img", "create"], args, &[path]].concat())
}

/// Starts qemu-io, which keeps the image open for writing until its standard input ends.
fn qemu_uses(image: &str) -> Child {
    let mut user = Command::new("qemu-io")
        .args(["-f", "qcow2", image])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("qemu-io runs");
    // The reply shows that qemu-io has opened the image.
    let commands = user.stdin.as_mut().expect("stdin");
    commands.write_all(b"length\n").expect("asked");
    let answers = BufReader::new(user.stdout.take().expect("stdout")).lines();
    let length = answers.map_while(Result::ok).find(|l| l.contains(" MiB"));
    assert!(length.is_some(), "qemu-io could not open the image");
    user
}
