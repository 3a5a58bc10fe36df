//! Opening a chain: the image, the files that it names, and those that they
//! name.

use super::beside::Beside;
use super::condition::ImageCondition;
use super::counts::ImageCounts;
use super::foreign;
use super::helpers::Helpers;
use super::io::StorageId;
use super::options::ImageOptions;
use super::problem::{told, unusable};
use super::sealed::{Fingerprint, Keys, open_data, open_luks};
use super::storage::{Opener, Storage};
use crate::offline::Image;
use crate::{Error, Format, HostOffset, qcow2, resolve};
use fathom_core::{DiskError, DiskInfo, RangeLimits};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The longest discard or zeroing in one request: entries change quickly.
const MAX_RANGE: u64 = 1 << 30;

/// A file may become longer up to a multiple of that, when whole blocks of its device are written.
const MAX_BLOCK: u64 = 4096;

/// Images of one chain.
pub const MAX_CHAIN: usize = 200;

/// One image of a chain, by its header.
#[derive(Clone)]
pub(super) struct Link {
    pub(super) storage: StorageId,
    /// Where its guest data is.
    pub(super) data: StorageId,
    pub(super) image: Image,
    /// Of a raw image: where in its file the disk starts, and its bytes.
    pub(super) raw: (HostOffset, u64),
    pub(super) writable: bool,
    /// Of the header by which its guest data is encrypted.
    pub(super) seal: Option<Fingerprint>,
}

impl Link {
    /// Of the disk that it is with those below it, in bytes.
    pub(super) fn size(&self) -> u64 {
        match &self.image {
            Image::Raw { .. } | Image::Luks(..) | Image::Foreign(_) => self.raw.1,
            image => image.size(),
        }
    }

    /// So many internal snapshots it had when its header was read.
    pub(super) fn snapshots(&self) -> u32 {
        match &self.image {
            Image::Qcow2(header) => header.snapshots,
            _ => 0,
        }
    }
}

/// A file, and what it is said to be.
struct Named {
    file: Arc<dyn Storage>,
    format: Format,
}

