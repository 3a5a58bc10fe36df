//! Follows an image to the device that the host's block layer sees: through the file's extents,
//! loop devices, mapped devices and partitions.

use fathom_units::cause;
use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use fathom_run::{BlockDevice, Extent};

use super::extents::{self, Piece};
use crate::error::{Context, Result};
use crate::tracers::guest::parse_dev;

/// Location of an image.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Located {
    /// The lowest single device, or `None` if the image has no device or several.
    pub device: Option<BlockDevice>,
    /// Partitions on the path to the device. Bios carry their device numbers.
    pub partitions: Vec<u64>,
    /// Locations of the image's bytes on the device; empty if they are not known.
    pub extents: Vec<Extent>,
    /// Reasons why the image is not followed further.
    pub problems: Vec<String>,
}

/// Maximum number of nested devices, such as loop devices on files on partitions on mapped devices.
const MAX_DEPTH: usize = 16;

/// Follows an image down to its device.
///
/// # Errors
/// When the image cannot be opened.
pub fn locate(image: &Path) -> Result<Located> {
    let what = || format!("cannot look at {}", image.display());
    let metadata = fs::metadata(image).context(what)?;
    let mut located = Located::default();
    let (dev, pieces) = if metadata.file_type().is_block_device() {
        let length = size_of(metadata.rdev());
        (metadata.rdev(), vec![whole(length)])
    } else {
        let file = File::open(image).context(what)?;
        match extents::of_file(&file) {
            Ok(pieces) => (metadata.dev(), pieces),
            Err(error) => {
                let line = format!(
                    "where its bytes lie is unknown: no extents ({})",
                    cause(error)
                );
                located.problems.push(line);
                return Ok(located);
            }
        }
    };
    let sysfs = sysfs_of(rustix::fs::major(dev), rustix::fs::minor(dev));
    if let Err(problem) = down(&sysfs, pieces, &mut located) {
        located.problems.push(problem);
    }
    Ok(located)
}

/// Returns the extents of an image over the time since they were `before`: also those that the file
/// system has allocated since.
///
/// # Errors
/// When bytes of the image have moved, or a place has been used for other bytes: the places at a
/// given time are then not known.
pub(super) fn extents_since(
    image: &Path,
    before: &[Extent],
) -> std::result::Result<Vec<Extent>, String> {
    let now = locate(image).map_err(|error| error.to_string())?;
    union(before, &now.extents).ok_or_else(|| {
        "the file system has moved bytes of its image during the recording, so that their places \
         are not known"
            .to_owned()
    })
}

/// Returns both lists as one. Returns `None` if they contradict each other.
fn union(before: &[Extent], after: &[Extent]) -> Option<Vec<Extent>> {
    let mut all: Vec<Extent> = before.iter().chain(after).copied().collect();
    all.sort_unstable_by_key(|extent| (extent.offset, extent.physical));
    let mut union: Vec<Extent> = Vec::new();
    for extent in all {
        let distance = |extent: &Extent| extent.physical.wrapping_sub(extent.offset);
        match union.last_mut() {
            Some(last)
                if extent.offset <= last.offset + last.length
                    && distance(last) == distance(&extent) =>
            {
                let end = extent.offset + extent.length;
                last.length = last.length.max(end - last.offset);
            }
            Some(last) if extent.offset < last.offset + last.length => return None,
            _ => union.push(extent),
        }
    }
    let mut places: Vec<(u64, u64)> = union.iter().map(|e| (e.physical, e.length)).collect();
    places.sort_unstable();
    let overlap = |pair: &[(u64, u64)]| pair[0].0 + pair[0].1 > pair[1].0;
    (!places.windows(2).any(overlap)).then_some(union)
}

fn whole(length: u64) -> Piece {
    Piece {
        offset: 0,
        physical: 0,
        length,
    }
}

fn sysfs_of(major: u32, minor: u32) -> PathBuf {
    format!("/sys/dev/block/{major}:{minor}").into()
}

fn size_of(dev: u64) -> u64 {
    let path = sysfs_of(rustix::fs::major(dev), rustix::fs::minor(dev)).join("size");
    let text = fs::read_to_string(path).unwrap_or_default();
    text.trim().parse::<u64>().unwrap_or(0).saturating_mul(512)
}

