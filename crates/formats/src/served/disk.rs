//! A disk that is an image in a format.

use super::activate::activate;
use super::active::{Active, Layer};
use super::beside::{BesideDisk, ChainImage};
use super::channel::ImageChannel;
use super::condition::ImageProblem;
use super::counts::ImageCounts;
use super::helpers::Helpers;
use super::io::{BlockingIo, StorageId};
use super::jobs::Jobs;
use super::journal::{self, Found, Journal};
use super::open::{Chain, Link};
use super::options::ImageOptions;
use super::problem::unusable;
use super::restore::Failure;
use super::storage::{Opener, Storage};
use super::tables::Tables;
use crate::offline::Image;
use fathom_core::{Channel, Cx, Disk, DiskError, DiskInfo, Keepsake, Resize};
use fathom_files::UsedFile;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// Time that discards in flight may take when the image's use ends.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval between two looks at them.
const DISCARD_INTERVAL: Duration = Duration::from_millis(1);

/// An image with its chain of backing files, shared by its workers. Its
/// metadata is in memory from `activate` to `deactivate` only.
pub struct ImageDisk {
    pub(super) shared: Arc<Shared>,
    pub(super) chain: Chain,
    pub(super) options: ImageOptions,
    /// Once at a time.
    resizing: Mutex<()>,
    helpers: Arc<Helpers>,
    keepsake: Mutex<Option<Keepsake>>,
    /// See [`ImageOptions::beside`].
    beside: Vec<Arc<BesideDisk>>,
    /// The header of which storage, if its backing file was changed here since it was opened.
    pub(super) rebased: Mutex<Option<(StorageId, Image)>>,
    /// The names of the image's own bitmaps that somebody records meanwhile.
    pub(super) taken: Mutex<Vec<String>>,
    /// The last activation has restored what a killed server had in memory.
    pub(super) has_restored: AtomicBool,
}

/// What the workers' channels know.
pub(super) struct Shared {
    /// The disk's bytes: where requests have to end.
    size: AtomicU64,
    pub(super) read_only: bool,
    pub(super) discard: bool,
    /// See [`ImageOptions::compress`].
    pub(super) compress: bool,
    /// What is read becomes the image's own.
    pub(super) copies_on_read: bool,
    /// Counts activations and deactivations.
    pub(super) generation: AtomicU64,
    active: Mutex<Option<Arc<Active>>>,
    pub(super) jobs: Jobs,
}

impl Shared {
    pub(super) fn new(size: u64, read_only: bool, options: &ImageOptions) -> Shared {
        Shared {
            size: size.into(),
            read_only,
            discard: options.discard,
            compress: options.compress,
            copies_on_read: false,
            generation: AtomicU64::new(0),
            active: Mutex::default(),
            jobs: Jobs::default(),
        }
    }

    #[inline]
    pub(super) fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Requests that come go by it.
    pub(super) fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::SeqCst);
    }

    pub(super) fn active(&self) -> Option<Arc<Active>> {
        let active = self.active.lock().unwrap_or_else(PoisonError::into_inner);
        active.clone()
    }

    pub(super) fn set_active(&self, active: Option<Arc<Active>>) -> Option<Arc<Active>> {
        let mut place = self.active.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *place, active);
        self.generation.fetch_add(1, Ordering::Release);
        before
    }
}

impl ImageDisk {
    /// Opens an image and the files that it names, by way of `opener`. Reads
    /// headers only. The error is one line that says what to do.
    pub fn open(
        file: Arc<dyn Storage>,
        opener: Arc<dyn Opener>,
        options: ImageOptions,
    ) -> Result<ImageDisk, DiskError> {
        let helpers = Arc::new(Helpers::new(options.helpers));
        let chain = Chain::open(file, &*opener, &options, &helpers)?;
        let beside = BesideDisk::all(&chain, &options)?;
        Ok(ImageDisk {
            shared: Arc::new(Shared::new(chain.size(0), options.read_only, &options)),
            chain,
            options,
            resizing: Mutex::default(),
            helpers,
            keepsake: Mutex::default(),
            beside,
            rebased: Mutex::default(),
            taken: Mutex::default(),
            has_restored: AtomicBool::new(false),
        })
    }

    /// What is in use, if it is activated.
    pub(super) fn active(&self) -> Option<Arc<Active>> {
        self.shared.active()
    }

    /// The image's own path.
    pub(super) fn path(&self) -> &Path {
        self.chain.path()
    }

