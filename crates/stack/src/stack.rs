//! A running disk: opened, with its filters and workers.

use crate::bare::Bare;
use crate::bitmaps::{Bitmaps, Place};
use crate::cow;
use crate::description::Description;
use crate::filters::DiskFilters;
use crate::held::{Held, Latch};
use crate::image_files::{ImageOpener, StoredImage};
use crate::inject::Injector;
use crate::magic;
use crate::marking::MarkedImage;
use crate::missing::Missing;
use crate::pools::{NamedPool, Pools};
use crate::tap::Tap;
use fathom_core::{Disk, DiskError, Parts, WorkerHandle, WorkerOptions};
use fathom_files::{FileId, ImageFile, UsedFile, gate};
use fathom_filters::Filters;
use fathom_formats::Format;
use fathom_formats::served::{ImageDisk, ImageOptions, MAX_CHAIN, OwnBitmaps, Storage};
use fathom_storage::{ByteDisk, EngineKind, FileDisk, Halt, OnSuperseded, Opened, PART};
use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// Why a disk cannot be opened; one line for the user.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A description that is invalid.
    #[error("{0}")]
    Description(String),
    /// The disk, or a file that the disk needs, cannot be opened.
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// Holds users of a disk until its latch is opened; a job may use `disk` before.
///
/// Afterwards users wait only for missing blocks.
pub struct Hold {
    /// Latch whose opening resumes the users.
    pub latch: Latch,
    /// Blocks that have not been copied to the disk yet. Requests for these blocks wait.
    pub missing: Arc<Missing>,
    /// The disk without the hold, for a job.
    pub disk: Arc<dyn Disk>,
}

/// A disk with its workers.
pub struct Stack {
    /// Outermost layer of the disk, which the workers use.
    pub disk: Arc<dyn Disk>,
    /// Format in the description, or [`Format::Raw`] if the description has none.
    pub format: Format,
    /// The file of the disk, if the disk is in a file.
    pub file: Option<Arc<FileDisk>>,
    /// The disk's image, if it has a format or is a part of its file.
    pub image: Option<Arc<ImageDisk>>,
    /// Workers of the disk: threads of its own, or those of its pool.
    pub workers: Arc<[WorkerHandle]>,
    /// Filters of the disk.
    pub filters: DiskFilters,
    /// The components that hand state over to a successor.
    pub parts: Parts,
    /// Delays to inject. `None`: no delays.
    pub injector: Option<Arc<Injector>>,
    /// The tap, where writes are marked and may wait.
    pub tap: Arc<Tap>,
    /// Holds users, if requested.
    pub hold: Option<Hold>,
    /// The name of the engine in use, after a fallback if one was needed.
    pub engine: &'static str,
    /// The image to which the disk's writes go.
    pub marked: MarkedImage,
    whole: Option<UsedFile>,
    /// Whether changes go to an unnamed overlay.
    has_overlay: bool,
}

