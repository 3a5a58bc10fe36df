//! The handle of a backup.

use super::keeper::Keeper;
use super::terms::{Failed, Status, Terms};
use super::view::View;
use crate::source::Source;
use fathom_core::{
    Disk, DiskError, Polling, ThreadKind, WorkerHandle, WorkerOptions, thread_starts,
};
use fathom_files::gate;
use fathom_stack::{Dirty, Job, Past};
use fathom_storage::{ByteDisk, Cache, EngineKind, FileDisk, FileOptions};
use fathom_units::cause;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

/// A disk as it was at an instant.
pub struct Backup {
    past: Arc<Past>,
    kept: Arc<AtomicU64>,
    source: Source,
    /// The disk that clients read, and its workers.
    view: Arc<dyn Disk>,
    readers: Arc<[WorkerHandle]>,
    keeper: JoinHandle<()>,
    /// The file with the original data of overwritten blocks.
    scratch: File,
    /// The name of the bitmap, and its contents from the instant on.
    bitmap: Option<String>,
    dirty: Arc<OnceLock<Dirty>>,
    /// The identifier of the bitmap's successor.
    successor: Option<u64>,
}

impl Backup {
    /// Starts a backup of the disk as it is when this function returns. May block.
    ///
    /// `failed` is called once if the backup fails later, with the reason.
    ///
    /// # Errors
    /// A message for the user; the disk is unchanged.
    pub fn start(source: Source, terms: &Terms, failed: Failed) -> Result<Backup, String> {
        let scratch = Scratch::make(&source, terms)?;
        source.disk.activate().map_err(|error| error.to_string())?;
        let disk = source.disk.clone();
        let bitmap = terms.bitmap.clone();
        let begun = Backup::prepare(source, scratch, bitmap, failed).and_then(Backup::begin);
        let begun = begun.inspect(|backup| match terms.held {
            true => {}
            false => backup.go_on(),
        });
        if begun.is_err() {
            deactivate(&*disk);
        }
        begun
    }

    fn begin(mut self) -> Result<Backup, String> {
        let Source { tap, workers, .. } = &self.source;
        let bitmaps = tap.bitmaps();
        let follow = |name: &String| bitmaps.begin_successor(name);
        let followed = self.bitmap.as_ref().map(follow).transpose();
        let begun = followed.and_then(|next| tap.hold(&self.past, workers).map(|()| next));
        match begun {
            Ok(next) => {
                self.successor = next;
                if let Some(name) = &self.bitmap {
                    let _ = self.dirty.set(bitmaps.dirty(name));
                }
                Ok(self)
            }
            Err(problem) => {
                self.drop_successor();
                self.let_go();
                Err(problem)
            }
        }
    }

    /// Resumes the users' writes.
    pub fn go_on(&self) {
        self.past.begin();
    }

    fn drop_successor(&self) {
        if let Some(name) = &self.bitmap {
            self.source.tap.bitmaps().drop_successor(name);
        }
    }

    /// Returns the disk as it was, which accepts requests at any byte offset, and its workers.
    pub fn view(&self) -> (Arc<dyn Disk>, Arc<[WorkerHandle]>) {
        (self.view.clone(), self.readers.clone())
    }

    /// Returns the identifier of the successor to which the bitmap may advance.
    pub fn successor(&self) -> Option<u64> {
        self.successor
    }

    /// Returns the size of the scratch file's data, and why the backup has failed, if it has.
    pub fn status(&self) -> Status {
        Status {
            kept: self.kept.load(Ordering::Relaxed),
            problem: self.past.problem().map(str::to_owned),
        }
    }

    /// Fails the backup with this reason. The backup's readers get errors, too.
    pub fn give_up(&self, problem: &str) {
        self.past.give_up(problem.into());
    }

    /// Ends the backup, which no client reads any more, and releases the disk. May block.
    ///
    /// If the backup has not failed, the bitmap may advance from then on.
    pub fn end(self) -> Status {
        if !self.past.is_over() && self.kept.load(Ordering::Relaxed) > 0 {
            // Without this flush, lost writes to the scratch file would go unnoticed.
            let kept = self.scratch.sync_data();
            let lost = |error| format!("cannot flush the scratch file: {}", cause(error));
            let _ = kept.map_err(|error| self.past.give_up(lost(error)));
        }
        let (disk, tap) = (self.source.disk.clone(), self.source.tap.clone());
        let workers = self.source.workers.clone();
        let bitmap = self.bitmap.clone();
        let status = self.let_go();
        if status.problem.is_some()
            && let Some(name) = bitmap
        {
            tap.bitmaps().drop_successor(&name);
        }
        tap.forget(&workers);
        deactivate(&*disk);
        status
    }

