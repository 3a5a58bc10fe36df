//! `fathom img info`: describes an image.

use super::common::LookDeepArgs;
use super::image_opts::ImageArg;
use super::{print, print_json};
use clap::Args;
use fathom_img::{self as img, InfoOptions};

/// Describe an image
#[derive(Debug, Args)]
pub(super) struct InfoArgs {
    /// Describe all images of the backing chain
    #[arg(short, long)]
    backing_chain: bool,
    #[command(flatten)]
    deep: LookDeepArgs,
    #[command(flatten)]
    image: ImageArg,
}

pub(super) fn run(args: &InfoArgs) -> anyhow::Result<()> {
    let options = InfoOptions {
        format: args.image.format,
        force_share: args.deep.look.force_share,
        chain: args.backing_chain,
        allow_dirs: args.deep.allow_dirs.clone(),
    };
    let infos = img::info(&args.image.file, &options)?;
    if args.deep.look.json() {
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