impl Stack {
    /// Opens the disk and starts its workers.
    ///
    /// `any_bytes`: whether users may send requests that are not of whole blocks. `held`: whether
    /// users wait at first.
    pub fn open(
        description: &Description,
        any_bytes: bool,
        held: bool,
        all: &Filters,
        pools: &Pools,
    ) -> Result<Stack, Error> {
        let pool = description.pool.as_deref().map(|name| pools.find(name));
        let pool = pool.transpose().map_err(Error::Description)?;
        let in_pool = pool.map(|pool| description.in_pool(pool));
        let description = in_pool.as_ref().unwrap_or(description);
        description.cpus.check().map_err(Error::Description)?;
        let filters = DiskFilters::make(all, &description.filters, &description.handover_state);
        let filters = filters.map_err(|error| Error::Description(format!("--filter: {error}")))?;
        let overlay = filters.overlay_dir();
        let place = place_of_bitmaps(description, overlay.is_some());
        if let Ok(place) = &place {
            place.make_said().map_err(Error::Description)?;
        }
        let own_bitmaps = match place {
            Ok(_) => OwnBitmaps::Recorded,
            Err(_) => OwnBitmaps::Missed,
        };
        let bare = open_disk(description, overlay.as_deref().map(Path::new), own_bitmaps)?;
        let Bare {
            disk,
            file,
            data,
            image,
            whole,
            part,
            halt: _,
        } = bare;
        let files = used_files(image.as_deref(), whole.as_ref(), overlay.is_some());
        let marked = MarkedImage::new(&description.location, file.as_ref(), &files);
        if !description.read_only {
            marked.take(description.superseded)?;
        }
        let mut parts = Parts::default();
        part.into_iter()
            .for_each(|(name, part)| parts.add(name, part));
        filters.add_to(&mut parts);
        description
            .handover_state
            .check_taken()
            .map_err(Error::Description)?;
        let has_own = |image: &Arc<ImageDisk>| place.is_ok() && image.can_have_bitmaps();
        let own = image.clone().filter(has_own);
        let bitmaps = Bitmaps::new(place, own);
        bitmaps.prepare(disk.info().size);
        let tap = Arc::new(Tap::new(disk, file.clone(), data, bitmaps));
        let disk: Arc<dyn Disk> = tap.clone();
        let injector = description.inject.map(Injector::new);
        let disk = match &injector {
            Some(injector) => injector.wrap_disk(disk),
            None => disk,
        };
        let mut disk = filters.wrap(disk);
        if any_bytes {
            disk = Arc::new(ByteDisk::new(disk));
        }
        let hold = held.then(|| {
            let below = disk.clone();
            let held = Held::new(below.clone());
            let (latch, missing) = (held.latch(), held.missing());
            disk = Arc::new(held);
            Hold {
                latch,
                missing,
                disk: below,
            }
        });
        let (workers, engine) = match pool {
            Some(pool) => join(pool, &disk, description)?,
            None => start_workers(&disk, description)?,
        };
        Ok(Stack {
            disk,
            format: description.format.unwrap_or(Format::Raw),
            file,
            image,
            workers,
            filters,
            parts,
            injector,
            tap,
            hold,
            engine,
            marked,
            whole,
            has_overlay: overlay.is_some(),
        })
    }

    /// Returns the named files that the disk has open.
    pub fn used_files(&self) -> Vec<UsedFile> {
        used_files(self.image.as_deref(), self.whole.as_ref(), self.has_overlay)
    }
}

fn used_files(
    image: Option<&ImageDisk>,
    whole: Option<&UsedFile>,
    has_overlay: bool,
) -> Vec<UsedFile> {
    let mut files = image.map_or_else(Vec::new, |image| image.used_files(0));
    files.retain(|file| !has_overlay || file.depth > 0);
    files.extend(whole.cloned());
    files
}

/// Returns the place of the disk's bitmaps. The error says why it has none.
fn place_of_bitmaps(description: &Description, has_overlay: bool) -> Result<Place, String> {
    let refused = |why: &str| Err(format!("no bitmaps: {why}"));
    if description.read_only {
        return refused("the disk is read-only");
    }
    if has_overlay {
        return refused("its changes are discarded when the server ends");
    }
    if gate::other().is_some() {
        return refused("tenants' disks have no bitmaps");
    }
    let place = Place::of(&description.location, description.bitmaps.as_deref());
    let data = description.data_file.clone();
    place
        .map(|place| Place { data, ..place })
        .or_else(|why| refused(&why))
}

/// A disk that only a job uses, with the files that it has open.
pub struct Unserved {
    /// The disk, for which no workers run yet.
    pub disk: Arc<dyn Disk>,
    /// Named files that the disk has open.
    pub files: Vec<UsedFile>,
    /// Makes all requests fail, if that is possible while the storage does not respond.
    pub halt: Option<Halt>,
}

/// Opens a disk that only a job uses.
pub fn open_unserved(description: &Description) -> Result<Unserved, Error> {
    description.check().map_err(Error::Description)?;
    // The image's contents are overwritten, so it does not matter if it is superseded.
    let description = &Description {
        superseded: OnSuperseded::Ignore,
        ..description.clone()
    };
    let bare = open_disk(description, None, OwnBitmaps::Missed)?;
    Ok(Unserved {
        files: used_files(bare.image.as_deref(), bare.whole.as_ref(), false),
        disk: bare.disk,
        halt: bare.halt,
    })
}