    /// All of its images, from its own down.
    pub fn images(&self) -> Vec<ChainImage> {
        let active = self.active();
        // (In an image in use there may be others than when it was opened.)
        let snapshots = |depth: usize, link: &Link| match &active {
            Some(active) => active.layers.get(depth).map_or(0, Layer::snapshots),
            None => link.snapshots(),
        };
        let links = self.chain.links();
        let images = links.iter().enumerate().map(|(depth, link)| ChainImage {
            path: self.chain.storages[usize::from(link.storage)]
                .path()
                .to_owned(),
            format: link.image.format(),
            size: match depth {
                // (It may have been resized here.)
                0 => self.shared.size(),
                _ => link.size(),
            },
            snapshots: snapshots(depth, link),
        });
        images.collect()
    }

    /// The other disk, for a job: the one that is written to. While this one is in use, so is that.
    pub fn beside(&self) -> Option<Arc<BesideDisk>> {
        self.beside.first().cloned()
    }

    /// The one that is only read, where there are two.
    pub fn reader(&self) -> Option<Arc<BesideDisk>> {
        self.beside.get(1).cloned()
    }

    /// What is counted while it is in use; None: it has no tables.
    pub fn counts(&self) -> Option<Arc<ImageCounts>> {
        let has_tables = self.options.format.has_tables();
        has_tables.then(|| self.chain.counts.clone())
    }

    /// What is wrong with its images, as far as that is known without a check; each problem once.
    pub fn problems(&self) -> Vec<ImageProblem> {
        self.chain.condition.problems()
    }

    /// The identities of all its files.
    pub fn files(&self) -> Vec<(u64, u64)> {
        let storages = self.chain.storages.iter();
        storages.flat_map(|storage| storage.identities()).collect()
    }

    /// The files of the image of depth `from` and of those below it, which gets depth 0 here.
    pub fn used_files(&self, from: usize) -> Vec<UsedFile> {
        let links = self.chain.links();
        let of_one = |(depth, link): (usize, &Link)| {
            let data = (link.image.has_data_file()).then_some((true, link.data));
            let all = [Some((false, link.storage)), data].into_iter().flatten();
            let all = all.map(|(is_data, storage)| {
                let file = &self.chain.storages[usize::from(storage)];
                UsedFile {
                    depth,
                    is_data,
                    path: file.path().to_owned(),
                    id: file.file_id(),
                }
            });
            all.collect::<Vec<_>>()
        };
        let links = links.iter().skip(from).enumerate();
        links.flat_map(of_one).collect()
    }

    /// Whether it uses the file that was opened by this path.
    pub fn has_file(&self, path: &Path) -> bool {
        self.chain.storages.iter().any(|file| file.path() == path)
    }

    /// Of all its files, as the images name them.
    pub(super) fn paths(&self) -> Vec<PathBuf> {
        self.chain.paths()
    }

    /// Bytes of what gets its place in the file at once: a cluster, or a
    /// subcluster where clusters have such.
    pub fn allocation_unit(&self) -> u64 {
        match &self.chain.links()[0].image {
            Image::Raw { .. } | Image::Luks(..) | Image::Foreign(_) => 512,
            Image::Qcow2(header) => header.geometry().subcluster_size(),
            Image::Qed(header, _) => header.cluster_size.into(),
        }
    }

    /// Bytes of what is compressed together, a power of two: a write of so many
    /// at a multiple of that, or of what is left up to the disk's end, can be
    /// stored compressed (see [`ImageOptions::compress`]); any other is an
    /// ordinary write. None: this image cannot be written to so, and with that
    /// option all writes fail with ENOTSUP.
    pub fn compress_unit(&self) -> Option<u64> {
        match &self.chain.links()[0].image {
            Image::Qcow2(header) if !header.geometry().data_file && !header.is_encrypted() => {
                Some(header.geometry().cluster_size())
            }
            _ => None,
        }
    }

    /// What waits for a helper: jobs that none has begun.
    pub fn jobs(&self) -> usize {
        self.helpers.waiting()
    }

    /// Does one of them, by its number, on the calling thread; false if there is none of this
    /// number. For simulations, which decide what happens when.
    pub fn help(&self, number: usize) -> bool {
        self.helpers.do_one(number)
    }

    /// Takes the files into use, but for those of images that it is not made of any more.
    fn lock(&self) -> Result<(), DiskError> {
        let chain = &self.chain;
        let own = chain.storages[0].disk();
        own.activate()?;
        let mut locked = vec![own];
        let mut take = || {
            self.forget_cache(&chain.links());
            let links = match self.options.snapshot {
                // (It has what was below it.)
                Some(_) => chain.links().to_vec(),
                None => chain.follow()?,
            };
            for storage in chain.files_of(&links).into_iter().skip(1) {
                storage.disk().activate()?;
                locked.push(storage.disk());
            }
            self.forget_cache(&links);
            chain.take(links)
        };
        let taken = take();
        if taken.is_err() {
            locked.iter().for_each(|disk| drop(disk.deactivate()));
        }
        taken
    }

