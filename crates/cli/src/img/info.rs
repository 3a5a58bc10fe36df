//! `fathom img info`

use super::{Common, parse_format, print, print_json};
use clap::Args;
use fathom_img::{self as img, Format};

/// Describe an image
#[derive(Debug, Args)]
pub(super) struct InfoArgs {
    /// Format of the image; by default what it looks like
    #[arg(short, long, value_parser = parse_format)]
    format: Option<Format>,
    /// Describe all images below it, too
    #[arg(short, long)]
    backing_chain: bool,
    #[command(flatten)]
    common: Common,
}

pub(super) fn run(args: &InfoArgs) -> anyhow::Result<()> {
    let common = &args.common;
    let infos = img::info(
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
