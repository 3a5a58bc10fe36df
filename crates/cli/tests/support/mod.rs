//! Runs the `fathom` program as users do.
#![allow(dead_code, reason = "each test program uses a part of it")]

pub mod certificates;
pub mod loop_device;
pub mod nbd;
pub mod prometheus;
pub mod s3;

use fathom_formats::Format;
use fathom_testing::{Tried, threads_of};
use std::fs::{self, File};
use std::os::fd::RawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use tempfile::TempDir;

#[allow(unused_imports, reason = "each test program uses a part of it")]
pub use fathom_testing::{PATIENCE, eventually};

pub fn fathom() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fathom"));
    command.env_remove("FATHOM_LOG").env_remove("NOTIFY_SOCKET");
    command.env("RUST_BACKTRACE", "1");
    command
}

/// Runs `fathom ARGS` until it ends.
pub fn run(args: &[&str]) -> Output {
    let child = fathom()
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("fathom starts");
    child.wait_with_output().expect("fathom ends")
}

/// Runs `fathom ARGS`, which must succeed. Returns its output.
pub fn stdout_of(args: &[&str]) -> String {
    let output = run(args);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{args:?}: {stderr}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Runs `fathom ARGS`, which must fail with this exit status.
///
/// Standard error must be one line that contains all of `words`.
pub fn refused(status: i32, args: &[&str], words: &[&str]) {
    let output = run(args);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    check_refusal(output.status, &stderr, status, words);
    assert_eq!(output.stdout, b"", "{args:?}");
}

pub fn check_refusal(status: ExitStatus, stderr: &str, expected: i32, words: &[&str]) {
    assert_eq!(status.code(), Some(expected), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "not one line: {stderr}");
    assert!(stderr.starts_with("fathom: "), "{stderr}");
    for word in words {
        assert!(stderr.contains(word), "no '{word}' in: {stderr}");
    }
    for clutter in ["Error {", "Err(", "panicked", "RUST_BACKTRACE", "\u{1b}["] {
        assert!(!stderr.contains(clutter), "{stderr}");
    }
}

/// Creates a directory with a short path, for sockets.
pub fn short_dir() -> TempDir {
    let dir = tempfile::Builder::new()
        .prefix("fathom-")
        .tempdir_in("/tmp");
    dir.expect("a directory")
}

/// Creates a directory on the disk of the build, where O_DIRECT works.
pub fn disk_dir() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory")
}

/// Returns whether an NBD server of another program accepts clients at the socket.
///
/// The file of the socket exists a moment before the server listens.
pub fn listens(socket: &Path) -> bool {
    UnixStream::connect(socket).is_ok()
}

/// Creates a socket file on which no process listens any more.
pub fn make_dead_socket(path: &Path) {
    drop(UnixListener::bind(path).expect("a socket"));
    // Processes started by other tests also have the socket until they call exec.
    eventually("nobody listens", || (!listens(path)).then_some(()));
}

/// Another program; killed when dropped.
pub struct Kept(pub Child);

impl Kept {
    /// Starts the program and discards its output.
    pub fn spawn(command: &mut Command) -> Kept {
        let command = command.stdin(Stdio::null()).stdout(Stdio::null());
        Kept(command.stderr(Stdio::null()).spawn().expect("it starts"))
    }

    pub fn signal(&self, signal: &str) {
        send(signal, self.0.id().into());
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends a signal such as `TERM` to a process. After `STOP`, waits until the process has stopped.
pub fn send(signal: &str, to: u64) {
    if signal == "KILL" {
        Tried::Kills.count(1);
    }
    let pid = to.to_string();
    let sent = Command::new("kill").args(["-s", signal, &pid]).status();
    assert!(sent.expect("kill").success());
    if signal == "STOP" {
        // The process stops when one of its threads handles the signal. The others run until then.
        eventually("all its threads stop", || has_stopped(to).then_some(()));
    }
}

/// Returns whether no thread of the process runs.
fn has_stopped(pid: u64) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("a process");
    let states = threads.map(|thread| fs::read_to_string(thread.unwrap().path().join("stat")));
    // A thread that has ended meanwhile does not run.
    let mut states = states.filter_map(Result::ok);
    states.all(|stat| {
        stat.rsplit_once(") ")
            .is_some_and(|(_, rest)| rest.starts_with('T'))
    })
}

/// A running `fathom serve`; killed when dropped, together with its successor.
pub struct Served {
    pub dir: TempDir,
    pub child: Child,
    /// Process id of the successor; 0 if no successor exists.
    successor: AtomicU64,
}

impl Served {
    /// Serves `disk` at `s` in a directory of its own, with the API at `c`. Returns when the server
    /// listens.
    pub fn start(disk: &str, args: &[&str]) -> Served {
        Served::start_by(fathom(), disk, args)
    }

    /// Like [`Served::start`], with a command that ends in `fathom`.
    pub fn start_by(mut command: Command, disk: &str, args: &[&str]) -> Served {
        let dir = short_dir();
        command
            .args(["serve", disk, "--vhost-user"])
            .arg(dir.path().join("s"))
            .arg("--api")
            .arg(dir.path().join("c"))
            .args(args);
        let mut served = Served::spawn(command, dir);
        served.wait_for("serving");
        served
    }

    pub fn spawn(mut command: Command, dir: TempDir) -> Served {
        let file = |name| File::create(dir.path().join(name)).expect("a file");
        command.stdin(Stdio::null());
        command.stdout(file("stdout")).stderr(file("stderr"));
        let child = command.spawn().expect("it starts");
        let successor = AtomicU64::new(0);
        Served {
            dir,
            child,
            successor,
        }
    }

