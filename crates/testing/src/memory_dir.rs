//! A temporary directory in memory, and a runner for programs in it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// A temporary directory. The directory is in memory if `/dev/shm` exists, because programs such as
/// cryptsetup flush everything they write.
#[derive(Debug)]
pub struct MemoryDir(TempDir);

impl MemoryDir {
    /// Creates an empty directory.
    #[allow(
        clippy::new_without_default,
        reason = "an empty directory is no default"
    )]
    #[must_use]
    pub fn new() -> Self {
        let memory = Path::new("/dev/shm");
        let made = match memory.is_dir() {
            true => tempfile::tempdir_in(memory),
            false => tempfile::tempdir(),
        };
        Self(made.expect("a directory"))
    }

    /// Returns the path of a file in the directory.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a file.
    pub fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path(name), bytes).expect("a file");
    }

    /// Returns the content of a file.
    #[must_use]
    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).expect("a file")
    }

    /// Runs a program in the directory, and returns its outcome whether it succeeds or not.
    ///
    /// # Panics
    /// If the program is not installed.
    #[must_use]
    pub fn try_run(&self, program: &str, args: &[&str]) -> Output {
        let run = Command::new(program)
            .args(args)
            .current_dir(self.0.path())
            .output();
        run.unwrap_or_else(|error| panic!("{program} is installed: {error}"))
    }

    /// Runs a program in the directory, and returns what it prints.
    ///
    /// # Panics
    /// With the program's errors if it fails.
    pub fn run(&self, program: &str, args: &[&str]) -> String {
        let output = self.try_run(program, args);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {args:?}: {errors}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}
