//! `fathom img`: making, describing and checking images, with the options and
//! the output that users of qemu-img know.

use anyhow::{anyhow, bail};
use clap::{Args, Subcommand, ValueEnum};
use fathom_daemon::images::{self, Backing, CheckOptions, CreateOptions, Format, Repair};
use fathom_daemon::size::parse_size;
use std::io::Write;
use std::path::PathBuf;

/// qemu-img's exit status for a format that has nothing to check.
const UNSUPPORTED: i32 = 63;

/// Make, describe and check images
#[derive(Debug, Args)]
pub struct ImgArgs {
    #[command(subcommand)]
    command: ImgCommand,
}

#[derive(Debug, Subcommand)]
enum ImgCommand {
    Create(CreateArgs),
    Info(InfoArgs),
    Check(CheckArgs),
}

/// Make an image (what the file had in it is lost)
#[derive(Debug, Args)]
struct CreateArgs {
    /// Format of the image
    #[arg(short, long, default_value = "raw", value_parser = parse_format)]
    format: Format,
    /// Backing file, as it is to be written in the image: absolute or seen from the image
    #[arg(short, long, value_name = "PATH")]
    backing: Option<String>,
    /// Format of the backing file
    #[arg(short = 'F', long, value_parser = parse_format, requires = "backing", value_name = "FORMAT")]
    backing_format: Option<Format>,
    /// Options of the format, or `help`
    #[arg(short, long = "option", value_name = "NAME=VALUE,...")]
    options: Vec<String>,
    /// Do not look at the backing file, which may not even be there
    #[arg(short, long)]
    unsafe_backing: bool,
    /// Print nothing
    #[arg(short, long)]
    quiet: bool,
    /// Print JSON: the description of the image made
    #[arg(long)]
    json: bool,
    /// The image
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Size of the disk; by default that of the backing file
    #[arg(value_parser = parse_size)]
    size: Option<u64>,
}

/// Describe an image
#[derive(Debug, Args)]
struct InfoArgs {
    /// Format of the image; by default what it looks like
    #[arg(short, long, value_parser = parse_format)]
    format: Option<Format>,
    /// Describe all images below it, too
    #[arg(long)]
    backing_chain: bool,
    #[command(flatten)]
    common: Common,
}

/// Check an image's metadata (exit status 0: consistent; 1: not checked; 2: corrupt;
/// 3: space is lost; 63: raw)
#[derive(Debug, Args)]
struct CheckArgs {
    /// Format of the image; by default what it looks like
    #[arg(short, long, value_parser = parse_format)]
    format: Option<Format>,
    /// Repair lost space only, or all there is to repair
    #[arg(short, long, value_enum, conflicts_with = "force_share")]
    repair: Option<RepairWhat>,
    /// Print nothing
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Args)]
struct Common {
    /// Read the image even though another process writes to it
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The same, as qemu-img has it
    #[arg(long, value_enum, value_name = "FORM", default_value = "human")]
    output: Output,
    /// The image
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

impl Common {
    fn json(&self) -> bool {
        self.json || self.output == Output::Json
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    Human,
    Json,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RepairWhat {
    Leaks,
    All,
}

fn parse_format(name: &str) -> Result<Format, String> {
    Format::from_name(name).map_err(|e| e.to_string())
}

pub fn run(args: ImgArgs) -> anyhow::Result<()> {
    match args.command {
        ImgCommand::Create(args) => create(args),
        ImgCommand::Info(args) => info(&args),
        ImgCommand::Check(args) => check(&args),
    }
}

fn print(text: impl std::fmt::Display) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    write!(out, "{text}")?;
    out.flush()?;
    Ok(())
}

fn print_json(value: &serde_json::Value) -> anyhow::Result<()> {
    print(format_args!("{value:#}\n"))
}

/// `a=b,c=d` as pairs; two commas stand for one within a value, and a name
/// alone means `on`.
fn pairs(text: &str) -> Vec<(String, String)> {
    let mut parts = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c != ',' {
            parts.last_mut().expect("one at least").push(c);
        } else if chars.next_if_eq(&',').is_some() {
            parts.last_mut().expect("one at least").push(',');
        } else {
            parts.push(String::new());
        }
    }
    parts.retain(|part| !part.is_empty());
    let pair = |part: &String| match part.split_once('=') {
        Some((name, value)) => (name.to_owned(), value.to_owned()),
        None => (part.clone(), "on".to_owned()),
    };
    parts.iter().map(pair).collect()
}

fn create(args: CreateArgs) -> anyhow::Result<()> {
    let mut options = CreateOptions::new(args.format);
    for (name, value) in args.options.iter().flat_map(|text| pairs(text)) {
        if name == "help" || name == "?" {
            let names = CreateOptions::names(args.format).join("\n");
            return print(format_args!("{names}\n"));
        }
        options.set(&name, &value, parse_size)?;
    }
    if let Some(name) = args.backing {
        if args.format == Format::Raw {
            bail!("raw images have no backing file");
        }
        let format = args.backing_format;
        options.backing = Some(Backing { name, format });
    }
    options.size = args.size.or(options.size);
    let size = images::create(&args.file, &options, args.unsafe_backing)?;
    options.size = Some(size);
    if args.json {
        let format = Some(args.format);
        for info in images::info(&args.file, format, false, false)? {
            print_json(&info.to_json())?;
        }
    } else if !args.quiet {
        print(format_args!(
            "Formatting '{}', {options}\n",
            args.file.display()
        ))?;
    }
    Ok(())
}

fn info(args: &InfoArgs) -> anyhow::Result<()> {
    let common = &args.common;
    let infos = images::info(
        &common.file,
        args.format,
        args.backing_chain,
        common.force_share,
    )?;
    if common.json() {
        let mut all: Vec<_> = infos.iter().map(|info| info.to_json()).collect();
        return match all.pop() {
            Some(one) if !args.backing_chain => print_json(&one),
            last => {
                all.extend(last);
                print_json(&all.into())
            }
        };
    }
    let texts: Vec<_> = infos.iter().map(ToString::to_string).collect();
    print(texts.join("\n"))
}

fn check(args: &CheckArgs) -> anyhow::Result<()> {
    let common = &args.common;
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
            eprintln!("{line}");
        }
    };
    let checked = images::check(
        &common.file,
        args.format,
        &options,
        common.force_share,
        &mut say,
    );
    let (format, report) = match checked {
        Err(images::Error::Raw { path }) => {
            eprintln!("fathom: {}", images::Error::Raw { path });
            std::process::exit(UNSUPPORTED);
        }
        other => other.map_err(|e| anyhow!(e))?,
    };
    if common.json() {
        let name = common.file.display().to_string();
        print_json(&report.to_json(&name, format))?;
    } else if !args.quiet {
        print(&report)?;
    }
    match report.exit_status() {
        0 => Ok(()),
        status => std::process::exit(status.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_split_as_qemu_img_does() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(pairs(""), []);
        assert_eq!(pairs("a=b"), [pair("a", "b")]);
        assert_eq!(
            pairs("a=b,,c,d,e=f=g,"),
            [pair("a", "b,c"), pair("d", "on"), pair("e", "f=g")]
        );
    }
}