    /// Somebody may have written to the files from another host.
    fn forget_cache(&self, links: &[Link]) {
        if !self.options.keep_page_cache {
            let files = self.chain.files_of(links).into_iter();
            files.for_each(|file| file.bytes().forget_cache());
        }
    }

    fn unlock(&self) -> Result<(), DiskError> {
        let files = self.chain.files_of(&self.chain.links()).into_iter();
        let unlocked = files.map(|file| file.disk().deactivate());
        unlocked.fold(Ok(()), Result::and)
    }

    /// Whether there can be metadata that is in memory only.
    fn has_metadata(&self) -> bool {
        self.options.format.has_tables() && !self.options.read_only
    }

    /// Does what a killed predecessor had in memory only, and starts to note
    /// the same for a successor.
    fn take_keepsake(&self, active: &Active) -> Result<(), DiskError> {
        self.has_restored.store(false, Ordering::Relaxed);
        let keepsake = self.keepsake.lock();
        let keepsake = keepsake.unwrap_or_else(PoisonError::into_inner).clone();
        let (Some(memory), Layer::Tables(tables)) = (keepsake, &active.layers[0]) else {
            return Ok(());
        };
        if !tables.writable {
            return Ok(());
        }
        let (device, inode) = tables.file.identity();
        let identity = [device, inode, self.shared.size()];
        let found = Journal::look(&memory, identity);
        let io = BlockingIo(&self.chain.storages);
        let path = self.chain.path();
        let records = match found {
            Found::Nothing => Vec::new(),
            Found::Records(records) => records,
            Found::OfAnother(count) => {
                let problem = format!(
                    "not the image that the guest used before the server was killed, whose \
                     {count} unwritten changes would be lost; serve that image, or restart the \
                     guest"
                );
                return Err(unusable(path, problem));
            }
            Found::Garbage => {
                let problem = "the front-end has saved state of this image that this program did not \
                     write; restart the guest";
                return Err(unusable(path, problem));
            }
        };
        let restored = at_once(tables.restore_records(&io, &records));
        let restored = restored.unwrap_or(Err(Failure::Errno(libc::EBUSY)));
        restored.map_err(|failure| match failure {
            Failure::Errno(errno) => DiskError::Io {
                path: path.to_owned(),
                what: "cannot restore the state of the killed server",
                source: io::Error::from_raw_os_error(errno),
            },
            Failure::Problem(problem) => unusable(
                path,
                format!("cannot restore the state of the killed server: {problem}"),
            ),
        })?;
        tables.state().journal = Journal::begin(memory, identity);
        if !records.is_empty() {
            self.has_restored.store(true, Ordering::Relaxed);
            tables.note_leaks();
            let count = records.len();
            let path = path.display();
            tracing::info!(
                "{path}: restored {count} changes of the killed server; clusters may be leaked \
                 (run 'fathom img check --repair leaks' when the disk is not in use)"
            );
            let flushed = at_once(tables.flush(&io)).unwrap_or(Err(libc::EBUSY));
            flushed.map_err(|errno| DiskError::Io {
                path: self.chain.path().to_owned(),
                what: "cannot write the restored state",
                source: io::Error::from_raw_os_error(errno),
            })?;
        }
        Ok(())
    }

    /// Everything that is dirty goes to the disk.
    fn flush(&self, tables: &Tables) -> io::Result<()> {
        let io = BlockingIo(&self.chain.storages);
        // Each time gives back what the time before has unlinked.
        while tables.dirty.is_dirty() {
            let flushed = at_once(tables.flush(&io)).unwrap_or(Err(libc::EBUSY));
            flushed.map_err(io::Error::from_raw_os_error)?;
        }
        Ok(())
    }

    /// Likewise, and what was freed is free.
    fn write_back(&self, tables: &Tables) -> io::Result<()> {
        self.flush(tables)?;
        let io = BlockingIo(&self.chain.storages);
        // Nothing is in flight: all that is free is given back to the file.
        let released = at_once(tables.release(&io, &[])).unwrap_or(Err(libc::EBUSY));
        released.map_err(io::Error::from_raw_os_error)?;
        let discarded = at_once(tables.discard_freed(&io));
        debug_assert!(discarded.is_some());
        let used = tables.used.load(Ordering::Relaxed);
        if used < tables.file_len.load(Ordering::Relaxed) && tables.file.bytes().grows() {
            tables.file.bytes().set_len(used)?;
            tables.file.bytes().sync()?;
        }
        Ok(())
    }

