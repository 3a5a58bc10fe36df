//! `fathom img info`

use super::common::{FormatArg, LookArgs};
use super::{print, print_json};
use clap::Args;
use fathom_img as img;
use std::path::PathBuf;

/// Describe an image
#[derive(Debug, Args)]
pub(super) struct InfoArgs {
    #[command(flatten)]
    format: FormatArg,
    /// Describe all images below it, too
    #[arg(short, long)]
    backing_chain: bool,
    #[command(flatten)]
    look: LookArgs,
    /// The image
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

pub(super) fn run(args: &InfoArgs) -> anyhow::Result<()> {
    let (format, force_share) = (args.format.format, args.look.force_share);
    let infos = img::info(&args.file, format, args.backing_chain, force_share)?;
    if args.look.json() {
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
