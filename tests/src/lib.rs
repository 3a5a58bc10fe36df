//! Helpers of the end-to-end tests in `tests/`: the program under test, directories for images and
//! sockets, and runs of its command line.

pub mod ceph;
pub mod hosts;
pub mod image;
pub mod load;
pub mod moves;
mod patience;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use fathom_lab::{Error, Process, Server};
use tempfile::TempDir;

/// Returns the path of the `fathom` program that was built with this test.
///
/// From now on the calling test is watched: if it hangs, the test program reports where, and exits.
///
/// # Panics
/// If the program has not been built: `cargo test` builds programs only for their own package's
/// tests.
pub fn fathom() -> PathBuf {
    patience::watch();
    let path = profile_dir().join("fathom");
    assert!(
        path.is_file(),
        "{} is not built: run `make test`, or cargo build first",
        path.display()
    );
    path
}

/// Returns target/debug or target/release; tests run from its subdirectory `deps`.
fn profile_dir() -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let dir = test.parent().and_then(Path::parent);
    dir.expect("tests run from target/PROFILE/deps").to_owned()
}

/// Directories for one test, removed at its end.
///
/// Images are on the disk of the build, where O_DIRECT works. Sockets are where paths are short,
/// because sun_path has 108 bytes.
#[derive(Debug)]
pub struct Place {
    images: TempDir,
    sockets: TempDir,
}

impl Place {
    /// Creates the directories.
    ///
    /// # Panics
    /// If a directory cannot be created.
    #[expect(clippy::new_without_default, reason = "it makes directories")]
    pub fn new() -> Self {
        let images = tempfile::Builder::new()
            .prefix("images-")
            .tempdir_in(profile_dir());
        let sockets = tempfile::Builder::new()
            .prefix("fathom-")
            .tempdir_in("/tmp");
        Self {
            images: images.expect("a directory for images"),
            sockets: sockets.expect("a directory for sockets"),
        }
    }

    /// Returns the directory of sockets and logs.
    pub fn sockets(&self) -> &Path {
        self.sockets.path()
    }

    /// Returns a path for an image.
    pub fn path(&self, name: &str) -> PathBuf {
        self.images.path().join(name)
    }

    /// Creates a sparse image.
    ///
    /// # Panics
    /// If the image cannot be created.
    pub fn image(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.path(name);
        File::create(&path)
            .and_then(|file| file.set_len(bytes))
            .expect("a sparse image");
        path
    }

    /// Serves `image` with `fathom serve`. The names of its socket and log begin with `name`.
    ///
    /// # Panics
    /// With the server's last log lines if it does not start.
    pub fn serve(&self, name: &str, image: &Path, args: &[&str]) -> Server {
        let image = image.to_string_lossy();
        Server::fathom(&fathom(), self.sockets(), name, &image, args)
            .unwrap_or_else(|error| panic!("{name}: {error}"))
    }
}

/// The result of a command.
#[derive(Debug)]
pub struct Ended {
    /// The exit status; `None` after a signal.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Ended {
    /// Checks that the command failed as users should see it.
    ///
    /// The exit status is not zero, and standard error is one line that contains all of `words`.
    ///
    /// # Panics
    /// If the command did not fail in this way.
    pub fn refused_with(&self, words: &[&str]) {
        assert!(
            matches!(self.code, Some(1..)),
            "must exit with an error: {self:?}"
        );
        let lines: Vec<&str> = self
            .stderr
            .lines()
            .filter(|l| !l.trim().is_empty())
            .collect();
        assert_eq!(lines.len(), 1, "must be one line: {}", self.stderr);
        for word in words {
            assert!(lines[0].contains(word), "must say '{word}': {}", lines[0]);
        }
    }
}

/// Runs `fathom ARGS` until it ends.
///
/// # Panics
/// If it runs longer than `limit`.
pub fn run(args: &[&str], limit: Duration) -> Ended {
    let mut command = Command::new(fathom());
    command.args(args);
    run_command(command, limit)
}

/// Runs any command until it ends, and returns its output.
///
/// # Panics
/// If the command cannot be started or runs longer than `limit`.
pub fn run_command(command: Command, limit: Duration) -> Ended {
    try_command(command, limit).unwrap_or_else(|error| panic!("{error}"))
}

/// Like [`run_command`], for a caller that adds information to a failure.
///
/// # Errors
/// If the command cannot be started or runs longer than `limit`.
pub fn try_command(mut command: Command, limit: Duration) -> Result<Ended, Error> {
    let dir = tempfile::tempdir().expect("a directory");
    let stdout = dir.path().join("stdout");
    command.stdout(File::create(&stdout).expect("a file"));
    let shown = format!("{command:?}");
    let mut process = Process::spawn(&shown, command, &dir.path().join("stderr"))?;
    let status = process.wait(limit)?;
    Ok(Ended {
        code: status.code(),
        stdout: fs::read_to_string(&stdout).expect("its output"),
        stderr: process.log(),
    })
}
