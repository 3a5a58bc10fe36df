//! `fathom backup full` and `incremental`: backups that are written to a target.

use super::place::{Place, or_here, real};
use super::{KeepArgs, disk_of, end};
use crate::bitmap;
use crate::img::common::{KeysArg, RateArg};
use crate::img::watch::{WatchArgs, interrupted, stop_flag, tell_outcome, watched_until};
use crate::img::{format_options, parse_format};
use crate::target::{Disk, Target};
use anyhow::{Context, anyhow, bail};
use clap::Args;
use fathom_img::{
    self as img, Backing, CompareOptions, Comparison, ConvertOptions, Format, IncrementalOptions,
    OpenOptions, Progress, Source, StripeOptions, TargetOptions,
};
use fathom_metrics::BackupInfo;
use fathom_storage::{Cache, EngineKind};
use serde_json::json;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

/// Arguments of full and incremental backups.
#[derive(Args, Debug)]
struct SaveArgs {
    #[command(flatten)]
    target: Target,

    /// File to create, such as monday.qcow2
    ///
    /// A full backup can also go to rbd:POOL/IMAGE, which is created, to an NBD URI, whose disk is
    /// overwritten, or with --archive to the image of this name in the archive.
    #[arg(value_name = "FILE")]
    file: OsString,

    /// Options of the format, such as cluster_size=1M; `-o help` lists them
    #[arg(
        short = 'o',
        long = "target-options",
        value_name = "NAME=VALUE,...",
        help_heading = "Target"
    )]
    options: Vec<String>,
    /// Compress the backup (qcow2 only)
    #[arg(short, long, help_heading = "Target")]
    compress: bool,
    #[command(flatten, next_help_heading = "Target")]
    keys: KeysArg,
    #[command(flatten, next_help_heading = "Target")]
    rate: RateArg,
    /// Compare the backup with the disk before the backup ends
    #[arg(long, help_heading = "Target")]
    verify: bool,

    #[command(flatten)]
    keep: KeepArgs,
    #[command(flatten, next_help_heading = "Output")]
    watch: WatchArgs,
}

/// A disk and the place its backup is written to.
struct Item {
    disk: Disk,
    place: Place,
}

/// Make a full backup of a disk
///
/// FILE appears when the backup is complete and durable; until then an older file of this name
/// stays. If the backup fails, an image on Ceph is removed again. A disk on an NBD server is
/// incomplete until the backup is done.
#[derive(Args, Debug)]
pub struct FullArgs {
    /// Format of the backup: qcow2, raw, qed or luks
    #[arg(short = 'O', long, value_parser = parse_format, default_value = "qcow2", value_name = "FORMAT",
          help_heading = "Target")]
    target_format: Format,

    /// Another disk on this host to back up at the same moment, and its file; repeatable
    ///
    /// The files appear when all backups are complete.
    #[arg(long, value_name = "NAME=FILE", value_parser = parse_item, help_heading = "Target")]
    with: Vec<(String, OsString)>,

    /// Archive to write to: a directory or s3://BUCKET/PREFIX
    ///
    /// Data that is already in the archive is not stored again (see `fathom img archive`). FILE is
    /// the name of the image in the archive.
    #[arg(long, help_heading = "Target", conflicts_with_all = ["target_format", "options", "compress", "verify", "keys"])]
    archive: Option<String>,

    /// Dirty bitmap for later incremental backups
    ///
    /// The bitmap records changes from the moment of this backup. An existing bitmap is cleared.
    #[arg(long, value_name = "NAME", help_heading = "Series")]
    bitmap: Option<String>,

    #[command(flatten)]
    save: SaveArgs,
}

fn parse_item(text: &str) -> Result<(String, OsString), String> {
    match text.split_once('=') {
        Some((name, file)) if !name.is_empty() && !file.is_empty() => {
            Ok((name.into(), file.into()))
        }
        _ => Err(format!("'{text}' is not NAME=FILE")),
    }
}

