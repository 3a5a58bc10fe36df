//! What the end-to-end tests in `tests/` share: the program under test, places for images and
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

/// The `fathom` program of the build that this test belongs to. A test that has asked for it and does
/// not end is ended, with all others of its process, after it has said where it hangs.
///
/// # Panics
/// When it has not been built: `cargo test` builds programs only for their own package's tests.
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

/// target/debug or its sibling: tests run from its `deps`.
fn profile_dir() -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let dir = test.parent().and_then(Path::parent);
    dir.expect("tests run from target/PROFILE/deps").to_owned()
}

/// Places for one test, removed at its end: images on the disk that the build is on (O_DIRECT must
/// work), sockets where paths are short (sun_path has 108 bytes).
#[derive(Debug)]
pub struct Place {
    images: TempDir,
    sockets: TempDir,
}

impl Place {
    /// Makes the places.
    ///
    /// # Panics
    /// When the directories cannot be made.
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

    /// Where sockets and logs go.
    pub fn sockets(&self) -> &Path {
        self.sockets.path()
    }

    /// A path for an image.
    pub fn path(&self, name: &str) -> PathBuf {
        self.images.path().join(name)
    }

    /// A new sparse image.
    ///
    /// # Panics
    /// When it cannot be made.
    pub fn image(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.path(name);
        File::create(&path)
            .and_then(|file| file.set_len(bytes))
            .expect("a sparse image");
        path
    }

    /// Serves `image` with `fathom serve`, its socket and log named after `name`.
    ///
    /// # Panics
    /// With the server's last words when it does not start.
    pub fn serve(&self, name: &str, image: &Path, args: &[&str]) -> Server {
        let image = image.to_string_lossy();
        Server::fathom(&fathom(), self.sockets(), name, &image, args)
            .unwrap_or_else(|error| panic!("{name}: {error}"))
    }
}

/// How a command of `fathom` ended.
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
    /// Checks that the command failed as a user should see it: a non-zero exit status, and one line
    /// on standard error that has all the `words`.
    ///
    /// # Panics
    /// When it did not.
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

/// Runs `fathom ARGS` to its end.
///
/// # Panics
/// When it runs for longer than `limit`.
pub fn run(args: &[&str], limit: Duration) -> Ended {
    let mut command = Command::new(fathom());
    command.args(args);
    run_command(command, limit)
}

/// Runs any command to its end, catching what it prints.
///
/// # Panics
/// When it cannot be started or runs for longer than `limit`.
pub fn run_command(command: Command, limit: Duration) -> Ended {
    try_command(command, limit).unwrap_or_else(|error| panic!("{error}"))
}

/// The same, for a caller that has more to say than that the command ran too long.
///
/// # Errors
/// When it cannot be started or runs for longer than `limit`.
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
