//! `fathom base`: manages base images that are cached on this host.

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use fathom_base::{Listed, list, profile_of, remove};
use fathom_storage::Location;
use fathom_storage::cached::{CacheTerms, Terms};
use fathom_units::{redacted, short_size};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;

/// Manage cached base images
///
/// `fathom serve --base` fetches a remote base image as needed and caches it on this host. Each
/// image in use has a process, which ends some seconds after its last disk.
#[derive(Debug, Args)]
pub struct BaseCommand {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    List(ListArgs),
    /// Remove an image from the cache
    ///
    /// The image must not be in use by a disk.
    Remove(ImageArgs),
    /// Print the boot profile of an image
    ///
    /// The profile lists the parts of the image that boots read first, for
    /// `fathom serve --base-profile` on other hosts.
    Profile(ImageArgs),
}

/// List cached base images and their size in the cache
#[derive(Debug, Args)]
struct ListArgs {
    #[command(flatten)]
    dir: DirArg,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of commands for one image.
#[derive(Debug, Args)]
struct ImageArgs {
    /// Remote location of the image, as for `fathom serve --base`
    #[arg(value_name = "IMAGE")]
    image: String,

    #[command(flatten)]
    dir: DirArg,
}

#[derive(Debug, Args)]
struct DirArg {
    /// Directory of the cache [default: /var/cache/fathom for root]
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
        // Normalize the location as for disks, so that the path in the cache is the same.
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

/// Runs the process that caches a base image. Reads the terms as JSON from standard input.
pub fn keep() -> anyhow::Result<()> {
    let terms = serde_json::from_reader::<_, Terms>(std::io::stdin().lock());
    let terms = terms.context("invalid terms on standard input")?;
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
        bail!("{image}: not in the cache at {}", place.display());
    }
    match remove(&place).with_context(|| place.display().to_string())? {
        true => Ok(()),
        false => bail!(
            "{image}: in use by disks; remove them first (the image is released some seconds later)"
        ),
    }
}

fn print_profile(args: ImageArgs) -> anyhow::Result<()> {
    let image = args.image.clone();
    let place = args.place();
    let Some(profile) = profile_of(&place).with_context(|| place.display().to_string())? else {
        bail!(
            "{image}: no boot profile is recorded at {}",
            place.display()
        );
    };
    std::io::stdout().lock().write_all(profile.as_bytes())?;
    Ok(())
}
