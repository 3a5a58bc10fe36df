//! `fathom bench DIR --workload`: options with FFSB's terms for a load on the files of a directory.

use std::path::Path;

use clap::{Args, ValueEnum};
use fathom_load::files::{Options, Part, Weights};

#[derive(Args, Debug)]
#[command(next_help_heading = "Files in a directory")]
pub struct FilesArgs {
    /// Load on a mounted file system
    ///
    /// The load creates, opens, reads, appends to and deletes files in a new directory in PATH, and
    /// removes the directory at the end.
    #[arg(
        long,
        value_enum,
        requires = "path",
        conflicts_with_all = [
            "info", "rw", "rwmixread", "rwmixtrim", "rwmixzero", "iodepth", "queue_size",
            "ramp_time", "size", "offset", "verify_state", "verify_only", "wait",
            "continue_on_error", "readonly", "timeout", "format", "overwrite", "engine",
            "fixedbufs", "registerfiles",
        ]
    )]
    workload: Option<Workload>,

    /// Factor for the number of files and the largest size, such as 0.1 [default: 1]
    ///
    /// The largest size is 1 MiB with a factor of 1.
    #[arg(long, value_name = "SHARE", requires = "workload")]
    scale: Option<f64>,

    /// Number of files before the load [default: 100000, multiplied by --scale]
    #[arg(long, value_name = "N", requires = "workload")]
    files: Option<u32>,

    /// Number of directories, each used by one thread [default: 100]
    #[arg(long, value_name = "N", requires = "workload")]
    dirs: Option<u16>,

    /// Frequency of each operation [default: create=10,delete=10,open=10,read=50,append=20]
    #[arg(long, value_name = "OP=N,...", requires = "workload")]
    weights: Option<Weights>,

    /// Create the files without a load, for a later run with --prepared
    #[arg(long, requires = "workload", conflicts_with = "prepared")]
    prepare_only: bool,

    /// Use the files of an earlier run with --prepare-only in PATH
    ///
    /// The other options must be the same.
    #[arg(long, requires = "workload")]
    prepared: bool,

    /// Do not delete the files at the end
    #[arg(long, requires = "workload")]
    keep: bool,
}

/// Loads on file systems.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Workload {
    /// Many threads, many small files, as FFSB's mail server
    MailServer,
}

impl FilesArgs {
    /// Whether the user wants a load on files.
    pub fn is_asked_for(&self) -> bool {
        self.workload.is_some()
    }

    /// Returns the options of the load on the files in `dir`.
    pub fn options(&self, dir: &Path) -> anyhow::Result<Options> {
        let scaled = Options::new(dir).scaled(self.scale.unwrap_or(1.0))?;
        Ok(Options {
            files: self.files.unwrap_or(scaled.files),
            dirs: self.dirs.unwrap_or(scaled.dirs),
            weights: self.weights.unwrap_or_default(),
            keep: self.keep,
            part: match (self.prepare_only, self.prepared) {
                (true, _) => Part::Files,
                (_, true) => Part::Load,
                _ => Part::All,
            },
            ..scaled
        })
    }
}