fn read(path: &Path, file: &str) -> Option<String> {
    let text = fs::read_to_string(path.join(file)).ok()?;
    Some(text.trim().to_owned())
}

/// Maps pieces on a device to the devices below it. The error is the reason why that is not
/// possible.
fn down(
    device: &Path,
    mut pieces: Vec<Piece>,
    located: &mut Located,
) -> std::result::Result<(), String> {
    let mut sysfs = fs::canonicalize(device)
        .map_err(|_| "the file system has no block device of its own".to_owned())?;
    for _ in 0..MAX_DEPTH {
        let dev = read(&sysfs, "dev").and_then(|text| parse_dev(&text));
        let dev = dev.ok_or_else(|| format!("{} is no block device", sysfs.display()))?;
        if sysfs.join("partition").exists() {
            let start = read(&sysfs, "start").and_then(|text| text.parse::<u64>().ok());
            let start = start.ok_or("a partition has no start")? * 512;
            for piece in &mut pieces {
                piece.physical += start;
            }
            located.partitions.push(dev);
            sysfs = sysfs.parent().unwrap_or(&sysfs).to_owned();
        } else if sysfs.join("dm").is_dir() {
            let (below, mapped) = mapped(dev, &pieces)?;
            (sysfs, pieces) = (below, mapped);
            located.partitions.clear();
        } else if let Some(file) = read(&sysfs, "loop/backing_file") {
            let offset = read(&sysfs, "loop/offset").and_then(|text| text.parse::<u64>().ok());
            let (below, mapped) = looped(Path::new(&file), offset.unwrap_or(0), pieces)?;
            (sysfs, pieces) = (below, mapped);
            located.partitions.clear();
        } else if sysfs.join("md").is_dir() {
            return Err("on a RAID (md), which is not supported".into());
        } else {
            finish(&sysfs, dev, &pieces, located);
            return Ok(());
        }
    }
    Err("the devices are nested too deeply".into())
}

fn finish(sysfs: &Path, dev: u64, pieces: &[Piece], located: &mut Located) {
    let name = sysfs.file_name().unwrap_or_default().to_string_lossy();
    let schedulers = read(sysfs, "queue/scheduler").unwrap_or_default();
    let used = schedulers.split(['[', ']']).nth(1).unwrap_or(&schedulers);
    located.device = Some(BlockDevice {
        dev,
        name: name.into_owned(),
        scheduler: used.to_owned(),
    });
    let extent = |piece: &Piece| Extent {
        offset: piece.offset,
        physical: piece.physical,
        length: piece.length,
    };
    located.extents = pieces.iter().map(extent).collect();
}

/// Maps pieces through a mapped device with linear or striped targets.
fn mapped(dev: u64, pieces: &[Piece]) -> std::result::Result<(PathBuf, Vec<Piece>), String> {
    let (major, minor) = ((dev >> 20) as u32, (dev & 0xf_ffff) as u32);
    let table = extents::table(major, minor).map_err(|error| {
        format!(
            "the device mapper's table cannot be read ({})",
            cause(error)
        )
    })?;
    let mut below: Option<String> = None;
    let mut inner = Vec::new();
    for target in table {
        let kind = &target.kind;
        let parts = target
            .pieces()
            .ok_or_else(|| format!("on a device-mapper target ({kind}) that is not supported"))?;
        for (device, piece) in parts {
            // Several devices are rejected even if the image does not use all of them.
            if below.get_or_insert_with(|| device.clone()) != &device {
                return Err("on several devices, which is not supported".into());
            }
            inner.push(piece);
        }
    }
    inner.sort_by_key(|piece| piece.offset);
    let below = below.ok_or("the device mapper has no table for it")?;
    let sysfs = fs::canonicalize(format!("/sys/dev/block/{below}"))
        .map_err(|error| format!("no device {below} ({})", cause(error)))?;
    Ok((sysfs, extents::through(pieces, &inner)))
}

