//! Starts NBD servers, and makes disks and guests on them.

use crate::common::Guest;
use fathom_core::Disk;
use fathom_nbd::NbdUri;
use fathom_storage::{EngineKind, NbdDisk, NbdOptions, engine};
use fathom_testing::until;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use tempfile::TempDir;

/// A server process, killed when this value is dropped.
pub struct Server {
    child: Child,
    pub dir: TempDir,
}

impl Server {
    /// Starts `nbdkit ARGS`; filters may be among them.
    pub fn nbdkit(args: &[&str]) -> Server {
        let dir = short_dir();
        let child = Server::start_nbdkit(dir.path(), args);
        Server { child, dir }
    }

    fn start_nbdkit(dir: &Path, args: &[&str]) -> Child {
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--exit-with-parent", "-U"]);
        command.arg(dir.join("s")).args(args);
        start(command, dir)
    }

    /// Starts `qemu-nbd` on a new image.
    pub fn qemu_nbd(format: &str, size: &str, args: &[&str]) -> Server {
        let dir = short_dir();
        let image = dir.path().join("image");
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-f", format]);
        let created = create.arg(&image).arg(size).status();
        assert!(created.expect("qemu-img is installed").success());
        let mut command = Command::new("qemu-nbd");
        command.args(["--persistent", "--discard=unmap", "-f", format, "-k"]);
        command.arg(dir.path().join("s")).args(args).arg(&image);
        let child = start(command, dir.path());
        Server { child, dir }
    }

    pub fn uri(&self) -> NbdUri {
        uri(&self.dir.path().join("s"))
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("gone");
        let _ = std::fs::remove_file(self.dir.path().join("s"));
    }

    /// Starts another server in the place of a killed one.
    pub fn restart(&mut self, args: &[&str]) {
        self.child = Server::start_nbdkit(self.dir.path(), args);
    }

    /// Stops the server's process: it does not respond until [`Server::go_on`].
    pub fn stop(&self) {
        self.signal("STOP");
        // The process counts as stopped when one of its threads has handled the signal; the others
        // run until they have, too.
        until("the stop of all threads", || self.has_stopped());
    }

    pub fn go_on(&self) {
        self.signal("CONT");
    }

    pub fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args(["-s", name, &pid]).status();
        assert!(sent.expect("kill runs").success());
    }

    /// Returns whether all of its threads are stopped.
    fn has_stopped(&self) -> bool {
        let threads = fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("a process");
        let states = threads.map(|thread| fs::read_to_string(thread.unwrap().path().join("stat")));
        // A thread that has ended meanwhile does not run.
        let mut states = states.filter_map(Result::ok);
        states.all(|stat| {
            stat.rsplit_once(") ")
                .is_some_and(|(_, rest)| rest.starts_with('T'))
        })
    }

    pub fn disk(&self, options: NbdOptions) -> Arc<NbdDisk> {
        Arc::new(NbdDisk::connect(&self.uri(), options).expect("connected"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = fs::read_to_string(self.dir.path().join("log"));
            let ended = self.child.try_wait();
            eprintln!("{ended:?}: {}", log.unwrap_or_default());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn uri(socket: &Path) -> NbdUri {
    let text = format!("nbd+unix:///?socket={}", socket.display());
    text.parse().expect("a URI")
}

/// Makes a directory with a short path, for sockets.
pub fn short_dir() -> TempDir {
    let dir = tempfile::Builder::new().prefix("nbd-").tempdir_in("/tmp");
    dir.expect("a directory")
}

/// Starts a server that creates the socket `s`.
fn start(mut command: Command, dir: &Path) -> Child {
    // The client's log is shown when a test fails.
    let _ = tracing_subscriber::fmt().with_test_writer().try_init();
    let socket: PathBuf = dir.join("s");
    let log = std::fs::File::create(dir.join("log")).expect("a file");
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    let name = format!("{command:?}");
    let mut child = command.spawn().expect("it is installed by `make setup`");
    until(&name, || {
        let ended = child.try_wait().expect("a child");
        let said = || fs::read_to_string(dir.join("log")).unwrap_or_default();
        assert_eq!(ended, None, "{name} has ended: {}", said());
        std::os::unix::net::UnixStream::connect(&socket).is_ok()
    });
    child
}

pub fn guest(disk: &Arc<impl Disk + 'static>, kind: EngineKind) -> Guest {
    Guest::new(disk.clone(), move || engine(kind))
}

pub fn read_only() -> NbdOptions {
    NbdOptions {
        read_only: true,
        ..NbdOptions::default()
    }
}

/// Returns the error of a failed connection: one line that begins with the URI.
pub fn refused(uri: &NbdUri, options: NbdOptions) -> String {
    let error = NbdDisk::connect(uri, options).err().expect("refused");
    let line = error.to_string();
    assert!(line.starts_with(uri.as_str()), "{line}");
    assert!(!line.contains('\n'), "{line}");
    line
}
