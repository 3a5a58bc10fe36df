//! A disk whose top image is in a format.

use super::activate::activate;
use super::active::{Active, Layer};
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
use super::side_view::{ChainImage, SideView};
use super::storage::{Opener, Storage};
use super::tables::Tables;
use crate::Image;
use fathom_core::{Channel, Cx, Disk, DiskError, DiskInfo, Resize, SavedState};
use fathom_files::UsedFile;
use parking_lot::Mutex;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// Maximum time to wait for discards in flight when the image is deactivated.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval between two checks whether these discards have ended.
const DISCARD_INTERVAL: Duration = Duration::from_millis(1);

/// An image with its chain of backing images, shared by its workers.
///
/// The metadata is in memory from `activate` to `deactivate` only.
pub struct ImageDisk {
    pub(super) shared: Arc<Shared>,
    pub(super) chain: Chain,
    pub(super) options: ImageOptions,
    /// Serialises resizes.
    resizing: Mutex<()>,
    helpers: Arc<Helpers>,
    saved_state: Mutex<Option<SavedState>>,
    /// See [`ImageOptions::side_view`].
    side_views: Vec<Arc<SideView>>,
    /// The header after this server changed its backing file, and the storage that holds it.
    pub(super) rebased: Mutex<Option<(StorageId, Image)>>,
    /// Names of the image's own bitmaps that a user of the disk records meanwhile.
    pub(super) taken: Mutex<Vec<String>>,
    /// Whether the last activation restored changes that a killed server had in memory only.
    pub(super) has_restored: AtomicBool,
}

/// State that the disk shares with its workers' channels.
pub(super) struct Shared {
    /// Size of the disk in bytes; requests must end within it.
    size: AtomicU64,
    pub(super) read_only: bool,
    pub(super) discard: bool,
    /// See [`ImageOptions::compress`].
    pub(super) compress: bool,
    /// Copy-on-read: data that is read is copied into the top image.
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

    /// Sets the size that later requests are checked against.
    pub(super) fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::SeqCst);
    }

    pub(super) fn active(&self) -> Option<Arc<Active>> {
        let active = self.active.lock();
        active.clone()
    }

    pub(super) fn set_active(&self, active: Option<Arc<Active>>) -> Option<Arc<Active>> {
        let mut place = self.active.lock();
        let before = std::mem::replace(&mut *place, active);
        self.generation.fetch_add(1, Ordering::Release);
        before
    }
}

impl ImageDisk {
    /// Opens an image and the files that it names, through `opener`.
    ///
    /// Reads headers only. The error is one line that says what to do.
    pub fn open(
        file: Arc<dyn Storage>,
        opener: Arc<dyn Opener>,
        options: ImageOptions,
    ) -> Result<ImageDisk, DiskError> {
        let helpers = Arc::new(Helpers::new(options.helpers));
        let chain = Chain::open(file, &*opener, &options, &helpers)?;
        let side_views = SideView::all(&chain, &options)?;
        Ok(ImageDisk {
            shared: Arc::new(Shared::new(chain.size(0), options.read_only, &options)),
            chain,
            options,
            resizing: Mutex::default(),
            helpers,
            saved_state: Mutex::default(),
            side_views,
            rebased: Mutex::default(),
            taken: Mutex::default(),
            has_restored: AtomicBool::new(false),
        })
    }

    /// Returns the chain in use, or `None` while the disk is not activated.
    pub(super) fn active(&self) -> Option<Arc<Active>> {
        self.shared.active()
    }

    /// Returns the path of the top image.
    pub(super) fn path(&self) -> &Path {
        self.chain.path()
    }

