//! The disk of an image's backing file, for who needs its size and little of its data.

use crate::error::{Error, of, usage};
use crate::job::{Ask, Client, Job, Pages};
use fathom_core::{Disk, Op};
use fathom_formats::offline::Image;
use fathom_formats::offline::resize::Below;
use fathom_formats::served::{ImageDisk, ImageOptions, Opener};
use fathom_formats::{Error as FormatError, Format, Result as FormatResult};
use fathom_stack::{AllowedDirs, ImageOpener};
use fathom_storage::{Cache, EngineKind, FileOptions};
use std::cell::RefCell;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A backing file in use, with all that is below it.
pub(crate) struct Backing {
    disk: Arc<ImageDisk>,
    reader: RefCell<Option<(Job, Client)>>,
}

impl Backing {
    /// Opens the backing file of `image`, which is at `path`, and all below it, in the directories
    /// where they may be. `None` where there is none.
    pub(crate) fn open(
        path: &Path,
        image: &Image,
        allow_dirs: &[PathBuf],
    ) -> Result<Option<Backing>, Error> {
        let Some(name) = image.backing_file() else {
            return Ok(None);
        };
        let told = image
            .backing_format()
            .map(|name| Format::from_name(&name).map_err(of(path)));
        let files = FileOptions {
            cache: Cache::Writeback,
            read_only: true,
            engine: EngineKind::IoUring,
            ..FileOptions::default()
        };
        let dirs = AllowedDirs::new(path, allow_dirs)?;
        let opener = Arc::new(ImageOpener::new(dirs, files));
        let file = opener.open(path, name)?;
        let format = match (told.transpose()?, image) {
            (Some(format), _) => format,
            // QED's header says raw or nothing.
            (None, Image::Qed(..)) => Format::probe(file.bytes()).map_err(of(file.path()))?,
            (None, _) => {
                let problem = "does not say what format its backing file has; set it (fathom img \
                               rebase -u -b FILE -F FORMAT)";
                return Err(usage(path, problem));
            }
        };
        let options = ImageOptions {
            read_only: true,
            any_size: true,
            ..ImageOptions::new(format)
        };
        let disk = Arc::new(ImageDisk::open(file, opener, options)?);
        disk.activate()?;
        let reader = RefCell::new(None);
        Ok(Some(Backing { disk, reader }))
    }

    fn read(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let mut reader = self.reader.borrow_mut();
        let (job, client) = match reader.take() {
            Some(reader) => reader,
            None => {
                let mut job = Job::default();
                let client = job.client(self.disk.clone(), EngineKind::IoUring);
                (job, client.map_err(io::Error::other)?)
            }
        };
        let pages = Some(Pages::new(buf.len())?);
        client.ask(Ask::new(Op::Read, offset, buf.len() as u64, pages));
        let answer = job.wait();
        *reader = Some((job, client));
        if answer.errno != 0 {
            return Err(io::Error::from_raw_os_error(answer.errno));
        }
        if let Some(pages) = answer.ask.pages {
            buf.copy_from_slice(&pages.bytes()[..buf.len()]);
        }
        Ok(())
    }
}

/// Bytes of a request.
const PIECE: usize = 64 << 10;

impl Below for Backing {
    fn size(&self) -> u64 {
        self.disk.info().size
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> FormatResult<()> {
        let pieces = buf.chunks_mut(PIECE).enumerate();
        for (n, piece) in pieces {
            self.read(piece, offset + (n * PIECE) as u64)
                .map_err(|source| FormatError::Io {
                    what: "its backing file cannot be read",
                    source,
                })?;
        }
        Ok(())
    }
}