impl FullArgs {
    fn place(&self, text: &OsStr) -> anyhow::Result<Place> {
        match &self.archive {
            Some(archive) => Place::archive(archive, text),
            None => Place::named(text, self.target_format),
        }
    }

    fn items(&self) -> anyhow::Result<Vec<Item>> {
        let target = &self.save.target;
        let first = target.disk().map(|disk| (disk, &self.save.file));
        let others = self.with.iter();
        let others = others.map(|(name, file)| Ok((disk_of(target, name)?, file)));
        let items = std::iter::once(first).chain(others).map(|item| {
            let (disk, file) = item?;
            let place = self.place(file)?;
            place.refuse_in_use()?;
            Ok(Item { disk, place })
        });
        let items = items.collect::<anyhow::Result<Vec<_>>>()?;
        let mut places: Vec<_> = items.iter().map(|item| &item.place).collect();
        places.sort();
        match places.windows(2).find(|two| two[0] == two[1]) {
            Some(two) => bail!(
                "{}: is the target of two disks; choose another name for one of them",
                two[0].shown()
            ),
            None => Ok(items),
        }
    }
}

pub fn full(args: FullArgs) -> anyhow::Result<()> {
    let format = args.target_format;
    let Some(create) = format_options(format, &args.save.options)? else {
        return Ok(());
    };
    let items = args.items()?;
    let options = |is_there| ConvertOptions {
        target: TargetOptions {
            create: create.clone(),
            cache: Cache::Writeback,
            engine: EngineKind::default(),
            no_create: is_there,
            target_is_zero: false,
            compress: args.save.compress,
            sparse: 4096,
            allow_dirs: Vec::new(),
            data_file: None,
            keys: args.save.keys.ring(),
        },
        rate: args.save.rate.rate,
        parallel: 16,
        salvage: false,
        bitmaps: None,
        part: None,
        to_stream: false,
    };
    let bitmap = args.bitmap.as_deref();
    save(&args.save, &items, bitmap, true, |info, place, progress| {
        let before = [before(info)?];
        if let Place::Archive { archive, name } = place {
            let stripes = StripeOptions::default();
            img::archive(&before[0], archive, name, &stripes, progress)?;
            return Ok(None);
        }
        img::convert(
            &before,
            place.target(),
            &options(place.is_there()),
            progress,
        )?;
        let copy = OpenOptions {
            keys: args.save.keys.ring(),
            ..OpenOptions::reading(Some(format))
        };
        verify(&args.save, &before[0], place, copy, progress)
    })
}

/// Make an incremental backup: save what has changed since the last backup
///
/// FILE is a qcow2 image whose backing image is the last backup; both together are the disk as of
/// now. The dirty bitmap records the changes and advances to this backup when it is durable. A
/// failed backup changes nothing. If the bitmap is not reliable (`fathom bitmap list` shows why),
/// the backup has all data.
#[derive(Args, Debug)]
pub struct IncrementalArgs {
    /// Dirty bitmap of the series, as for `fathom backup full --bitmap`
    #[arg(long, value_name = "NAME", help_heading = "Series")]
    bitmap: String,

    /// Last backup of the series, which becomes the backing image
    #[arg(long, value_name = "FILE", help_heading = "Series")]
    base: PathBuf,

    /// Format of the last backup
    #[arg(long, value_parser = parse_format, default_value = "qcow2", value_name = "FORMAT",
          help_heading = "Series")]
    base_format: Format,

    #[command(flatten)]
    save: SaveArgs,
}

