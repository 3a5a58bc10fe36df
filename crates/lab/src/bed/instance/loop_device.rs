//! A loop device over an image, as the disk of a container. The kernel removes it when no process
//! has it open or mounted, also when the lab was killed.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{Cache, is_device};
use crate::error::{Context, Error, Result};
use crate::host;

/// A block device that exists while this value lives or the device is mounted.
#[derive(Debug)]
pub struct LoopDevice {
    pub path: PathBuf,
    _open: File,
}

impl LoopDevice {
    /// Creates a loop device over a file. `direct` bypasses the page cache of the file's file
    /// system.
    ///
    /// # Errors
    /// When the caller is not root, no device is free, or the file system has no direct I/O.
    pub fn over(image: &Path, direct: bool) -> Result<LoopDevice> {
        let image_name = image.to_string_lossy();
        let how = format!("--direct-io={}", if direct { "on" } else { "off" });
        let said = host::run("losetup", &["--find", "--show", &how, &image_name])?;
        let path = PathBuf::from(said.trim());
        let open = OpenOptions::new().read(true).open(&path);
        // The device is open, so the kernel removes it at its last close.
        let detached = host::run("losetup", &["--detach", &path.to_string_lossy()]);
        let device = LoopDevice {
            _open: open.context(|| format!("cannot open {}", path.display()))?,
            path,
        };
        detached?;
        match direct && !device.is_direct() {
            true => Err(Error::Unusable {
                path: image.to_owned(),
                reason: "the file system has no direct I/O; use --cache writeback".into(),
            }),
            false => Ok(device),
        }
    }

    fn is_direct(&self) -> bool {
        let name = self.path.file_name().unwrap_or_default();
        let file = Path::new("/sys/block").join(name).join("loop/dio");
        std::fs::read_to_string(file).is_ok_and(|text| text.trim() == "1")
    }
}

/// Returns an image as a block device, with a new loop device if the image is a file.
///
/// # Errors
/// Those of [`LoopDevice::over`].
pub fn block_device(image: &Path, cache: Cache) -> Result<(Option<LoopDevice>, PathBuf)> {
    if is_device(image) {
        return Ok((None, image.to_owned()));
    }
    let device = LoopDevice::over(image, cache == Cache::None)?;
    let path = device.path.clone();
    Ok((Some(device), path))
}

/// Returns a block device's major and minor number.
///
/// # Errors
/// When the device's metadata cannot be read.
pub fn numbers(device: &Path) -> Result<(u32, u32)> {
    let meta = std::fs::metadata(device);
    let meta = meta.context(|| format!("cannot look at {}", device.display()))?;
    let number = meta.rdev();
    Ok((rustix::fs::major(number), rustix::fs::minor(number)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_there_while_somebody_has_it() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let image = dir.path().join("image");
        crate::disk_image::sparse(&image, 1 << 20).unwrap();
        let backing = |path: &Path| {
            let name = path.file_name().unwrap();
            let file = Path::new("/sys/block").join(name).join("loop/backing_file");
            std::fs::read_to_string(file).unwrap_or_default()
        };
        for direct in [true, false] {
            let device = LoopDevice::over(&image, direct).unwrap();
            assert_eq!(device.is_direct(), direct);
            let path = device.path.clone();
            assert_eq!(backing(&path).trim(), image.to_string_lossy());
            assert_eq!(numbers(&path).unwrap().0, 7);
            drop(device);
            // Another program that inspects all block devices may have it open for a moment.
            fathom_testing::until("the end of the loop device", || {
                backing(&path).trim() != image.to_string_lossy()
            });
        }
        let missing = LoopDevice::over(&dir.path().join("missing"), true);
        assert!(missing.unwrap_err().to_string().contains("missing"));
    }
}