/// Opens a possible backing image of the described image for reading.
///
/// `name` is the name that the image would record. The backing image must be where the image may
/// name files, and must not have the image itself in its chain.
pub fn open_below(
    description: &Description,
    name: &[u8],
    format: Option<Format>,
) -> Result<Arc<dyn Disk>, Error> {
    let refused = |problem: String| Err(Error::Description(problem));
    let (location, options) = (&description.location, description.open_options());
    let Some(own) = location.path() else {
        return refused(format!("{location}: not a file"));
    };
    let opener = ImageOpener::of(location, &options, &description.allow_dirs)?;
    let below = opener.open_named(own, name, false)?;
    let (path, stored) = (below.path().to_owned(), Arc::new(below));
    let image_options = ImageOptions {
        read_only: true,
        any_size: true,
        keys: description.keys.keys().map_err(Error::Description)?,
        ..ImageOptions::new(format.unwrap_or(Format::Raw))
    };
    if format.is_none() {
        refuse_other_formats(&path, looks_like(stored.bytes()))?;
    }
    let disk = opener.open_disk(stored, image_options)?;
    let size = disk.info().size;
    if size < 512 || disk.images().len() >= MAX_CHAIN {
        let (path, count) = (path.display(), disk.images().len());
        return refused(format!(
            "{path}: has {size} bytes in {count} images, and so cannot be a backing image"
        ));
    }
    let files = disk.used_files(0);
    if FileId::at(own).is_ok_and(|own| files.iter().any(|file| file.id == own)) {
        return refused(format!(
            "{}: has {} in its backing chain, which would be a loop",
            path.display(),
            own.display()
        ));
    }
    Ok(Arc::new(disk))
}

/// Opens the disk without its filters. `overlay`: the directory for a temporary overlay.
fn open_disk(
    description: &Description,
    overlay: Option<&Path>,
    own_bitmaps: OwnBitmaps,
) -> Result<Bare, Error> {
    let path = description.location.path();
    if let (Some(path), true) = (path, description.may_be_other_format()) {
        check_unnamed(path)?;
    }
    match (path, overlay) {
        (Some(path), Some(dir)) => Ok(cow::open(path, dir, description)?),
        (None, Some(_)) => {
            let problem = "--filter cow: applies only to images in files";
            Err(Error::Description(problem.into()))
        }
        (_, None) if !description.is_whole() => open_image(description, own_bitmaps),
        (_, None) => {
            let opened = description.location.open(&description.open_options())?;
            let Opened {
                disk,
                file,
                part,
                bytes,
                identity,
                halt,
            } = opened;
            let id = match &file {
                Some(file) => Some(file.id().clone()),
                None => identity.map(FileId::Named),
            };
            let whole = id.map(|id| UsedFile {
                depth: 0,
                is_data: false,
                path: description.location.name(),
                id,
            });
            if let (Some(bytes), true) = (bytes, description.may_be_other_format()) {
                let found = looks_like(&*bytes);
                refuse_other_formats(Path::new(&description.location.to_string()), found)?;
            }
            let part = part.map(|part| (PART, part));
            Ok(Bare {
                disk,
                file,
                data: None,
                image: None,
                whole,
                part,
                halt,
            })
        }
    }
}

/// Maximum helper threads per disk for compression and encryption, since disks may be many.
const HELPERS: usize = 4;

