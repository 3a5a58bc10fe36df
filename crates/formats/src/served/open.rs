//! Opens a chain: the top image, the files that it names, and the files that those name.

use super::condition::ImageCondition;
use super::counts::ImageCounts;
use super::encrypted::{Fingerprint, Keys, open_data, open_luks};
use super::foreign;
use super::helpers::Helpers;
use super::io::StorageId;
use super::options::ImageOptions;
use super::problem::{told, unusable};
use super::side_view::SideViewKind;
use super::storage::{Opener, Storage};
use crate::Image;
use crate::{Error, Format, HostOffset, qcow2, resolve};
use fathom_core::{DiskError, DiskInfo, RangeLimits};
use parking_lot::Mutex;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Maximum bytes of a discard or zeroing in one request, which mostly changes entries.
const MAX_RANGE: u64 = 1 << 30;

/// Granularity in bytes to which a file may grow when whole blocks of its device are written.
const MAX_BLOCK: u64 = 4096;

/// Maximum number of images in a chain.
pub const MAX_CHAIN: usize = 200;

/// An image of a chain, by its header.
#[derive(Clone)]
pub(super) struct Link {
    pub(super) storage: StorageId,
    /// Storage of its guest data.
    pub(super) data: StorageId,
    pub(super) image: Image,
    /// For a raw image: offset of the disk in its file, and size of the disk in bytes.
    pub(super) raw: (HostOffset, u64),
    pub(super) writable: bool,
    /// Fingerprint of the header by which its guest data is encrypted.
    pub(super) crypto_fingerprint: Option<Fingerprint>,
}

impl Link {
    /// Returns the size in bytes of the disk that this image and those below it form.
    pub(super) fn size(&self) -> u64 {
        match self.image.has_tables() {
            true => self.image.size(),
            false => self.raw.1,
        }
    }
}

/// A file and its format, as the image above names them.
struct Named {
    file: Arc<dyn Storage>,
    format: Format,
}

/// All images of a chain, and their files.
pub(super) struct Chain {
    /// The images that the disk now consists of.
    links: Mutex<Arc<[Link]>>,
    /// Sizes in bytes of the images when the chain was opened.
    opened: Vec<u64>,
    /// Whether the top image could have bitmaps when it was opened.
    pub(super) can_have_bitmaps: bool,
    pub(super) storages: Vec<Arc<dyn Storage>>,
    pub(super) counts: Arc<ImageCounts>,
    pub(super) condition: Arc<ImageCondition>,
}

impl Chain {
    pub(super) fn open(
        file: Arc<dyn Storage>,
        opener: &dyn Opener,
        options: &ImageOptions,
        helpers: &Arc<Helpers>,
    ) -> Result<Chain, DiskError> {
        let mut chain = Chain {
            counts: Arc::default(),
            condition: Arc::default(),
            links: Mutex::default(),
            opened: Vec::new(),
            can_have_bitmaps: false,
            storages: Vec::new(),
        };
        let mut links = Vec::new();
        let mut next = Some(Named {
            file,
            format: options.format,
        });
        while let Some(Named { file, format }) = next {
            let path = file.path().to_owned();
            if links.len() == MAX_CHAIN {
                let problem =
                    format!("its chain of backing files has more than {MAX_CHAIN} images");
                return Err(unusable(chain.path(), problem));
            }
            let depth = links.len();
            let writable = is_writable(options, depth);
            let (file, mut image) = read_header(file, format, opener, helpers)?;
            if let (Some(name), true) = (&options.snapshot, links.is_empty()) {
                image = image.at_snapshot(file.bytes(), name).map_err(told(&path))?;
            }
            check(&path, &image, opens_for_writing(options, depth))?;
            if !options.any_size {
                refuse_empty(&path, &image)?;
            }
            let file = match &image {
                Image::Luks(_) => open_luks(file, &options.keys, helpers)?,
                _ => file,
            };
            let storage = chain.add(file)?;
            if image.is_corrupt() {
                chain.condition.note_damage(storage);
            }
            let data = chain.open_data_file(&path, &image, storage, opener, writable)?;
            let (data, crypto_fingerprint) =
                chain.unlock_data(&image, storage, data, &options.keys, helpers)?;
            let raw = match links.is_empty() {
                true => raw_window(&path, &image, options)?,
                false => (HostOffset(0), image.size()),
            };
            let below = opens_for_writing(options, depth + 1);
            next = chain.open_backing_file(&path, &image, opener, below)?;
            links.push(Link {
                storage,
                data,
                image,
                raw,
                writable,
                crypto_fingerprint,
            });
        }
        chain.can_have_bitmaps = links[0].image.can_have_bitmaps();
        chain.opened = links.iter().map(Link::size).collect();
        chain.set_links(links);
        Ok(chain)
    }