    /// Waits for discards that were in flight when the last request was answered: once others may use the image, they
    /// would destroy data. If they do not end, the image stays locked.
    fn wait_for_discards(active: &Active) -> Result<(), DiskError> {
        let deadline = Instant::now() + DISCARD_TIMEOUT;
        for layer in &active.layers {
            let Layer::Tables(tables) = layer else {
                continue;
            };
            while at_once(tables.discarding.lock_all()).is_none() {
                if Instant::now() > deadline {
                    return Err(DiskError::Io {
                        path: tables.file.path().to_owned(),
                        what: "its discards do not end, so the image stays locked",
                        source: io::ErrorKind::TimedOut.into(),
                    });
                }
                std::thread::sleep(DISCARD_INTERVAL);
            }
        }
        Ok(())
    }

    /// What the image itself has is on disk when `leave` is called, if it could be written.
    pub(super) fn end(&self, leave: &mut dyn FnMut(&[Layer])) -> Result<(), DiskError> {
        let Some(active) = self.shared.set_active(None) else {
            return Ok(());
        };
        self.beside.iter().for_each(|beside| beside.end());
        let discarded = Self::wait_for_discards(&active);
        // All of them, whatever fails.
        let mut written = Ok(());
        for (depth, layer) in active.layers.iter().enumerate() {
            if let Layer::Tables(tables) = layer
                && tables.writable
                && !tables.corrupt.load(Ordering::SeqCst)
            {
                let flushed = self.flush(tables);
                if depth == 0 && flushed.is_ok() {
                    leave(&active.layers);
                }
                let now = flushed.and_then(|()| self.write_back(tables));
                if now.is_ok() && discarded.is_ok() {
                    tables.close_for_writing();
                }
                written = written.and(now);
            }
        }
        let written = written.and_then(|()| self.chain.trim(&self.options));
        // Workers let go of the rest when they next look.
        for layer in &active.layers {
            if let Layer::Tables(tables) = layer {
                tables.state().cache.clear();
            }
        }
        let path = self.chain.path();
        let written = written.map_err(|source| DiskError::Io {
            path: path.to_owned(),
            what: "cannot write its metadata",
            source,
        });
        match discarded {
            Ok(()) => written.and(self.unlock()),
            Err(error) => written.and(Err(error)),
        }
    }
}

impl Disk for ImageDisk {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            size: self.shared.size(),
            ..self.chain.info(&self.options, 0)
        }
    }

    fn keepsake_len(&self) -> u64 {
        if self.has_metadata() { journal::LEN } else { 0 }
    }

    fn keep(&self, keepsake: Option<Keepsake>) {
        let mut place = self.keepsake.lock().unwrap_or_else(PoisonError::into_inner);
        *place = keepsake;
    }

    fn activate(&self) -> Result<(), DiskError> {
        self.lock()?;
        self.chain.condition.reset();
        let rebased = self.rebased.lock().unwrap_or_else(PoisonError::into_inner);
        let active = activate(
            &self.chain,
            &self.options,
            self.shared.size(),
            rebased.as_ref(),
            &self.helpers,
        );
        drop(rebased);
        let active = active.and_then(|active| self.take_keepsake(&active).map(|()| active));
        match active {
            Ok(active) => {
                let active = Arc::new(active);
                active.open_for_writing();
                active.guard_ends();
                // (Work on images that are no part of the disk any more: see `check_images`.)
                if self.chain.is_as_opened() {
                    self.beside.iter().for_each(|beside| beside.begin(&active));
                }
                self.shared.set_active(Some(active));
                Ok(())
            }
            Err(error) => {
                let _ = self.unlock();
                Err(error)
            }
        }
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        self.end(&mut |_| ())
    }

    fn resize(&self, to: &Resize) -> Result<u64, DiskError> {
        let _alone = self.resizing.lock().unwrap_or_else(PoisonError::into_inner);
        match to.size {
            None => self.take_in(),
            Some(_) => self.begin_resize(to)?.wait(),
        }
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        ImageChannel::boxed(&self.shared, &self.chain.storages, self.chain.path(), cx)
    }
}

/// The outcome of what does not wait, since nobody else uses the image now; None: somebody does, who
/// should not.
pub(super) fn at_once<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut cx = Context::from_waker(Waker::noop());
    match pin!(future).poll(&mut cx) {
        Poll::Ready(outcome) => Some(outcome),
        Poll::Pending => None,
    }
}
