//! The file by which programs use the disk (FUSE).

use super::Served;
use crate::serving::Serving;
use fathom_core::ThreadKind;
use fathom_exports::FuseExport;
use fathom_exports::fuse::{Backend, Mounted};
use fathom_files::FileId;
use fathom_host::Error;
use fathom_metrics::{By, FuseInfo};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

impl Served {
    /// Mounts the disk over its file, if it has one. Programs wait until [`Served::serve`].
    pub(super) fn mount(&mut self) -> Result<(), Error> {
        // A disk that takes another one's place gets that one's file.
        let Some(fuse) = self
            .options
            .fuse
            .clone()
            .filter(|_| !self.options.disk.succeeds)
        else {
            return Ok(());
        };
        if fuse.is_writable && self.stack.disk.info().read_only {
            let problem = "fuse-writable: the disk is read-only; remove the option";
            return Err(Error::Options(problem.into()));
        }
        let used = self.used_files();
        let is_used = |device, inode| {
            let id = FileId::File { device, inode };
            used.iter().any(|file| file.id == id)
        };
        let mounted = Mounted::new(&fuse.file, !fuse.is_writable, is_used);
        let mounted = mounted.map_err(|problem| Error::Options(format!("fuse: {problem}")))?;
        let file = FuseExport::new(mounted, fuse.is_writable, self.backend());
        let file = Arc::new(file.map_err(Error::io("cannot serve a mounted file"))?);
        self.let_file_disconnect(&file);
        self.mounted = Some(file);
        Ok(())
    }

    /// Serves the file's programs, on a thread of their own.
    pub(super) fn serve_file(&mut self) -> Result<(), Error> {
        let Some(file) = self.mounted.take() else {
            return Ok(());
        };
        let kind = ThreadKind::Fuse;
        let serving = Serving::start(kind, "fuse", file, FuseExport::serve, FuseExport::stop);
        self.file = Some(serving.map_err(Error::io("cannot serve a mounted file"))?);
        Ok(())
    }

    /// Returns the disk as programs use it by the file.
    pub fn backend(&self) -> Backend {
        Backend {
            disk: self.shared.for_clients(),
            workers: self.stack.workers.clone(),
            watch: self.watch(By::Fuse),
        }
    }

    /// Lets the disk disconnect the programs that use its file, which may be necessary when its
    /// front-end attaches or detaches.
    pub fn let_file_disconnect(&self, file: &Arc<FuseExport>) {
        let file = Arc::downgrade(file);
        self.shared.add_disconnect(Box::new(move || {
            if let Some(file) = file.upgrade() {
                file.disconnect();
            }
        }));
    }

    /// Returns the mounted file.
    pub fn file_shared(&self) -> Option<Arc<FuseExport>> {
        self.file.as_ref().map(Serving::shared)
    }

    /// Takes over the file of the disk that this one replaces.
    pub fn keep_file(&mut self, before: &mut Served) {
        self.file = before.file.take();
    }

    /// Returns a file descriptor that is readable after the thread that serves the file has ended.
    pub fn file_ended(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(Serving::ended)
    }

    pub(super) fn file_info(&self) -> Option<FuseInfo> {
        let file = self.file.as_ref().map(Serving::export)?;
        Some(FuseInfo {
            file: file.file().to_owned(),
            writable: file.is_writable(),
            open: file.open_handles() as u64,
        })
    }
}
