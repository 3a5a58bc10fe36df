//! `fathom img check`: checks and repairs an image.

use super::common::LookArgs;
use super::image_opts::ImageArg;
use super::{print, print_json};
use anyhow::anyhow;
use clap::{Args, ValueEnum};
use fathom_img::{self as img, CheckOptions, Repair};

/// qemu-img's exit status for a format that cannot be checked.
const UNSUPPORTED: i32 = 63;

/// QEMU's cache modes.
const CACHES: [&str; 6] = [
    "none",
    "writeback",
    "writethrough",
    "directsync",
    "unsafe",
    "off",
];

/// Check and repair an image's metadata
///
/// Exit status: 0 no problem; 1 not checked; 2 corrupt; 3 leaked clusters, which do no harm; 63 the
/// format has nothing to check.
#[derive(Debug, Args)]
pub(super) struct CheckArgs {
    /// Free leaked clusters, or repair all problems
    #[arg(short, long, value_enum, conflicts_with = "force_share")]
    repair: Option<RepairWhat>,
    /// Print nothing
    #[arg(short, long)]
    quiet: bool,
    /// Ignored, for scripts of qemu-img
    ///
    /// A check uses the page cache, and flushes its repairs.
    #[arg(short = 'T', long = "cache", value_parser = CACHES, value_name = "MODE")]
    _cache: Option<String>,
    #[command(flatten)]
    look: LookArgs,
    #[command(flatten)]
    image: ImageArg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RepairWhat {
    Leaks,
    All,
}

pub(super) fn run(args: &CheckArgs) -> anyhow::Result<()> {
    let options = CheckOptions {
        repair: match args.repair {
            None => Repair::Nothing,
            Some(RepairWhat::Leaks) => Repair::Leaks,
            Some(RepairWhat::All) => Repair::All,
        },
        ..CheckOptions::default()
    };
    let mut say = |line: &str| {
        if !args.quiet {
            eprintln!("{}", img::shown(line));
        }
    };
    let checked = img::check(
        &args.image.file,
        args.image.format,
        &options,
        args.look.force_share,
        &mut say,
    );
    let (format, report) = match checked {
        Err(img::Error::Raw { path }) => {
            let error = img::Error::Raw { path }.to_string();
            eprintln!("fathom: {}", img::shown(&error));
            std::process::exit(UNSUPPORTED);
        }
        other => other.map_err(|e| anyhow!(e))?,
    };
    if args.look.json() {
        let name = args.image.file.to_string();
        print_json(&report.to_json(&name, format))?;
    } else if !args.quiet {
        print(&report)?;
    }
    match report.exit_status() {
        0 => Ok(()),
        status => std::process::exit(status.into()),
    }
}