    /// Stops using the disk, which may be deactivated afterwards.
    fn let_go(self) -> Status {
        self.past.end();
        // The panic handler has already reported a panic of that thread.
        let _ = self.keeper.join();
        Status {
            kept: self.kept.load(Ordering::Relaxed),
            problem: self.past.problem().map(str::to_owned),
        }
    }

    /// Prepares everything, but does not hold the users' writes yet.
    fn prepare(
        source: Source,
        scratch: Scratch,
        bitmap: Option<String>,
        failed: Failed,
    ) -> Result<Backup, String> {
        let error = |error: DiskError| error.to_string();
        let Scratch { engine, most, .. } = scratch;
        let twin = scratch.file.try_clone();
        let twin = twin.map_err(|error| {
            format!(
                "cannot duplicate the scratch file's descriptor: {}",
                cause(error)
            )
        })?;
        let size = source.disk.info().size;
        let past = Arc::new(Past::new(size));
        let dirty = Arc::<OnceLock<Dirty>>::default();
        let view = Arc::new(ByteDisk::new(Arc::new(View {
            past: past.clone(),
            disk: source.disk.clone(),
            scratch: Arc::new(scratch.disk),
            dirty: dirty.clone(),
        })));
        let options = WorkerOptions {
            name: "backup".into(),
            polling: Polling::Off,
            ..WorkerOptions::default()
        };
        let make_engine = move || fathom_storage::engine(engine);
        let reader = WorkerHandle::spawn(view.clone(), make_engine, options).map_err(error)?;
        let mut job = Job::default();
        let disk = job.client(source.disk.clone(), engine);
        let kept = Arc::<AtomicU64>::default();
        let keeper = Keeper {
            past: past.clone(),
            disk: disk.map_err(error)?,
            job,
            scratch: scratch.file,
            most,
            failed,
            kept: kept.clone(),
        };
        let thread = std::thread::Builder::new().name("keep a past".into());
        let thread = thread.spawn(move || {
            thread_starts(ThreadKind::General);
            keeper.run();
        });
        let thread = thread.map_err(|error| format!("cannot start a thread: {}", cause(error)))?;
        Ok(Backup {
            past,
            kept,
            source,
            view,
            readers: Arc::new([reader]),
            keeper: thread,
            scratch: twin,
            bitmap,
            dirty,
            successor: None,
        })
    }
}

fn deactivate(disk: &dyn Disk) {
    if let Err(error) = disk.deactivate() {
        tracing::error!("{error}");
    }
}

/// The unnamed scratch file.
struct Scratch {
    /// The file, for writing.
    file: File,
    /// The same file, for reading; activated.
    disk: FileDisk,
    engine: EngineKind,
    /// Maximum bytes of data in the file.
    most: u64,
}

impl Scratch {
    /// Creates the scratch file. The file system may be slow, so no user may be held meanwhile.
    fn make(source: &Source, terms: &Terms) -> Result<Scratch, String> {
        let dir = terms.scratch.display();
        let failed =
            |error: io::Error| format!("{dir}: cannot create a scratch file: {}", cause(error));
        let file = gate::unnamed(&terms.scratch).map_err(failed)?;
        file.set_len(source.disk.info().size).map_err(failed)?;
        // The file's data is in the page cache, where Linux AIO would block.
        let engine = match source.engine {
            EngineKind::Native => EngineKind::Threads,
            engine => engine,
        };
        let options = FileOptions {
            cache: Cache::Writeback,
            read_only: true,
            engine,
            ..FileOptions::default()
        };
        let twin = file.try_clone().map_err(failed)?;
        let disk = FileDisk::from_file(&terms.scratch.join("scratch"), twin, options);
        let disk = disk.map_err(|error| error.to_string())?;
        disk.activate().map_err(|error| error.to_string())?;
        let half = || half_of_what_is_left(&file).map_err(failed);
        let most = terms.most.map_or_else(half, Ok)?;
        Ok(Scratch {
            file,
            disk,
            engine,
            most,
        })
    }
}

fn half_of_what_is_left(file: &File) -> io::Result<u64> {
    let left = rustix::fs::fstatvfs(file)?;
    Ok(left.f_bavail.saturating_mul(left.f_frsize) / 2)
}