    /// Returns all images of the chain, from the top image down.
    pub fn images(&self) -> Vec<ChainImage> {
        let active = self.active();
        // (The number of snapshots of an image in use may have changed since it was opened.)
        let snapshots = |depth: usize, link: &Link| match &active {
            Some(active) => active.layers.get(depth).map_or(0, Layer::snapshots),
            None => link.image.snapshots(),
        };
        let links = self.chain.links();
        let images = links.iter().enumerate().map(|(depth, link)| ChainImage {
            path: self.chain.storages[usize::from(link.storage)]
                .path()
                .to_owned(),
            format: link.image.format(),
            size: match depth {
                // (The top image may have been resized here.)
                0 => self.shared.size(),
                _ => link.size(),
            },
            snapshots: snapshots(depth, link),
        });
        images.collect()
    }

    /// Returns the side view that a job writes to. The side view is in use while this disk is in
    /// use.
    pub fn side_view(&self) -> Option<Arc<SideView>> {
        self.side_views.first().cloned()
    }

    /// Returns the side view that is only read, where there are two.
    pub fn reader(&self) -> Option<Arc<SideView>> {
        self.side_views.get(1).cloned()
    }

    /// Returns the counters of the image; `None` for a format without tables.
    pub fn counts(&self) -> Option<Arc<ImageCounts>> {
        let has_tables = self.options.format.has_tables();
        has_tables.then(|| self.chain.counts.clone())
    }

    /// Returns the problems of the disk's images that are known without a check, each one once.
    pub fn problems(&self) -> Vec<ImageProblem> {
        self.chain.condition.problems()
    }

    /// Returns the identities of all files of the disk.
    pub fn files(&self) -> Vec<(u64, u64)> {
        let storages = self.chain.storages.iter();
        storages.flat_map(|storage| storage.identities()).collect()
    }

    /// Returns the files of the images from depth `from` on, which counts as depth 0 in the result.
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

    /// Returns whether the disk uses the file that was opened by this path.
    pub fn has_file(&self, path: &Path) -> bool {
        self.chain.storages.iter().any(|file| file.path() == path)
    }

    /// Returns the paths of all files of the disk, as the images name them.
    pub(super) fn paths(&self) -> Vec<PathBuf> {
        self.chain.paths()
    }

    /// Returns the bytes that are allocated in the file at once.
    ///
    /// The unit is a cluster, or a subcluster where clusters have subclusters.
    pub fn allocation_unit(&self) -> u64 {
        self.chain.links()[0].image.allocation_unit()
    }

    /// Returns the bytes that are compressed together, a power of two.
    ///
    /// A write can be stored compressed (see [`ImageOptions::compress`]) if its offset is a
    /// multiple of this unit, and its length is one unit or reaches to the disk's end. Any other
    /// write is stored as usual. `None`: this image cannot store compressed clusters, and with that
    /// option all writes fail with ENOTSUP.
    pub fn compress_unit(&self) -> Option<u64> {
        match &self.chain.links()[0].image {
            Image::Qcow2(header) if !header.geometry().data_file && !header.is_encrypted() => {
                Some(header.geometry().cluster_size())
            }
            _ => None,
        }
    }

    /// Returns the number of helper jobs that no thread has begun.
    pub fn jobs(&self) -> usize {
        self.helpers.waiting()
    }

    /// Runs the helper job of this number on the calling thread; false if there is no such job.
    ///
    /// For simulations, which decide what happens when.
    pub fn help(&self, number: usize) -> bool {
        self.helpers.do_one(number)
    }

