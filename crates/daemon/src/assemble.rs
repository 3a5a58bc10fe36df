//! Disk and workers, from options.

use crate::confined::AllowedDirs;
use crate::daemon::Error;
use crate::filters::DiskFilters;
use crate::image_files::{ImageOpener, StoredImage};
use crate::inject::Injector;
use crate::options::{CpuList, DiskOptions, DiskSpec};
use crate::{cow, magic};
use fathom_core::{Disk, DiskError, WorkerHandle, WorkerOptions};
use fathom_filters::Filters;
use fathom_formats::Format;
use fathom_formats::served::{ImageDisk, ImageOptions};
use fathom_storage::{ByteDisk, Cache, FileDisk, FileOptions, MemoryDisk, NbdDisk, NullDisk, nbd};
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// A disk with its workers.
pub struct Stack {
    pub disk: Arc<dyn Disk>,
    pub format: Format,
    /// The file that the disk is in, if it is in one.
    pub file: Option<Arc<FileDisk>>,
    /// The disk is all of that file.
    pub is_whole_file: bool,
    pub workers: Arc<[WorkerHandle]>,
    pub filters: DiskFilters,
    pub injector: Option<Arc<Injector>>,
    /// The engine that is used, after a fallback if need be.
    pub engine: &'static str,
}

/// Open the disk and start its workers.
pub fn assemble(options: &DiskOptions, all: &Filters) -> Result<Stack, Error> {
    check_cpus(&options.cpus).map_err(Error::Options)?;
    let filters = options.filters.iter().map(|spec| all.make(spec));
    let filters = filters.collect::<Result<_, _>>().and_then(DiskFilters::new);
    let filters = filters.map_err(|error| Error::Options(format!("--filter: {error}")))?;
    let format = options.format.unwrap_or(Format::Raw);
    let is_whole_file = format == Format::Raw && options.offset.or(options.size).is_none();
    if let (DiskSpec::File(path), None) = (&options.disk, options.format) {
        refuse_other_formats(path)?;
    }
    let overlay = filters.overlay_dir();
    let (disk, file): (Arc<dyn Disk>, _) = match (&options.disk, &overlay) {
        (DiskSpec::File(path), Some(dir)) => {
            let files = file_options(options);
            let (disk, file) = cow::open(path, format, dir.as_ref(), options, files)?;
            (disk, Some(file))
        }
        (_, Some(_)) => {
            let problem = "--filter cow is for images in files";
            return Err(Error::Options(problem.into()));
        }
        (DiskSpec::File(path), None) if is_whole_file => {
            let file = Arc::new(FileDisk::open(path, file_options(options))?);
            (file.clone(), Some(file))
        }
        (DiskSpec::File(path), None) => {
            let (disk, file) = open_image(path, format, options)?;
            (Arc::new(disk), Some(file))
        }
        (DiskSpec::Memory(size), None) => (Arc::new(MemoryDisk::new(*size)?), None),
        (DiskSpec::Null(size), None) => (Arc::new(NullDisk::new(*size)), None),
        (DiskSpec::Nbd(uri), None) => {
            let disk = NbdDisk::connect(uri, client_options(options))?;
            check_workers(&disk, options)?;
            (Arc::new(disk), None)
        }
    };
    let injector = options.inject.map(Injector::new);
    let disk = match &injector {
        Some(injector) => injector.wrap_disk(disk),
        None => disk,
    };
    let mut disk = filters.wrap(disk);
    if options.nbd.is_some() {
        disk = Arc::new(ByteDisk::new(disk));
    }
    let name = Arc::default();
    let workers = (0..options.iothreads)
        .map(|index| start_worker(index, &disk, &name, options))
        .collect::<Result<_, _>>()?;
    Ok(Stack {
        disk,
        format,
        is_whole_file: is_whole_file && file.is_some() && overlay.is_none(),
        file,
        workers,
        filters,
        injector,
        engine: name.get().copied().unwrap_or_default(),
    })
}

