//! The disk that appliances inspect: partitions with the file systems of a small Debian, made from
//! this machine's files.

use std::fs::{self, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::inspect::{Contents, FileSystem};
use crate::disk_image;
use crate::error::{Context, Error, Result};
use crate::host;
use crate::partitions::{self, EFI_SYSTEM, LINUX, Partition, SECTOR};
use crate::scratch::Scratch;

pub const STATUS: &str = "/var/lib/dpkg/status";
const RELEASE: &str = "/etc/os-release";
/// Further files; those that exist are copied.
const MORE: &[&str] = &["/etc/debian_version", "/etc/fstab", "/var/lib/dpkg/arch"];

/// First sector of the first partition, as is usual.
const START: u64 = 2048;
const EFI_SECTORS: u64 = 16 * 2048;

/// The image. The file is removed on drop.
#[derive(Debug)]
pub struct Image {
    dir: Scratch,
    /// Contents that an inspection must find.
    pub contents: Contents,
}

impl Image {
    /// Creates the image.
    ///
    /// # Errors
    /// If this machine is not a Debian system, a program is missing, or there is not enough space.
    pub fn make() -> Result<Image> {
        let dir = Scratch::on_disk()?;
        let root = dir.path().join("root.img");
        let mut files = disk_image::Contents::default();
        let more = MORE.iter().map(Path::new).filter(|path| path.exists());
        for path in [STATUS, RELEASE].map(Path::new).into_iter().chain(more) {
            files.file(path);
        }
        files.make(dir.path(), &root)?;
        let sectors = fs::metadata(&root)
            .context(|| format!("cannot read {}", root.display()))?
            .len()
            / SECTOR;
        let image = Image {
            dir,
            contents: contents(sectors)?,
        };
        image.put_together(&root, sectors)?;
        Ok(image)
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("disk.img")
    }

    /// Writes the partition table, the file system with the files, and an empty EFI system
    /// partition.
    fn put_together(&self, root: &Path, sectors: u64) -> Result<()> {
        let path = self.path();
        let what = || format!("cannot write {}", path.display());
        let partition = |kind, first, sectors| Partition {
            kind,
            first,
            sectors,
        };
        let efi = START + sectors;
        let table = partitions::table(&[
            partition(LINUX, START, sectors),
            partition(EFI_SYSTEM, efi, EFI_SECTORS),
        ])?;
        disk_image::sparse(&path, (efi + EFI_SECTORS) * SECTOR)?;
        let mut file = OpenOptions::new().write(true).open(&path).context(what)?;
        file.write_all_at(&table, partitions::TABLE as u64)
            .context(what)?;
        file.seek(SeekFrom::Start(START * SECTOR)).context(what)?;
        let read = || format!("cannot read {}", root.display());
        let mut root = fs::File::open(root).context(read)?;
        std::io::copy(&mut root, &mut file).context(what)?;
        let (offset, kib) = (efi.to_string(), (EFI_SECTORS / 2).to_string());
        let name = path.to_string_lossy();
        host::run("mkfs.fat", &["-F", "16", "--offset", &offset, &name, &kib]).map(drop)
    }
}

/// Reads the expected contents from this machine's files.
fn contents(sectors: u64) -> Result<Contents> {
    let read = |path: &str| fs::read(path).context(|| format!("cannot read {path}"));
    let (status, release) = (read(STATUS)?, read(RELEASE)?);
    let release = String::from_utf8_lossy(&release);
    let os = { release.lines() }.find_map(|line| line.strip_prefix("PRETTY_NAME="));
    let os = os.ok_or_else(|| Error::Protocol(format!("{RELEASE} has no PRETTY_NAME")))?;
    let lines = status.split(|&byte| byte == b'\n');
    let installed = lines.filter(|line| *line == b"Status: install ok installed");
    let file_system = |kind: &str, sectors| FileSystem {
        kind: kind.to_owned(),
        sectors,
    };
    Ok(Contents {
        file_systems: vec![
            file_system("ext4", sectors),
            file_system("vfat", EFI_SECTORS),
        ],
        os: os.trim_matches('"').to_owned(),
        packages: installed.count() as u64,
        bytes: status.len() as u64,
    })
}