/// Opens an image whose disk is not all of its file, with the files that it names.
fn open_image(description: &Description, own_bitmaps: OwnBitmaps) -> Result<Bare, Error> {
    let (location, options) = (&description.location, description.open_options());
    let stored = Arc::new(StoredImage::open(location, &options)?);
    if description.location.path().is_none() && description.may_be_other_format() {
        let shown = description.location.to_string();
        refuse_other_formats(Path::new(&shown), looks_like(stored.bytes()))?;
    }
    let file = stored.file_disk().cloned();
    let name = stored.path().to_owned();
    let base = description.base_location().map_err(Error::Description)?;
    let opener = ImageOpener::of(location, &options, &description.allow_dirs)?
        .with_data_file(&name, description.data_file.as_deref())
        .with_base(&name, base, &options);
    let format = description.format.unwrap_or(Format::Raw);
    let new = ImageOptions::new(format);
    let image_options = ImageOptions {
        format,
        read_only: description.read_only,
        discard: description.discard,
        metadata_cache: description.metadata_cache(),
        zero_missing_clusters: description.zero_missing_clusters,
        offset: description.offset.unwrap_or(0),
        size: description.size,
        side_view: description.side_view,
        own_bitmaps,
        helpers: HELPERS.min(new.helpers),
        keys: description.keys.keys().map_err(Error::Description)?,
        rebasing: description.side_view.is_some(),
        ..new
    };
    let data = opener.data_disk();
    let disk = Arc::new(opener.open_disk(stored, image_options)?);
    Ok(Bare {
        disk: disk.clone(),
        image: Some(disk),
        data: data.get().cloned(),
        file,
        whole: None,
        part: None,
        halt: None,
    })
}

/// Rejects a file that looks like another format if the user has named no format.
fn check_unnamed(path: &Path) -> Result<(), DiskError> {
    let image = gate::open_image(path, false);
    let found = image.and_then(|image| fathom_files::magic::detect(&image));
    refuse_other_formats(path, found)
}

/// Rejects writing to a file that an image calls raw but that looks like another format.
///
/// A LUKS header is accepted: the guest encrypts its disk.
pub fn check_raw(path: &Path) -> Result<(), DiskError> {
    let image = gate::open_image(path, false);
    let found = image.and_then(|image| fathom_files::magic::detect(&image));
    let found = found.map(|format| format.filter(|name| *name != fathom_files::magic::LUKS));
    refuse_other_formats(path, found)
}

fn looks_like(bytes: &dyn ImageFile) -> io::Result<Option<&'static str>> {
    let mut start = [0; fathom_files::magic::START];
    bytes.read_at(&mut start, 0)?;
    Ok(fathom_files::magic::detect_in(&start))
}

/// Rejects an image that has a format the user did not name.
///
/// Errors are ignored here; opening the image reports them.
fn refuse_other_formats(
    path: &Path,
    found: io::Result<Option<&'static str>>,
) -> Result<(), DiskError> {
    match found {
        Ok(Some(format)) => Err(DiskError::Unusable {
            path: path.to_owned(),
            problem: magic::refusal(format),
        }),
        Ok(None) | Err(_) => Ok(()),
    }
}

/// The workers, and the name of their engine.
type Workers = (Arc<[WorkerHandle]>, &'static str);

fn join(
    pool: &NamedPool,
    disk: &Arc<dyn Disk>,
    description: &Description,
) -> Result<Workers, DiskError> {
    let registers = description.register_memory;
    if registers && pool.engine != EngineKind::IoUring.name() {
        warn_of_memory(pool.engine);
    }
    let workers = pool.pool.join(disk, registers)?;
    Ok((workers.into(), pool.engine))
}

fn warn_of_memory(engine: &str) {
    tracing::warn!("--register-memory: no effect, because {engine} cannot register memory");
}

fn start_workers(disk: &Arc<dyn Disk>, description: &Description) -> Result<Workers, DiskError> {
    let name = Arc::default();
    let workers = (0..description.iothreads)
        .map(|index| start_worker(index, disk, &name, description))
        .collect::<Result<_, _>>()?;
    Ok((workers, name.get().copied().unwrap_or_default()))
}

fn start_worker(
    index: usize,
    disk: &Arc<dyn Disk>,
    name: &Arc<OnceLock<&'static str>>,
    description: &Description,
) -> Result<WorkerHandle, DiskError> {
    let (engine, register_memory) = (description.engine, description.register_memory);
    let worker = WorkerOptions {
        name: format!("worker {index}"),
        polling: description.polling,
        cpus: description.cpus.share(index, description.iothreads),
    };
    let name = name.clone();
    let start = move || {
        let mut engine = fathom_storage::engine(engine)?;
        if register_memory && !engine.pin_memory() {
            warn_of_memory(engine.name());
        }
        // All workers use the same engine.
        let _ = name.set(engine.name());
        Ok(engine)
    };
    WorkerHandle::spawn(disk.clone(), start, worker)
}