    /// Starts a server without disks: NBD is at `n` in its directory, the API at `c` with the
    /// options `of_api`.
    ///
    /// `more` is added to its configuration.
    pub fn waiting(of_api: &str, more: &str) -> Served {
        let dir = short_dir();
        let path = |name: &str| as_arg(&dir.path().join(name));
        let config = format!(
            "api = {{ socket = '{}'{of_api} }}\n{more}\n[nbd]\nlisten = ['unix:{}']\n",
            path("c"),
            path("n")
        );
        fs::write(dir.path().join("conf"), config).expect("a file");
        let mut command = fathom();
        command.args(["serve", "--config", &path("conf")]);
        let mut served = Served::spawn(command, dir);
        served.wait_for("NBD clients connect to");
        served
    }

    /// Waits until the log contains these words.
    pub fn wait_for(&mut self, words: &str) {
        eventually(words, || {
            let log = self.log();
            let ended = self.child.try_wait().expect("a child").is_some();
            assert!(!ended || log.contains(words), "it ended: {log}");
            log.contains(words).then_some(())
        });
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("stderr")).expect("its log")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the path of a file in its directory as an argument.
    pub fn arg(&self, name: &str) -> String {
        as_arg(&self.path(name))
    }

    pub fn api(&self) -> String {
        self.arg("c")
    }

    /// Sends `n` requests to the server with `fathom bench`, whose options are `args`.
    pub fn load(&self, n: u64, args: &[&str]) {
        let (socket, n) = (self.arg("s"), n.to_string());
        let bench = ["bench", "--vhost-user", &socket, "--number-ios", &n];
        stdout_of(&[&bench, args].concat());
    }

    /// Like [`Served::load`], without waiting for the end.
    pub fn start_load(&self, n: u64, args: &[&str]) -> Child {
        let (socket, n) = (self.arg("s"), n.to_string());
        let bench = ["bench", "--vhost-user", &socket, "--number-ios", &n];
        let mut load = fathom();
        load.args(bench).args(args).stdout(Stdio::null());
        load.spawn().expect("fathom bench")
    }

    /// Upgrades the server, whose successor is a process of its own.
    pub fn upgrade(&self) {
        let answer = stdout_of(&["upgrade", &self.api(), "--json"]);
        let answer: serde_json::Value = serde_json::from_str(&answer).expect("JSON");
        let pid = answer["pid"].as_u64().expect("a process id");
        self.succeeded_by(pid);
    }

    /// Records the process id of the successor. Drop kills it.
    pub fn succeeded_by(&self, pid: u64) {
        self.successor.store(pid, Ordering::SeqCst);
    }

    pub fn signal(&self, signal: &str) {
        send(signal, self.child.id().into());
    }

    /// Waits for the server's end. Returns its exit status and its output.
    pub fn end(&mut self) -> (Option<i32>, String) {
        let status = eventually("its end", || self.child.try_wait().expect("a child"));
        let stdout = fs::read_to_string(self.path("stdout")).expect("its output");
        (status.code(), stdout)
    }

    pub fn terminate(&mut self) -> (Option<i32>, String) {
        self.signal("TERM");
        self.end()
    }

    /// Prints the output of `fathom info`, or why it fails.
    fn print_info(&self) {
        let mut info = Command::new("timeout");
        let output = info
            .args(["5", env!("CARGO_BIN_EXE_fathom"), "info", &self.api()])
            .output();
        match output {
            Ok(output) => eprintln!(
                "fathom info: {}\n{}{}",
                output.status,
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            ),
            Err(error) => eprintln!("timeout: {error}"),
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let successor = *self.successor.get_mut();
        if std::thread::panicking() {
            eprintln!("{}", self.log());
            eprintln!("{}", threads_of(self.child.id()));
            if successor > 0 {
                eprintln!("{}", threads_of(successor as u32));
            }
            self.print_info();
            // If the child is strace, killing it would leave the server behind.
            let mut kill = Command::new("pkill");
            let _ = kill
                .args(["-KILL", "--parent", &self.child.id().to_string()])
                .output();
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        if successor > 0 {
            let mut kill = Command::new("kill");
            // The successor may have ended.
            let _ = kill.args(["-KILL", &successor.to_string()]).output();
        }
    }
}

/// Creates an image with the contents of `raw`, all of them allocated.
pub fn convert(raw: &Path, format: Format, image: &Path) {
    let converted = Command::new("qemu-img")
        .args(["convert", "-f", "raw", "-O", format.name()])
        .args([raw, image])
        .status();
    assert!(converted.expect("qemu-img is installed").success());
}

pub fn as_arg(path: &Path) -> String {
    path.to_str().expect("UTF-8").to_owned()
}

/// Makes the next process inherit `fd` under the number 3.
pub fn pass(command: &mut Command, fd: RawFd) {
    let pass = move || {
        // SAFETY: dup2(2) and fcntl(2) may be called between fork and exec. The child does not need
        // the previous descriptor 3.
        match unsafe { (libc::dup2(fd, 3), libc::fcntl(3, libc::F_SETFD, 0)) } {
            (3, 0) => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: see above.
    unsafe { command.pre_exec(pass) };
}

/// Creates a program of this name. Returns a PATH in which it comes first.
///
/// Another process writes the file. If this process had it open for writing, children of other
/// tests would inherit it until they call exec, and until then it could not be executed.
pub fn instead_of(name: &str, script: &str, dir: &Path) -> String {
    let write = "printf '#!/bin/sh\\n%s\\n' \"$1\" >\"$2\" && chmod 755 \"$2\"";
    let mut writer = Command::new("sh");
    writer.args(["-c", write, "sh", script]).arg(dir.join(name));
    assert!(writer.status().unwrap().success());
    let path = std::env::var("PATH").unwrap();
    format!("{}:{path}", dir.display())
}
