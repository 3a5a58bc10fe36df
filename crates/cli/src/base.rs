//! `fathom base`: base images that are kept on this host.

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use fathom_base::{Listed, list, profile_of, remove};
use fathom_storage::Location;
use fathom_storage::cached::{CacheTerms, Terms};
use fathom_units::{redacted, short_size};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;

/// Base images that are kept on this host
///
/// Images that come from afar as they are needed (`fathom serve --base`) are kept, so that they come once. An
/// image that disks use has a process of its own, which ends when they do.
#[derive(Debug, Args)]
pub struct BaseCommand {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    List(ListArgs),
    Remove(ImageArgs),
    Profile(ImageArgs),
}

/// List them, with what they take
#[derive(Debug, Args)]
struct ListArgs {
    #[command(flatten)]
    dir: DirArg,

    /// In JSON, one object
    #[arg(long)]
    json: bool,
}

/// Remove what is kept of an image that no disk uses (`remove`), or print which of its stripes boots read
/// first (`profile`), for --base-profile on other hosts
#[derive(Debug, Args)]
struct ImageArgs {
    /// Where it comes from, as it was given to --base
    #[arg(value_name = "IMAGE")]
    image: String,

    #[command(flatten)]
    dir: DirArg,
}

#[derive(Debug, Args)]
struct DirArg {
    /// Where they are kept [default: /var/cache/fathom, or a user's own]
    #[arg(long, value_name = "DIR")]
    base_cache: Option<PathBuf>,
}

impl DirArg {
    fn dir(self) -> PathBuf {
        self.base_cache.unwrap_or_else(|| CacheTerms::default().dir)
    }
}

impl ImageArgs {
    fn place(self) -> PathBuf {
        let cache = CacheTerms {
            dir: self.dir.dir(),
            ..CacheTerms::default()
        };
        // As disks have it.
        let location = Location::cached(&self.image).ok();
        let remote = location
            .as_ref()
            .and_then(Location::remote)
            .unwrap_or(&self.image);
        Terms::new(remote.to_owned(), cache).place()
    }
}

pub fn run(command: BaseCommand) -> anyhow::Result<()> {
    match command.what {
        What::List(args) => list_all(args),
        What::Remove(args) => remove_one(args),
        What::Profile(args) => print_profile(args),
    }
}

/// A keeper's whole life.
pub fn keep() -> anyhow::Result<()> {
    let terms = serde_json::from_reader::<_, Terms>(std::io::stdin().lock());
    let terms = terms.context("its terms are not understood")?;
    let remote = fathom_img::shown(&terms.remote);
    let remote = redacted(&remote);
    fathom_base::keep(terms).map_err(|problem| anyhow::anyhow!("{remote}: {problem}"))
}

fn list_all(args: ListArgs) -> anyhow::Result<()> {
    let dir = args.dir.dir();
    let all = list(&dir).with_context(|| dir.display().to_string())?;
    let mut out = std::io::stdout().lock();
    if args.json {
        let all: Vec<_> = all.iter().map(as_json).collect();
        writeln!(out, "{}", json!({ "bases": all }))?;
        return Ok(());
    }
    for Listed {
        about,
        taken,
        is_used,
        ..
    } in &all
    {
        let (taken, size) = (short_size(*taken), short_size(about.origin.size));
        let used = if *is_used { "in use" } else { "" };
        writeln!(
            out,
            "{taken:>8} of {size:>8}  {used:6}  {}",
            fathom_img::shown(&redacted(&about.remote))
        )?;
    }
    Ok(())
}

fn as_json(listed: &Listed) -> serde_json::Value {
    let origin = &listed.about.origin;
    json!({
        "image": redacted(&listed.about.remote),
        "directory": listed.place,
        "size": origin.size,
        "stripe": origin.stripe,
        "version": origin.version,
        "taken": listed.taken,
        "in_use": listed.is_used,
    })
}

fn remove_one(args: ImageArgs) -> anyhow::Result<()> {
    let image = args.image.clone();
    let place = args.place();
    if !place.exists() {
        bail!("{image}: nothing of it is kept at {}", place.display());
    }
    match remove(&place).with_context(|| place.display().to_string())? {
        true => Ok(()),
        false => bail!(
            "{image}: disks use it: end them first (its keeper ends some seconds after the last)"
        ),
    }
}

fn print_profile(args: ImageArgs) -> anyhow::Result<()> {
    let image = args.image.clone();
    let place = args.place();
    let Some(profile) = profile_of(&place).with_context(|| place.display().to_string())? else {
        bail!("{image}: no boot was recorded at {}", place.display());
    };
    std::io::stdout().lock().write_all(profile.as_bytes())?;
    Ok(())
}
