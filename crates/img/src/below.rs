//! The disk of an image's backing file, for callers that need its size and little of its data.

use crate::error::{Error, of, usage};
use crate::open::{OpenOptions, format_of};
use fathom_core::{AlignedBuffer, Disk, Op};
use fathom_formats::offline::Image;
use fathom_formats::offline::resize::Below;
use fathom_formats::served::{ImageDisk, ImageOptions, Storage};
use fathom_formats::{Error as FormatError, Format, Result as FormatResult};
use fathom_stack::{Client, DiskRequest, ImageOpener, Job, KeyRing, StoredImage};
use fathom_storage::EngineKind;
use std::cell::RefCell;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// A backing file in use, with its own backing chain.
pub(crate) struct Backing {
    disk: Arc<ImageDisk>,
    reader: RefCell<Option<(Job, Client)>>,
}

impl Backing {
    /// Opens the backing file of an image with this header, and the backing chain below it. The
    /// files must be in allowed directories. Returns `None` if the image has no backing file.
    pub(crate) fn open(
        image: &StoredImage,
        header: &Image,
        allow_dirs: &[PathBuf],
        keys: &KeyRing,
    ) -> Result<Option<Backing>, Error> {
        let Some(name) = header.backing_file() else {
            return Ok(None);
        };
        let path = image.path();
        let told = header
            .backing_format()
            .map(|name| Format::from_name(&name).map_err(of(path)));
        let options = OpenOptions::reading(None).storage();
        let opener = Arc::new(ImageOpener::of(image.location(), &options, allow_dirs)?);
        let file = Arc::new(opener.open_named(path, name, false)?);
        let format = match (told.transpose()?, header) {
            (Some(format), _) => format,
            // A QED header can name only the raw format.
            (None, Image::Qed(_)) => format_of(&file, None)?,
            (None, _) => {
                let problem = "the image does not record the format of its backing file; set it with \
                     'fathom img rebase -u -b FILE -F FORMAT'";
                return Err(usage(path, problem));
            }
        };
        let options = ImageOptions {
            read_only: true,
            any_size: true,
            keys: keys.keys().map_err(|problem| usage(path, problem))?,
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
        let pages = Some(AlignedBuffer::try_new(buf.len())?);
        client.ask(DiskRequest::new(Op::Read, offset, buf.len() as u64, pages));
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

/// Size of a request in bytes.
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
                    what: "cannot read its backing file",
                    source,
                })?;
        }
        Ok(())
    }
}
