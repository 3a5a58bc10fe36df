//! `fathom img` as users run it, next to qemu-img.

mod bitmap;
mod compare;
mod convert;
mod making;
mod map;
mod measure;
mod pair;
mod place;
mod rebase;
mod resize;
mod snapshot;
#[path = "../support/mod.rs"]
mod support;

use std::process::Command;
use support::stdout_of;

fn qemu_img(args: &[&str]) -> String {
    let output = Command::new("qemu-img").args(args).output();
    let output = output.expect("qemu-img is installed by `make setup`");
    assert!(output.status.success(), "qemu-img {args:?}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn create(path: &str, args: &[&str]) -> String {
    stdout_of(&[&["img", "create"], args, &[path]].concat())
}
