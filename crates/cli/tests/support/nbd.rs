//! A server with `fathom serve --nbd`, and clients of other programs.

use super::{Served, as_arg, fathom, short_dir, stdout_of};
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// A disk at an NBD socket, with its API at `c`; killed when dropped.
pub struct Nbd(Served);

impl Nbd {
    pub fn start(disk: &str, args: &[&str]) -> Nbd {
        Nbd::start_by(fathom(), disk, args)
    }

    /// Like [`Nbd::start`], with a command that ends in `fathom`.
    pub fn start_by(mut command: Command, disk: &str, args: &[&str]) -> Nbd {
        let dir = short_dir();
        let address = format!("unix:{}", dir.path().join("s").display());
        command.args(["serve", disk, "--nbd", &address, "--api"]);
        command.arg(dir.path().join("c")).args(args);
        let mut served = Served::spawn(command, dir);
        served.wait_for("serving");
        Nbd(served)
    }

    /// Returns the URI of the export without a name.
    pub fn uri(&self) -> String {
        self.uri_of("")
    }

    pub fn uri_of(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.arg("s"))
    }

    /// Sends `n` requests to the server with `fathom bench`, whose options are `args`.
    pub fn load(&self, n: u64, args: &[&str]) {
        let (uri, n) = (self.uri(), n.to_string());
        let bench = ["bench", "--nbd", &uri, "--number-ios", &n];
        stdout_of(&[&bench, args].concat());
    }

    /// Like [`Nbd::load`], and verifies what is read.
    pub fn verify(&self, n: u64, args: &[&str]) {
        self.load(n, &[args, &["--verify"]].concat());
    }

    /// Runs a script for libnbd. `URI` in its environment is this disk's URI.
    pub fn python(&self, script: &str, environment: &[(&str, &str)]) -> String {
        let uri = self.uri();
        python(script, &[&[("URI", uri.as_str())], environment].concat())
    }

    /// Returns the peak memory of the server in bytes.
    pub fn peak_memory(&self) -> u64 {
        let status = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(status).expect("it lives");
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
        kib.and_then(|kib| kib.parse::<u64>().ok())
            .expect("a figure")
            << 10
    }
}

impl Deref for Nbd {
    type Target = Served;

    fn deref(&self) -> &Served {
        &self.0
    }
}

impl DerefMut for Nbd {
    fn deref_mut(&mut self) -> &mut Served {
        &mut self.0
    }
}

/// Runs a script with the Python for which libnbd is packaged.
pub fn python(script: &str, environment: &[(&str, &str)]) -> String {
    let mut command = Command::new("/usr/bin/python3");
    command
        .args(["-c", script])
        .envs(environment.iter().copied());
    let output = command
        .output()
        .expect("python3 is installed by `make setup`");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}{errors}");
    said
}

/// Runs a program in `dir`.
pub fn tool(dir: &Path, program: &str, args: &[&str]) -> Output {
    let mut command = Command::new(program);
    command.args(args).current_dir(dir).stdin(Stdio::null());
    let run = command.output();
    run.unwrap_or_else(|e| panic!("{program} is installed by `make setup`: {e}"))
}

/// Runs a program in `dir`, which must succeed. Returns its output.
pub fn prints(dir: &Path, program: &str, args: &[&str]) -> String {
    let output = tool(dir, program, args);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let success = output.status.success();
    assert!(success, "{program} {args:?}: {said}{errors}");
    said
}

/// Creates an empty image of `size` bytes in `dir`.
pub fn make_image(dir: &Path, format: &str, size: u64) -> String {
    let path = dir.join(format!("disk.{format}"));
    if format == "raw" {
        // QEMU does not create a raw image without any data.
        let file = std::fs::File::create(&path).expect("an image");
        file.set_len(size).expect("sized");
        return as_arg(&path);
    }
    let (path, size) = (as_arg(&path), size.to_string());
    prints(
        dir,
        "qemu-img",
        &["create", "-q", "-f", format, &path, &size],
    );
    path
}
