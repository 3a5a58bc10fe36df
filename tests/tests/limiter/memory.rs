//! A load whose file must fit into a control group's memory.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io, thread};

use fathom_lab::evidence::device_below;
use fathom_lab::work::{Shape, Worked};
use fathom_run::evidence::Evidence;

use crate::scene::watch;

/// Many threads, so that some of them wait for memory for much of the time.
const SHAPE: Shape = Shape {
    threads: 8,
    depth: 1,
};
/// A script that runs a command in a group.
const IN_GROUP: &str = r#"echo $$ > "$0"/cgroup.procs && exec chrt --rr 1 "$@""#;
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
    let group = Group::with_memory(limit).unwrap_or_else(|error| {
        panic!("this test limits memory: run it as root where control groups do ({error})")
    });
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

/// A control group that limits the memory of its processes, including the page cache of their
/// files.
struct Group(PathBuf);

impl Group {
    fn with_memory(limit: u64) -> io::Result<Group> {
        let root = Path::new("/sys/fs/cgroup");
        let name = format!("fathom-test-memory-{}", std::process::id());
        let (group, file) = match root.join("cgroup.controllers").exists() {
            true => {
                fs::write(root.join("cgroup.subtree_control"), "+memory")?;
                (Group(root.join(name)), "memory.max")
            }
            false => {
                let group = Group(root.join("memory").join(name));
                (group, "memory.limit_in_bytes")
            }
        };
        fs::create_dir(&group.0)?;
        fs::write(group.0.join(file), limit.to_string())?;
        Ok(group)
    }

    /// Returns the same command, in the group from its first page on, with a real-time priority.
    ///
    /// On a busy machine the load would otherwise wait for a CPU after each read, which would be
    /// its limit.
    fn runs(&self, command: &Command) -> Command {
        let mut shell = Command::new("sh");
        shell
            .args(["-c", IN_GROUP])
            .arg(&self.0)
            .arg(command.get_program())
            .args(command.get_args());
        shell
    }
}

impl Drop for Group {
    /// Removes the group, whose processes must have ended.
    fn drop(&mut self) {
        let is_gone = || fs::remove_dir(&self.0).is_ok();
        // A second panic would abort the whole test program.
        match thread::panicking() {
            true => drop(is_gone()),
            false => fathom_testing::until("the end of the control group", is_gone),
        }
    }
}