    /// Returns the images, from the top image down.
    pub(super) fn links(&self) -> Arc<[Link]> {
        self.links.lock().clone()
    }

    /// Replaces the images while the disk is not in use. All files stay open.
    pub(super) fn set_links(&self, links: Vec<Link>) {
        *self.links.lock() = links.into();
    }

    /// Returns the files of these images, those of the first image first.
    pub(super) fn files_of(&self, links: &[Link]) -> Vec<&Arc<dyn Storage>> {
        // (The files of one image have consecutive numbers.)
        let ids = links.iter().flat_map(|link| link.storage..=link.data);
        ids.map(|id| &self.storages[usize::from(id)]).collect()
    }

    /// Returns whether the chain has all its images, and backing images kept their sizes.
    pub(super) fn is_as_opened(&self) -> bool {
        let now = self.links();
        let mut below = now.iter().zip(&self.opened).skip(1);
        now.len() == self.opened.len() && below.all(|(link, size)| link.size() == *size)
    }

    /// Returns the path of the top image.
    pub(super) fn path(&self) -> &Path {
        self.storages[0].path()
    }

    /// Returns the paths of all files as the images name them.
    pub(super) fn paths(&self) -> Vec<PathBuf> {
        let mut paths: Vec<_> = self.storages.iter().map(|s| s.path().to_owned()).collect();
        let mut set = |image: StorageId, file: StorageId, name: Option<&[u8]>| {
            let image = &paths[usize::from(image)];
            if let Some(Ok(path)) = name.map(|name| resolve(image, name)) {
                paths[usize::from(file)] = path;
            }
        };
        let links = self.links();
        for (n, link) in links.iter().enumerate() {
            set(link.storage, link.data, link.image.data_file());
            if let Some(below) = links.get(n + 1) {
                set(link.storage, below.storage, link.image.backing_file());
            }
        }
        paths
    }

    /// Returns the size in bytes of the disk that starts at that depth.
    pub(super) fn size(&self, depth: usize) -> u64 {
        self.links()[depth].size()
    }

    /// Returns the properties of the disk that starts at that depth.
    pub(super) fn info(&self, options: &ImageOptions, depth: usize) -> DiskInfo {
        let link = &self.links()[depth];
        let storage = self.storages[usize::from(link.storage)].disk().info();
        let limits = match link.image.cluster_size() {
            Some(cluster) => RangeLimits {
                alignment: cluster as u32,
                max_len: MAX_RANGE,
            },
            None => RangeLimits {
                alignment: storage.physical_block_size,
                max_len: storage.write_zeroes.map_or(0, |limits| limits.max_len),
            },
        };
        let writable = is_writable(options, depth);
        DiskInfo {
            size: self.size(depth),
            block_size: self.block_size(depth),
            physical_block_size: storage.physical_block_size,
            optimal_io_size: storage.optimal_io_size,
            read_only: !writable,
            write_cache: storage.write_cache,
            discard: (writable && options.discard).then_some(limits),
            write_zeroes: writable.then_some(limits),
        }
    }

    /// Returns the block size of the disk that starts at that depth.
    ///
    /// Images encrypted in larger sectors are written in such sectors, now or after a commit into
    /// them.
    fn block_size(&self, depth: usize) -> u32 {
        let is_luks = |link: &&Link| matches!(link.image, Image::Luks(_));
        let links = self.links();
        let sectors = links[depth..].iter().filter(is_luks);
        let sectors = sectors.map(|link| {
            let storage = &self.storages[usize::from(link.storage)];
            storage.disk().info().block_size
        });
        let fits = |sector: &u32| self.size(depth).is_multiple_of(u64::from(*sector));
        sectors.filter(fits).max().unwrap_or(512)
    }

