//! Disk and workers, from options.

use crate::daemon::Error;
use crate::inject::Injector;
use crate::magic;
use crate::options::{DiskSpec, ServeOptions};
use fathom_core::{Disk, DiskError, WorkerHandle, WorkerOptions};
use fathom_storage::{FileDisk, FileOptions, MemoryDisk, NullDisk};
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// A disk with its workers.
pub struct Stack {
    pub disk: Arc<dyn Disk>,
    /// The same disk, if it is a file.
    pub file: Option<Arc<FileDisk>>,
    pub workers: Arc<[WorkerHandle]>,
    pub injector: Option<Arc<Injector>>,
    /// The engine that is used, after a fallback if need be.
    pub engine: &'static str,
}

/// Open the disk and start its workers.
pub fn assemble(options: &ServeOptions) -> Result<Stack, Error> {
    let mut file = None;
    let disk: Arc<dyn Disk> = match &options.disk {
        DiskSpec::File(path) => {
            let opened = Arc::new(open(path, options)?);
            file = Some(opened.clone());
            opened
        }
        DiskSpec::Memory(size) => Arc::new(MemoryDisk::new(*size)?),
        DiskSpec::Null(size) => Arc::new(NullDisk::new(*size)),
    };
    let injector = options.inject.map(Injector::new);
    let seen = match &injector {
        Some(injector) => injector.wrap_disk(disk.clone()),
        None => disk.clone(),
    };
    let name = Arc::default();
    let workers = (0..options.iothreads)
        .map(|index| start_worker(index, &seen, &name, options))
        .collect::<Result<_, _>>()?;
    Ok(Stack {
        disk,
        file,
        workers,
        injector,
        engine: name.get().copied().unwrap_or_default(),
    })
}

fn open(path: &Path, options: &ServeOptions) -> Result<FileDisk, DiskError> {
    if options.format.is_none() {
        refuse_other_formats(path)?;
    }
    let file_options = FileOptions {
        cache: options.cache,
        read_only: options.read_only,
        force_share: options.force_share,
        engine: options.engine,
        discard: options.discard,
        ..FileOptions::default()
    };
    FileDisk::open(path, file_options)
}

/// An image whose bytes are not the disk's is served only when the user says
/// so. What cannot be read here is told when it is opened in earnest.
fn refuse_other_formats(path: &Path) -> Result<(), DiskError> {
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path);
    let Some(format) = opened
        .and_then(|image| magic::detect(&image))
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
    options: &ServeOptions,
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