pub fn incremental(args: IncrementalArgs) -> anyhow::Result<()> {
    let Some(create) = format_options(Format::Qcow2, &args.save.options)? else {
        return Ok(());
    };
    let file = real(Path::new(&args.save.file));
    let place = Place::file(&file)?;
    if file.exists() {
        bail!(
            "{}: exists already, and may be a part of the series; choose another name",
            file.display()
        );
    }
    let backing = backing(&args, &file)?;
    let disk = args.save.target.disk()?;
    refuse_without(&disk, &args.bitmap)?;
    let dirs = Vec::from_iter(real(&args.base).parent().map(Path::to_owned));
    let options = IncrementalOptions {
        backing: Backing {
            name: backing,
            format: Some(args.base_format),
        },
        create,
        cache: Cache::Writeback,
        engine: EngineKind::default(),
        compress: args.save.compress,
        rate: args.save.rate.rate,
        parallel: 16,
        allow_dirs: dirs.clone(),
        keys: args.save.keys.ring(),
    };
    let items = [Item { disk, place }];
    save(
        &args.save,
        &items,
        Some(&args.bitmap),
        false,
        |info, place, progress| {
            let uri = OsStr::new(&info.uri);
            img::incremental(uri, &args.bitmap, place.target(), &options, progress)?;
            let chain = OpenOptions {
                allow_dirs: dirs.clone(),
                keys: args.save.keys.ring(),
                ..OpenOptions::reading(Some(Format::Qcow2))
            };
            verify(&args.save, &before(info)?, place, chain, progress)
        },
    )
}

/// Returns the name by which the new image refers to its backing image.
///
/// Inside one directory the name is relative, so that a series can be moved with its directory.
fn backing(args: &IncrementalArgs, file: &Path) -> anyhow::Result<String> {
    let base = fs::canonicalize(&args.base);
    let base = base.with_context(|| format!("{}: not a backup", args.base.display()))?;
    let dir = file.parent().map(|dir| fs::canonicalize(or_here(dir)));
    let dir = dir
        .transpose()
        .with_context(|| format!("{}", file.display()))?;
    let name = match base.parent() == dir.as_deref() {
        true => base.file_name().map(PathBuf::from),
        false => Some(base),
    };
    let name = name.and_then(|name| name.into_os_string().into_string().ok());
    name.ok_or_else(|| {
        anyhow!(
            "{}: the name is not UTF-8, so that an image cannot refer to it",
            args.base.display()
        )
    })
}

/// Fails if the disk does not have the bitmap: the backup would be as large as a full one.
fn refuse_without(disk: &Disk, bitmap: &str) -> anyhow::Result<()> {
    match bitmap::all_of(disk)?
        .iter()
        .any(|found| found.name == bitmap)
    {
        true => Ok(()),
        false => bail!(
            "disk '{}' has no bitmap '{bitmap}': begin the series with `fathom backup full --bitmap {bitmap}`",
            disk.name
        ),
    }
}

/// Begins the backups, writes and verifies each one, and puts them in place.
///
/// If one backup fails, all places are discarded. If all succeed, the bitmaps advance.
fn save(
    args: &SaveArgs,
    items: &[Item],
    bitmap: Option<&str>,
    may_replace: bool,
    mut write: impl FnMut(
        &BackupInfo,
        &Place,
        &mut Progress<'_>,
    ) -> Result<Option<Comparison>, img::Error>,
) -> anyhow::Result<()> {
    let disks: Vec<_> = items.iter().map(|item| &item.disk).collect();
    begin_all(items)?;
    let discard = || items.iter().for_each(|item| item.place.discard());
    let infos = args.keep.begin(&disks, bitmap).inspect_err(|_| discard())?;
    // From here on, every backup that has begun is also ended, even after a signal.
    let stop = stop_flag()?;
    signal_hook::flag::register(signal_hook::consts::SIGHUP, stop.clone())?;
    let mut outcome = Ok(());
    let mut interruption = None;
    for (item, info) in items.iter().zip(&infos) {
        let written = outcome.is_ok().then(|| {
            watched_until(&args.watch, &stop, |progress: &mut Progress<'_>| {
                write(info, &item.place, progress)
            })
        });
        // The backup is ended in any case, so that it does not slow down the disk's users any
        // longer.
        let ended = end(&item.disk, &info.id);
        let written = match written {
            None => continue,
            Some(Ok(same)) => ended
                .and(check(same, &item.place))
                .and_then(|()| item.place.refuse_in_use()),
            Some(Err(error)) => {
                if matches!(error, img::Error::Interrupted) {
                    interruption = Some(error.to_string());
                }
                // If the backup itself has failed, its error explains the failed read better.
                ended.and(Err(error.into()))
            }
        };
        outcome = written;
    }
    for item in items {
        let put = || item.place.put(may_replace);
        outcome = outcome.and_then(|()| put().with_context(|| one_of(items)));
        if outcome.is_err() {
            item.place.discard();
        }
    }
    // The bitmaps advance only now: until then, the next backup must include these changes.
    let is_there = outcome.is_ok();
    for (item, info) in items.iter().zip(&infos).filter(|_| is_there) {
        let advance = |name| advance(&item.disk, name, info.successor);
        // Every bitmap is advanced, even if an earlier one fails.
        outcome = outcome.and(bitmap.map_or(Ok(()), advance));
    }
    let told = outcome.as_ref().map(|()| json!({}));
    tell_outcome(&args.watch, told);
    if let Some(interruption) = interruption {
        interrupted(&interruption);
    }
    outcome
}

