//! A load whose file must fit into a control group's memory.

use std::path::Path;
use std::process::Command;

use fathom_lab::evidence::device_below;
use fathom_lab::work::{Shape, Worked};
use fathom_run::evidence::Evidence;

use crate::groups::Group;
use crate::scene::watch;

/// Many threads, so that some of them wait for memory for much of the time.
const SHAPE: Shape = Shape {
    threads: 8,
    depth: 1,
};
/// Size of the load's file.
const SIZE: &str = "64M";
/// A limit in bytes at which the kernel still recognizes that pages are read again and again.
///
/// A much tighter limit looks like a file that is read once.
pub const TIGHT: u64 = 56 << 20;
pub const AMPLE: u64 = 256 << 20;

/// Returns the evidence of reads through the page cache by a load with this memory limit.
pub fn seen_with_memory(limit: u64) -> Evidence {
    let place = tempfile::tempdir_in("/var/tmp").unwrap();
    let file = place.path().join("file");
    let group = Group::with_memory(limit);
    // The group creates the file, because pages belong to the group that uses them first.
    let made = group.runs(fio(&file).arg("--create_only=1")).output();
    let made = made.unwrap();
    assert!(made.status.success(), "{made:?}");
    let device = device_below(&file).unwrap();
    let told = |said: &str| Worked::of_fio(said, SHAPE).unwrap().load;
    watch(Vec::new(), device, group.runs(&fio(&file)), &told)
}

/// Returns a command for fio on the host itself, which does not clear the page cache.
fn fio(file: &Path) -> Command {
    let mut fio = Command::new("fio");
    fio.args(["--name=load", "--ioengine=psync", "--output-format=json"])
        .arg(format!("--filename={}", file.display()))
        .args(["--rw=randread", "--bs=256k", "--invalidate=0"])
        .arg(format!("--size={SIZE}"))
        .args(["--time_based", "--ramp_time=500ms", "--runtime=2500ms"])
        .arg(format!("--numjobs={}", SHAPE.threads))
        .args(["--thread", "--group_reporting"]);
    fio
}
