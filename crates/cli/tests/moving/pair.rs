//! Two servers: the source has a disk, and the target takes it over.

use crate::support::{Kept, Served, as_arg, disk_dir, eventually, fathom, short_dir, stdout_of};
use serde_json::Value;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

pub const SIZE: u64 = 96 << 20;

/// Creates an image with data in some places and holes elsewhere.
pub fn make_image(path: &Path, format: &str) {
    let raw = path.with_extension("made");
    let file = File::create(&raw).unwrap();
    file.set_len(SIZE).unwrap();
    let data: Vec<u8> = (0..5_000_003u32).map(|n| (n % 251) as u8 + 1).collect();
    use std::os::unix::fs::FileExt;
    for at in [0, 11 << 20, 50 << 20, SIZE - data.len() as u64] {
        file.write_all_at(&data, at).unwrap();
    }
    qemu_img(&["convert", "-O", format, &as_arg(&raw), &as_arg(path)]);
    fs::remove_file(raw).unwrap();
}

pub fn qemu_img(args: &[&str]) {
    let output = Command::new("qemu-img").args(args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {output:?}");
}

/// The images of source and target, and the directory for the source's socket.
pub struct Pair {
    images: TempDir,
    formats: [String; 2],
    socket: TempDir,
}

impl Pair {
    pub fn new(from: &str, to: &str) -> Pair {
        let pair = Pair {
            images: disk_dir(),
            formats: [from.to_owned(), to.to_owned()],
            socket: short_dir(),
        };
        make_image(&pair.path("from"), from);
        qemu_img(&["create", "-f", to, &pair.arg("to"), &SIZE.to_string()]);
        pair
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.images.path().join(name)
    }

    pub fn arg(&self, name: &str) -> String {
        as_arg(&self.path(name))
    }

    pub fn uri(&self) -> String {
        let socket = as_arg(&self.socket.path().join("n"));
        format!("nbd+unix:///d?socket={socket}")
    }

    /// Starts the server that has the disk.
    pub fn source(&self) -> Served {
        let nbd = format!("unix:{}", as_arg(&self.socket.path().join("n")));
        let _ = fs::remove_file(self.socket.path().join("n"));
        Served::start(
            &self.arg("from"),
            &[
                "--format",
                &self.formats[0],
                "--nbd",
                &nbd,
                "--export-name",
                "d",
                "--nbd-move",
                "--filter",
                "throttle",
            ],
        )
    }

    /// Returns the options with which the target is started, besides its image.
    pub fn target_args(&self) -> [String; 4] {
        [
            "--format".into(),
            self.formats[1].clone(),
            "--pull".into(),
            self.uri(),
        ]
    }

    /// Starts the server that takes the disk over.
    pub fn target(&self) -> Served {
        let args = self.target_args();
        Served::start(&self.arg("to"), &args.each_ref().map(String::as_str))
    }

    /// Compares both images, which no server may have open.
    pub fn check_same(&self) {
        let [from, to] = &self.formats;
        for (format, name) in [(from, "from"), (to, "to")] {
            if format != "raw" {
                qemu_img(&["check", "-f", format, &self.arg(name)]);
            }
        }
        let (one, other) = (self.arg("from"), self.arg("to"));
        qemu_img(&["compare", "-f", from, "-F", to, &one, &other]);
    }
}

/// Returns what the target reports about the copying of the disk.
pub fn pull(served: &Served) -> Value {
    listed(served)["pull"].clone()
}

/// Returns what `fathom list` reports about the disk, or null if the server is not listed.
pub fn listed(served: &Served) -> Value {
    let listed = stdout_of(&["list", "--json"]);
    let listed: Vec<Value> = serde_json::from_str(&listed).unwrap();
    let pid = served.child.id();
    let own = listed.into_iter().find(|disk| disk["pid"] == pid);
    own.unwrap_or(Value::Null)
}

pub fn wait_for_phase(served: &Served, phase: &str) {
    eventually(phase, || (pull(served)["phase"] == phase).then_some(()));
}

/// Starts a guest that changes the disk with all kinds of requests until it is killed.
///
/// The number of changes is limited: a slow device would never catch up with an unlimited guest,
/// and the other server would never be ready.
pub fn changes(served: &Served) -> Kept {
    stdout_of(&["set", &served.api(), "throttle", "iops-write=200"]);
    let load = ["--rw", "randrw", "--rwmixtrim", "5", "--rwmixzero", "10"];
    let load = [&load[..], &["--iodepth", "8"]].concat();
    let load = Kept(served.start_load(1_000_000_000, &load));
    eventually("it has the disk", || {
        (listed(served)["queues_running"] == 1).then_some(())
    });
    load
}

/// Starts a guest that connects and reads.
pub fn guest(served: &Served) -> Child {
    let mut bench = fathom();
    bench.args([
        "bench",
        "--vhost-user",
        &served.arg("s"),
        "--number-ios",
        "64",
    ]);
    bench.stdout(Stdio::null()).stderr(Stdio::piped());
    bench.spawn().unwrap()
}

pub fn ends_well(child: Child) {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
}