    /// Activates the files of the chain, except those of images that no longer belong to it.
    fn lock(&self) -> Result<(), DiskError> {
        let chain = &self.chain;
        let own = chain.storages[0].disk();
        own.activate()?;
        let mut locked = vec![own];
        let mut take = || {
            self.forget_cache(&chain.links());
            let links = match self.options.snapshot {
                // (A snapshot keeps the backing chain that it had.)
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

    /// Drops the files' page cache, since another host may have written to the files.
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

    /// Returns whether the disk can have metadata that is in memory only.
    fn has_metadata(&self) -> bool {
        self.options.format.has_tables() && !self.options.read_only
    }

    /// Restores the changes that a killed predecessor had in memory only.
    ///
    /// Then starts a journal of such changes for a successor.
    fn take_saved_state(&self, active: &Active) -> Result<(), DiskError> {
        self.has_restored.store(false, Ordering::Relaxed);
        let saved_state = self.saved_state.lock().clone();
        let (Some(memory), Layer::Tables(tables)) = (saved_state, &active.layers[0]) else {
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

    /// Writes all dirty metadata to the disk.
    fn flush(&self, tables: &Tables) -> io::Result<()> {
        let io = BlockingIo(&self.chain.storages);
        // Each flush releases the clusters that the flush before has unlinked.
        while tables.dirty.is_dirty() {
            let flushed = at_once(tables.flush(&io)).unwrap_or(Err(libc::EBUSY));
            flushed.map_err(io::Error::from_raw_os_error)?;
        }
        Ok(())
    }

    /// Flushes, then returns freed clusters to the file and cuts off its unused end.
    fn write_back(&self, tables: &Tables) -> io::Result<()> {
        self.flush(tables)?;
        let io = BlockingIo(&self.chain.storages);
        // No request is in flight, so all free clusters can be returned to the file.
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

    /// Waits for discards that were in flight when the last request was completed.
    ///
    /// Once others may use the image, these discards would destroy data. If they do not end in
    /// time, the image stays locked.
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

    /// Deactivates the disk and writes back its metadata.
    ///
    /// Calls `leave` once the top image's metadata is on disk. Does not call it if that write
    /// fails.
    pub(super) fn end(&self, leave: &mut dyn FnMut(&[Layer])) -> Result<(), DiskError> {
        let Some(active) = self.shared.set_active(None) else {
            return Ok(());
        };
        self.side_views.iter().for_each(|side_view| side_view.end());
        let discarded = Self::wait_for_discards(&active);
        // All images are written back, even if one fails.
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
        // Workers release their slices when they next check the generation.
        for layer in &active.layers {
            if let Layer::Tables(tables) = layer {
                tables.state().cache.clear();
            }
        }
        let path = self.chain.path();
        let written = written.map_err(|source| DiskError::Io {
            path: path.to_owned(),
            what: "cannot write its metadata, so the image stays locked",
            source,
        });
        // The front-end's journal may have changes that the image does not have. The journal's
        // changes are restored at the next activation, and no other process may change the image
        // until then.
        written.and(discarded)?;
        self.unlock()
    }
}

impl Disk for ImageDisk {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            size: self.shared.size(),
            ..self.chain.info(&self.options, 0)
        }
    }

    fn saved_state_len(&self) -> u64 {
        if self.has_metadata() { journal::LEN } else { 0 }
    }

    fn set_saved_state(&self, saved_state: Option<SavedState>) {
        let mut place = self.saved_state.lock();
        *place = saved_state;
    }

    fn activate(&self) -> Result<(), DiskError> {
        self.lock()?;
        self.chain.condition.reset();
        let rebased = self.rebased.lock();
        let active = activate(
            &self.chain,
            &self.options,
            self.shared.size(),
            rebased.as_ref(),
            &self.helpers,
        );
        drop(rebased);
        let active = active.and_then(|active| self.take_saved_state(&active).map(|()| active));
        match active {
            Ok(active) => {
                let active = Arc::new(active);
                active.open_for_writing();
                active.guard_ends();
                // (Jobs work on images that may no longer belong to the disk: see `check_images`.)
                if self.chain.is_as_opened() {
                    self.side_views
                        .iter()
                        .for_each(|side_view| side_view.begin(&active));
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
        let _alone = self.resizing.lock();
        match to.size {
            None => self.take_in(),
            Some(_) => self.begin_resize(to)?.wait(),
        }
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        ImageChannel::boxed(&self.shared, &self.chain.storages, self.chain.path(), cx)
    }
}

/// Returns the output of a future that must not wait, since the image has no other user now.
///
/// `None`: the future waits for another user of the image, although none should exist.
pub(super) fn at_once<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut cx = Context::from_waker(Waker::noop());
    match pin!(future).poll(&mut cx) {
        Poll::Ready(outcome) => Some(outcome),
        Poll::Pending => None,
    }
}