/// Maps pieces through a loop device's file.
fn looped(
    file: &Path,
    offset: u64,
    mut pieces: Vec<Piece>,
) -> std::result::Result<(PathBuf, Vec<Piece>), String> {
    for piece in &mut pieces {
        piece.physical += offset;
    }
    let failed = |error: std::io::Error| format!("{}: {}", file.display(), cause(error));
    let metadata = fs::metadata(file).map_err(failed)?;
    if metadata.file_type().is_block_device() {
        let rdev = metadata.rdev();
        let sysfs = sysfs_of(rustix::fs::major(rdev), rustix::fs::minor(rdev));
        return Ok((fs::canonicalize(sysfs).map_err(failed)?, pieces));
    }
    let inner = File::open(file)
        .and_then(|file| extents::of_file(&file))
        .map_err(failed)?;
    let dev = metadata.dev();
    let sysfs = sysfs_of(rustix::fs::major(dev), rustix::fs::minor(dev));
    let sysfs = fs::canonicalize(sysfs)
        .map_err(|_| "the file of its loop device is not on a block device".to_owned())?;
    Ok((sysfs, extents::through(&pieces, &inner)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The oracle is filefrag (e2fsprogs).
    #[test]
    fn extents_are_those_of_filefrag() {
        let dir = tempfile::Builder::new().tempdir_in(".").unwrap();
        let path = dir.path().join("image");
        let mut data = vec![7u8; 3 << 20];
        data[0] = 1;
        fs::write(&path, &data).unwrap();
        File::open(&path).unwrap().sync_all().unwrap();
        let located = locate(&path).unwrap();
        let problems = located.problems.join("; ");
        let needs = "this test needs a build on a file system with extents, such as ext4";
        assert!(!located.extents.is_empty(), "{needs}: {problems}");
        let covered: u64 = located.extents.iter().map(|extent| extent.length).sum();
        assert_eq!(covered, data.len() as u64);
        let name = path.to_string_lossy().into_owned();
        let said = crate::host::run("filefrag", &["-b1", "-v", &name]).unwrap();
        // `   0:        0.. 3145727:  123456..  3269183: 3145728:   last,eof`
        let first = said
            .lines()
            .find(|line| line.trim_start().starts_with("0:"))
            .unwrap();
        let numbers: Vec<u64> = first
            .split([':', '.', ' '])
            .filter_map(|word| word.parse().ok())
            .collect();
        let start = located.partitions.iter().fold(0, |_, dev| {
            let sysfs = sysfs_of((dev >> 20) as u32, (dev & 0xf_ffff) as u32);
            read(&sysfs, "start").unwrap().parse::<u64>().unwrap() * 512
        });
        assert_eq!(located.extents[0].physical, numbers[3] + start, "{said}");
    }

    #[test]
    fn extents_that_were_allocated_meanwhile_are_added() {
        let extent = |offset, physical, length| Extent {
            offset,
            physical,
            length,
        };
        let before = [extent(0, 1000, 10), extent(50, 5000, 10)];
        let after = [extent(0, 1000, 20), extent(30, 9000, 5)];
        let both = [
            extent(0, 1000, 20),
            extent(30, 9000, 5),
            extent(50, 5000, 10),
        ];
        assert_eq!(union(&before, &after).unwrap(), both);
        assert_eq!(union(&[], &after).unwrap(), after);
        // Bytes that have moved, and a place that other bytes have now.
        assert_eq!(union(&before, &[extent(5, 7000, 2)]), None);
        assert_eq!(union(&before, &[extent(80, 5005, 5)]), None);
    }

    /// An image of a file system that was sparse, and is written during the recording.
    #[test]
    fn a_write_to_a_hole_is_found_afterwards() {
        let dir = tempfile::Builder::new().tempdir_in(".").unwrap();
        let path = dir.path().join("image");
        let file = File::create(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        let before = locate(&path).unwrap().extents;
        assert_eq!(before, []);
        std::os::unix::fs::FileExt::write_all_at(&file, &[7; 4096], 65536).unwrap();
        file.sync_all().unwrap();
        let now = extents_since(&path, &before).unwrap();
        assert_eq!((now.len(), now[0].offset), (1, 65536), "{now:?}");
    }

    #[test]
    fn files_in_memory_have_no_device() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("image");
        fs::write(&path, b"x").unwrap();
        let located = locate(&path).unwrap();
        assert_eq!(located.device, None);
        assert_eq!(located.problems.len(), 1);
        assert!(locate(Path::new("/nowhere")).is_err());
    }
}
