//! `fathom img bench`: `fathom serve --run` with `fathom bench` as the command.

use super::image_opts::ImageArg;
use super::parse_cache;
use anyhow::bail;
use clap::Args;
use fathom_img::{self as img, InfoOptions};
use fathom_spec::values;
use fathom_storage::{Cache, EngineKind};
use fathom_units::parse_size;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Measure sequential reads or writes of an image
///
/// The command serves the image at a temporary vhost-user socket, and runs `fathom bench` as the
/// client of this socket. For other loads, use `fathom serve --run` with `fathom bench`.
#[derive(Debug, Args)]
pub(super) struct BenchArgs {
    /// Number of requests
    #[arg(short, long, default_value_t = 75_000, value_name = "N")]
    count: u64,

    /// Number of requests in flight
    #[arg(short, long, default_value_t = 64, value_name = "N")]
    depth: u32,

    /// Bytes per request, such as 64k
    #[arg(short = 's', long, default_value = "4k", value_parser = parse_size, value_name = "SIZE")]
    buffer_size: u64,

    /// First byte of the disk to use, such as 1G
    #[arg(short, long, default_value = "0", value_parser = parse_size, value_name = "OFFSET")]
    offset: u64,

    /// Write instead of read; the data of the disk is lost
    #[arg(short, long)]
    write: bool,

    /// Number of writes after which to flush [default: never]
    #[arg(long, value_name = "N", requires = "write")]
    flush_interval: Option<u64>,

    /// Cache mode: none, writeback or writethrough
    #[arg(short = 't', long, default_value = "writeback", value_parser = parse_cache)]
    cache: Cache,

    /// How to do I/O
    #[arg(short = 'i', long, value_name = "ENGINE", default_value = "io_uring", value_parser = values::engine())]
    aio: EngineKind,

    /// Linux AIO, the same as --aio native
    #[arg(short, long, conflicts_with = "aio")]
    native: bool,

    /// Read the image even if another process writes to it
    #[arg(short = 'U', long, conflicts_with = "write")]
    force_share: bool,

    /// Source of a key that unlocks the image, such as file:PATH; repeatable
    #[arg(long = "key", value_name = "SOURCE")]
    keys: Vec<String>,

    /// Print JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    image: ImageArg,
}

/// Returns the shell command that runs the load. All values that the command takes from `args` are
/// numbers.
fn load(args: &BenchArgs) -> String {
    let BenchArgs {
        count,
        depth,
        buffer_size,
        offset,
        ..
    } = args;
    let rw = if args.write { "write" } else { "read" };
    let flush = args.flush_interval.unwrap_or_default();
    let json = if args.json { " --json" } else { "" };
    format!(
        "exec \"$FATHOM\" bench --vhost-user \"$vhost_user\" --rw {rw} --number-ios {count} --iodepth {depth} \
         --bs {buffer_size} --offset {offset} --fsync {flush}{json}"
    )
}

pub(super) fn run(args: BenchArgs) -> anyhow::Result<()> {
    if !args.image.keys.is_empty() {
        bail!("name the keys of an encrypted image with --key");
    }
    let format = match args.image.format {
        Some(format) => format,
        None => {
            let options = InfoOptions {
                force_share: args.force_share,
                ..InfoOptions::default()
            };
            match img::info(&args.image.file, &options)?.first() {
                Some(info) => info.image.format(),
                None => bail!("{}: no image", args.image.file),
            }
        }
    };
    let engine = if args.native {
        EngineKind::Native
    } else {
        args.aio
    };
    let mut serve: Vec<OsString> = vec!["serve".into(), args.image.file.to_string().into()];
    serve.extend(["--format", format.name(), "--vhost-user", "-"].map(Into::into));
    serve.extend(["--cache", args.cache.name(), "--aio", engine.name()].map(Into::into));
    if !args.write {
        serve.push("--readonly".into());
    }
    if args.force_share {
        serve.push("--force-share".into());
    }
    serve.extend(
        args.keys
            .iter()
            .flat_map(|key| ["--key".into(), key.into()]),
    );
    serve.extend(["--run".into(), load(&args).into()]);
    let program = std::env::current_exe()?;
    // `exec` returns only if it fails.
    Err(Command::new(&program)
        .args(serve)
        .env("FATHOM", &program)
        .exec()
        .into())
}