    /// Cuts a raw base image to the size of its disk, since whole blocks were written to it.
    pub(super) fn trim(&self, options: &ImageOptions) -> io::Result<()> {
        let base = options.side_view.and_then(SideViewKind::base);
        let Some(depth) = base.filter(|_| self.is_as_opened()) else {
            return Ok(());
        };
        let link = &self.links()[depth];
        let file = self.storages[usize::from(link.storage)].bytes();
        let size = link.raw.1;
        if link.image.has_tables() || !file.grows() || !is_padded(size, file.len()?) {
            return Ok(());
        }
        file.set_len(size)?;
        file.sync()
    }

    fn add(&mut self, file: Arc<dyn Storage>) -> Result<StorageId, DiskError> {
        let same = |other: &Arc<dyn Storage>| other.identity() == file.identity();
        if self.storages.iter().any(same) {
            let problem = format!(
                "its chain of files contains {} twice",
                file.path().display()
            );
            return Err(unusable(self.path(), problem));
        }
        self.push(file)
    }

    fn push(&mut self, file: Arc<dyn Storage>) -> Result<StorageId, DiskError> {
        self.storages.push(file);
        // Each image has three at most.
        u8::try_from(self.storages.len() - 1)
            .map_err(|_| unusable(self.path(), "the image consists of more than 256 files"))
    }

    fn open_data_file(
        &mut self,
        path: &Path,
        image: &Image,
        own: StorageId,
        opener: &dyn Opener,
        writable: bool,
    ) -> Result<StorageId, DiskError> {
        if !image.has_data_file() {
            return Ok(own);
        }
        let Some(name) = image.data_file() else {
            let problem = "its data is in an external data file that it does not name";
            return Err(unusable(path, problem));
        };
        let file = opener.open_data_file(path, name, writable)?;
        self.add(file)
    }

    /// Opens the storage that decrypts the guest data of an encrypted qcow2 image.
    fn unlock_data(
        &mut self,
        image: &Image,
        storage: StorageId,
        data: StorageId,
        keys: &Keys,
        helpers: &Arc<Helpers>,
    ) -> Result<(StorageId, Option<Fingerprint>), DiskError> {
        let Image::Qcow2(header) = image else {
            return Ok((data, None));
        };
        let own = &self.storages[usize::from(storage)];
        let crypto = header.encryption().map_err(told(own.path()))?;
        let Some(crypto) = crypto else {
            return Ok((data, None));
        };
        let data = self.storages[usize::from(data)].clone();
        let (data, crypto_fingerprint) = open_data(&**own, crypto, data, keys, helpers)?;
        Ok((self.push(data)?, Some(crypto_fingerprint)))
    }

    fn open_backing_file(
        &self,
        path: &Path,
        image: &Image,
        opener: &dyn Opener,
        writable: bool,
    ) -> Result<Option<Named>, DiskError> {
        let Some(name) = image.backing_file() else {
            return Ok(None);
        };
        let format = match image.backing_format() {
            Some(name) => Some(Format::from_name(&name).map_err(told(path))?),
            None => None,
        };
        let file = opener.open(path, name, writable)?;
        let format = match (format, image) {
            (Some(format), _) => format,
            // The header of QED records raw or nothing.
            (None, Image::Qed(_)) => {
                let found = Format::probe(file.bytes()).map_err(told(file.path()))?;
                if found.is_only_read() {
                    // (A guest must not be able to write a header that names other files.)
                    let below = file.path().display();
                    let problem = format!(
                        "the format of its backing file {below} is not recorded, and looks like \
                         {found}; record it with 'qemu-img rebase -u -b FILE -F raw'"
                    );
                    return Err(unusable(path, problem));
                }
                found
            }
            (None, _) => {
                let below = file.path().display();
                let problem = format!(
                    "the format of its backing file {below} is not recorded, and is not guessed; \
                     record it with 'qemu-img rebase -u -b FILE -F FORMAT'"
                );
                return Err(unusable(path, problem));
            }
        };
        Ok(Some(Named { file, format }))
    }
}