/// Open an image whose disk is not all of its file, with all that it names;
/// also returns the file.
fn open_image(
    path: &Path,
    format: Format,
    options: &DiskOptions,
) -> Result<(ImageDisk, Arc<FileDisk>), DiskError> {
    let stored = Arc::new(StoredImage::open(path, file_options(options))?);
    let file = stored.file_disk().clone();
    let dirs = AllowedDirs::new(path, &options.allow_dirs)?;
    let opener = ImageOpener::new(dirs, file_options(options))
        .with_data_file(path, options.data_file.as_deref());
    let image_options = ImageOptions {
        format,
        read_only: options.read_only,
        discard: options.discard,
        metadata_cache: options.metadata_cache(),
        offset: options.offset.unwrap_or(0),
        size: options.size,
        ..ImageOptions::new(format)
    };
    let disk = opener.open_disk(stored, image_options)?;
    Ok((disk, file))
}

fn file_options(options: &DiskOptions) -> FileOptions {
    FileOptions {
        cache: options.cache,
        read_only: options.read_only,
        force_share: options.force_share,
        patient: true,
        engine: options.engine,
        discard: options.discard,
        ..FileOptions::default()
    }
}

fn client_options(options: &DiskOptions) -> nbd::NbdOptions {
    let default = nbd::NbdOptions::default();
    let timeout = options.server_timeout;
    nbd::NbdOptions {
        read_only: options.read_only,
        discard: options.discard,
        writethrough: options.cache == Cache::Writethrough,
        timeout: timeout.map_or(default.timeout, |timeout| timeout.0),
        ..default
    }
}

/// Refuses CPUs that this machine does not have. (What it has is not told
/// everywhere; then the kernel refuses.)
fn check_cpus(wanted: &CpuList) -> Result<(), String> {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    let text = text.trim_end();
    let Ok(online) = text.parse::<CpuList>() else {
        return Ok(());
    };
    match wanted.first_not_in(&online) {
        None => Ok(()),
        Some(cpu) => Err(format!("--cpus: there is no CPU {cpu} here, but {text}")),
    }
}

/// Each worker has a connection of its own. (The channel of one too many
/// fails, too, but a server may wait for the first to go before it answers.)
fn check_workers(disk: &NbdDisk, options: &DiskOptions) -> Result<(), DiskError> {
    match options.iothreads > 1 && !disk.export().can_multi_conn() {
        true => Err(disk.takes_one_only()),
        false => Ok(()),
    }
}

/// An image whose bytes are not the disk's is served only when the user says
/// so. What cannot be read here is told when it is opened in earnest.
fn refuse_other_formats(path: &Path) -> Result<(), DiskError> {
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path);
    let Some(format) = opened
        .and_then(|image| fathom_files::magic::detect(&image))
        .ok()
        .flatten()
    else {
        return Ok(());
    };
    Err(DiskError::Unusable {
        path: path.to_owned(),
        problem: magic::refusal(format),
    })
}

fn start_worker(
    index: usize,
    disk: &Arc<dyn Disk>,
    name: &Arc<OnceLock<&'static str>>,
    options: &DiskOptions,
) -> Result<WorkerHandle, DiskError> {
    let (engine, register_memory) = (options.engine, options.register_memory);
    let worker = WorkerOptions {
        name: format!("worker {index}"),
        polling: options.polling,
        cpus: options.cpus.share(index, options.iothreads),
    };
    let name = name.clone();
    let start = move || {
        let mut engine = fathom_storage::engine(engine)?;
        if register_memory && !engine.pin_memory() {
            let name = engine.name();
            tracing::warn!("--register-memory has no effect: {name} cannot register memory");
        }
        // Every worker has the same one.
        let _ = name.set(engine.name());
        Ok(engine)
    };
    WorkerHandle::spawn(disk.clone(), start, worker)
}