/// Prepares all places; on an error, discards those that are already prepared.
fn begin_all(items: &[Item]) -> anyhow::Result<()> {
    for (n, item) in items.iter().enumerate() {
        let begun = item.place.begin();
        begun.inspect_err(|_| items[..n].iter().for_each(|item| item.place.discard()))?;
    }
    Ok(())
}

/// Describes the state of the backups when one of them cannot be put in place.
fn one_of(items: &[Item]) -> String {
    match items {
        [_] => "the backup is lost".into(),
        _ => "the backups before it are complete, but of another moment than the lost ones".into(),
    }
}

fn advance(disk: &Disk, bitmap: &str, to: Option<u64>) -> anyhow::Result<()> {
    bitmap::advance(disk, bitmap, to).with_context(|| {
        format!(
            "the backup is complete, but bitmap '{bitmap}' of disk '{}' has not advanced to it; the next backup also \
             saves the changes of this one",
            disk.name
        )
    })
}

/// Opens the disk's contents at the instant of the backup.
fn before(info: &BackupInfo) -> Result<Source, img::Error> {
    // A reconnect is useless: the preserved data is lost when its server stops.
    let open = OpenOptions {
        reconnects: false,
        ..OpenOptions::reading(Some(Format::Raw))
    };
    Source::new(info.uri.as_ref(), open)
}

/// Compares the copy with the disk, if --verify is given.
fn verify(
    args: &SaveArgs,
    before: &Source,
    place: &Place,
    open: OpenOptions,
    progress: &mut Progress<'_>,
) -> Result<Option<Comparison>, img::Error> {
    if !args.verify {
        return Ok(None);
    }
    let copy = Source::new(place.target(), open)?;
    img::compare([before, &copy], CompareOptions::default(), progress).map(Some)
}

/// Fails if a comparison was made and the copy differs from the disk.
fn check(found: Option<Comparison>, place: &Place) -> anyhow::Result<()> {
    let problem = match found {
        None
        | Some(Comparison::Identical {
            sizes_differ: false,
        }) => return Ok(()),
        Some(Comparison::Content {
            offset,
            is_behind: true,
            ..
        }) => format!(
            "has data behind the end of the disk, at byte {offset}; use a target of the disk's size"
        ),
        Some(Comparison::Content { offset, .. }) => format!(
            "differs from the disk at byte {offset}; check the storage of both, and make the backup again"
        ),
        Some(
            Comparison::Identical { sizes_differ: true }
            | Comparison::Sizes
            | Comparison::Allocation { .. },
        ) => "has another size than the disk; use a target of the disk's size".into(),
    };
    bail!(
        "{}: not a backup, because the copy {problem}",
        place.shown()
    )
}