/// Returns whether guest data is written to the image of that depth.
fn is_writable(options: &ImageOptions, depth: usize) -> bool {
    depth == 0 && !options.read_only
        || options.side_view.and_then(SideViewKind::base) == Some(depth)
}

/// Returns whether the image's file is written to, even if only its header is.
pub(super) fn opens_for_writing(options: &ImageOptions, depth: usize) -> bool {
    is_writable(options, depth) || options.side_view.and_then(SideViewKind::header) == Some(depth)
}

/// Reads a file's header, and returns the storage in which the disk's bytes are.
fn read_header(
    file: Arc<dyn Storage>,
    format: Format,
    opener: &dyn Opener,
    helpers: &Arc<Helpers>,
) -> Result<(Arc<dyn Storage>, Image), DiskError> {
    match format {
        Format::Foreign(kind) => {
            let (disk, description) = foreign::open(file, kind, opener, helpers)?;
            Ok((disk, Image::Foreign(Box::new(description))))
        }
        _ => {
            let image = Image::read(file.bytes(), format).map_err(told(file.path()))?;
            Ok((file, image))
        }
    }
}

/// Returns whether the file is longer than its disk only because whole blocks were written.
pub(super) fn is_padded(size: u64, len: u64) -> bool {
    (size + 1..=size.next_multiple_of(MAX_BLOCK)).contains(&len)
}

/// Checks what the header alone shows.
pub(super) fn check(path: &Path, image: &Image, writable: bool) -> Result<(), DiskError> {
    if writable && image.format().is_only_read() {
        return Err(told(path)(Error::only_read(image.format())));
    }
    let Image::Qcow2(header) = image else {
        return Ok(());
    };
    let crypto = header.encryption().map_err(told(path))?;
    if crypto.is_some() && header.data_file_is_raw() && writable {
        let problem = "encrypted, with a data file that is a raw image by itself, which contradict each \
             other";
        return Err(unusable(path, problem));
    }
    if header.is_corrupt() && writable {
        let problem = "marked corrupt; repair the image with 'fathom img check --repair all', or serve it \
             with --readonly";
        return Err(unusable(path, problem));
    }
    let l1 = u64::from(header.l1_entries) * qcow2::L1Entry::SIZE;
    if l1 > 0 && header.l1_offset.0 == 0 {
        return Err(unusable(path, "no L1 table"));
    }
    Ok(())
}

fn refuse_empty(path: &Path, image: &Image) -> Result<(), DiskError> {
    match image {
        Image::Qcow2(header) if header.size < 512 => {
            let size = header.size;
            let problem = format!("a disk of {size} bytes; a disk needs at least 512");
            Err(unusable(path, problem))
        }
        _ => Ok(()),
    }
}

/// Returns which part of a raw file is the disk.
fn raw_window(
    path: &Path,
    image: &Image,
    options: &ImageOptions,
) -> Result<(HostOffset, u64), DiskError> {
    let len = &match image {
        Image::Raw(image) => image.size,
        Image::Luks(image) => return Ok((HostOffset(0), image.size)),
        Image::Foreign(_) => image.size(),
        Image::Qcow2(_) | Image::Qed(_) => return Ok((HostOffset(0), 0)),
    };
    if options.any_size {
        return Ok((HostOffset(0), image.size()));
    }
    let offset = options.offset;
    let rest = len.saturating_sub(offset);
    let whole = rest.next_multiple_of(512);
    let size = options.size.unwrap_or(whole);
    if size > rest && size == whole && !options.read_only {
        let problem = format!(
            "the size of {len} bytes is not a multiple of 512; fill up the last sector with \
             zeroes (truncate -s %512 FILE), or open the image read-only"
        );
        return Err(unusable(path, problem));
    }
    if !offset.is_multiple_of(512) || !size.is_multiple_of(512) || size == 0 || size > whole {
        let problem = format!(
            "the file has {len} bytes; a disk of {size} bytes at offset {offset} exceeds them, \
             or is not a multiple of 512"
        );
        return Err(unusable(path, problem));
    }
    Ok((HostOffset(offset), size))
}
