//! A loop device over an image: what a container has for a disk. The kernel takes it away when
//! nobody has it open or mounted any more, also when the lab was killed.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{Cache, is_device};
use crate::error::{Context, Error, Result};
use crate::host;

/// A block device for as long as this lives, and somebody has mounted it.
#[derive(Debug)]
pub struct LoopDevice {
    pub path: PathBuf,
    _open: File,
}

impl LoopDevice {
    /// Makes one over a file; `direct`: past the page cache of the file's file system.
    ///
    /// # Errors
    /// Without root's rights or free devices, or when the file system has no direct I/O.
    pub fn over(image: &Path, direct: bool) -> Result<LoopDevice> {
        let image_name = image.to_string_lossy();
        let how = format!("--direct-io={}", if direct { "on" } else { "off" });
        let said = host::run("losetup", &["--find", "--show", &how, &image_name])?;
        let path = PathBuf::from(said.trim());
        let open = OpenOptions::new().read(true).open(&path);
        // While it is open, this asks for its end at the last close.
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

/// An image as a block device.
///
/// # Errors
/// As [`LoopDevice::over`].
pub fn block_device(image: &Path, cache: Cache) -> Result<(Option<LoopDevice>, PathBuf)> {
    if is_device(image) {
        return Ok((None, image.to_owned()));
    }
    let device = LoopDevice::over(image, cache == Cache::None)?;
    let path = device.path.clone();
    Ok((Some(device), path))
}

/// A block device's numbers.
///
/// # Errors
/// When it cannot be looked at.
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
            // Another program that looks at all block devices may have it open for a moment.
            fathom_testing::until("the end of the loop device", || {
                backing(&path).trim() != image.to_string_lossy()
            });
        }
        let missing = LoopDevice::over(&dir.path().join("missing"), true);
        assert!(missing.unwrap_err().to_string().contains("missing"));
    }
}
