//! `fathom bench DIR --workload`: FFSB's words for a load on the files of a directory.

use std::path::Path;

use clap::{Args, ValueEnum};
use fathom_load::files::{Options, Part, Weights};

#[derive(Args, Debug)]
#[command(next_help_heading = "Files in a directory")]
pub struct FilesArgs {
    /// Load a mounted file system: create, open, read, append to and delete
    /// files in a new directory below PATH, which is removed at the end
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

    /// Shrink the number of files and the size of the largest, 1 MiB, to this
    /// share [default: 1]
    #[arg(long, value_name = "SHARE", requires = "workload")]
    scale: Option<f64>,

    /// Files made before the load [default: 100000, shrunk by --scale]
    #[arg(long, value_name = "N", requires = "workload")]
    files: Option<u32>,

    /// Directories that they are in, each used by one thread [default: 100]
    #[arg(long, value_name = "N", requires = "workload")]
    dirs: Option<u16>,

    /// How often each operation comes
    /// [default: create=10,delete=10,open=10,read=50,append=20]
    #[arg(long, value_name = "OP=N,...", requires = "workload")]
    weights: Option<Weights>,

    /// Make the files and leave them there, for a run with --prepared
    #[arg(long, requires = "workload", conflicts_with = "prepared")]
    prepare_only: bool,

    /// PATH is the directory that a run with --prepare-only and the same other
    /// options has left
    #[arg(long, requires = "workload")]
    prepared: bool,

    /// Leave the files there
    #[arg(long, requires = "workload")]
    keep: bool,
}

/// There is one so far that other tools cannot say.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Workload {
    MailServer,
}

impl FilesArgs {
    /// Whether files are to be loaded at all.
    pub fn is_asked_for(&self) -> bool {
        self.workload.is_some()
    }

    /// What these arguments say of a load in `dir`.
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