/// All of them, and their files.
pub(super) struct Chain {
    /// What the disk is made of.
    links: Mutex<Arc<[Link]>>,
    /// Of what sizes they were when it was opened.
    opened: Vec<u64>,
    /// Its first image could have bitmaps when it was opened.
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
                Image::Luks(..) => open_luks(file, &options.keys, helpers)?,
                _ => file,
            };
            let storage = chain.add(file)?;
            if image.is_corrupt() {
                chain.condition.note_damage(storage);
            }
            let data = chain.open_data_file(&path, &image, storage, opener, writable)?;
            let (data, seal) = chain.unlock_data(&image, storage, data, &options.keys, helpers)?;
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
                seal,
            });
        }
        chain.can_have_bitmaps = links[0].image.can_have_bitmaps();
        chain.opened = links.iter().map(Link::size).collect();
        chain.set_links(links);
        Ok(chain)
    }

    /// The images, from the disk's own down.
    pub(super) fn links(&self) -> Arc<[Link]> {
        self.now().clone()
    }

    /// Others, or fewer of them, while it is not in use: all files stay open.
    pub(super) fn set_links(&self, links: Vec<Link>) {
        *self.now() = links.into();
    }

    /// Of these images, the first one's own first.
    pub(super) fn files_of(&self, links: &[Link]) -> Vec<&Arc<dyn Storage>> {
        // (One image's are one after the other.)
        let ids = links.iter().flat_map(|link| link.storage..=link.data);
        ids.map(|id| &self.storages[usize::from(id)]).collect()
    }

    /// It has all the images that it had when it was opened, and those below are as long as they were.
    pub(super) fn is_as_opened(&self) -> bool {
        let now = self.links();
        let mut below = now.iter().zip(&self.opened).skip(1);
        now.len() == self.opened.len() && below.all(|(link, size)| link.size() == *size)
    }

    fn now(&self) -> MutexGuard<'_, Arc<[Link]>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The image's own path.
    pub(super) fn path(&self) -> &Path {
        self.storages[0].path()
    }

    /// Of all files, as the images name them; relative names begin where the image's own does.
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

    /// Of the disk that the images from that depth on are, in bytes.
    pub(super) fn size(&self, depth: usize) -> u64 {
        self.links()[depth].size()
    }

    /// What the disk is like that the images from that depth on are.
    pub(super) fn info(&self, options: &ImageOptions, depth: usize) -> DiskInfo {
        let link = &self.links()[depth];
        let storage = self.storages[usize::from(link.storage)].disk().info();
        let cluster = match &link.image {
            Image::Raw { .. } | Image::Luks(..) | Image::Foreign(_) => storage.physical_block_size,
            Image::Qcow2(header) => header.geometry().cluster_size() as u32,
            Image::Qed(header, _) => header.cluster_size,
        };
        let limits = RangeLimits {
            alignment: cluster,
            max_len: match &link.image {
                Image::Raw { .. } | Image::Luks(..) | Image::Foreign(_) => {
                    storage.write_zeroes.map_or(0, |l| l.max_len)
                }
                Image::Qcow2(_) | Image::Qed(..) => MAX_RANGE,
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

    /// What is encrypted in larger sectors is written in such, or is going to be if what is above is committed.
    fn block_size(&self, depth: usize) -> u32 {
        let is_luks = |link: &&Link| matches!(link.image, Image::Luks(..));
        let links = self.links();
        let sectors = links[depth..].iter().filter(is_luks);
        let sectors = sectors.map(|link| {
            let storage = &self.storages[usize::from(link.storage)];
            storage.disk().info().block_size
        });
        let fits = |sector: &u32| self.size(depth).is_multiple_of(u64::from(*sector));
        sectors.filter(fits).max().unwrap_or(512)
    }

    /// A raw file that was written to below others is as long as its disk: whole blocks were written.
    pub(super) fn trim(&self, options: &ImageOptions) -> io::Result<()> {
        let base = options.beside.and_then(Beside::base);
        let Some(depth) = base.filter(|_| self.is_as_opened()) else {
            return Ok(());
        };
        let link = &self.links()[depth];
        let file = self.storages[usize::from(link.storage)].bytes();
        let size = link.raw.1;
        match link.image {
            Image::Raw { .. } | Image::Luks(..) | Image::Foreign(_)
                if file.grows() && is_padded(size, file.len()?) =>
            {
                file.set_len(size)?;
                file.sync()
            }
            _ => Ok(()),
        }
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

    /// Guest data that is encrypted in a qcow2 image has a storage of its own, in which it is not.
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
        let (data, seal) = open_data(&**own, crypto, data, keys, helpers)?;
        Ok((self.push(data)?, Some(seal)))
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
            // QED's header says raw or nothing.
            (None, Image::Qed(..)) => {
                let found = Format::probe(file.bytes()).map_err(told(file.path()))?;
                if found.is_only_read() {
                    // (What a guest has written must not name files.)
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

/// Whether the image of that depth is written to.
fn is_writable(options: &ImageOptions, depth: usize) -> bool {
    depth == 0 && !options.read_only || options.beside.and_then(Beside::base) == Some(depth)
}

/// Whether its file is, be it the header only.
pub(super) fn opens_for_writing(options: &ImageOptions, depth: usize) -> bool {
    is_writable(options, depth) || options.beside.and_then(Beside::header) == Some(depth)
}

/// A file's header, and the file, or what the disk's bytes are in.
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

/// A raw file that was written to below others is longer than its disk: whole blocks were written.
pub(super) fn is_padded(size: u64, len: u64) -> bool {
    (size + 1..=size.next_multiple_of(MAX_BLOCK)).contains(&len)
}

/// What can be told by the header alone.
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

/// Which part of a raw file is the disk.
fn raw_window(
    path: &Path,
    image: &Image,
    options: &ImageOptions,
) -> Result<(HostOffset, u64), DiskError> {
    let len = &match image {
        Image::Raw { size: len } => *len,
        Image::Luks(_, size) => return Ok((HostOffset(0), *size)),
        Image::Foreign(_) => image.size(),
        Image::Qcow2(_) | Image::Qed(..) => return Ok((HostOffset(0), 0)),
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
