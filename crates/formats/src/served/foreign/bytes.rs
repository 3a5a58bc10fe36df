//! Blocking access to an image in another program's format.

use super::tables::Tables;
use fathom_files::ImageFile;
use fathom_foreign::{Grain, Image, Place};
use std::io;
use std::sync::Arc;

/// The bytes of the image's disk.
#[derive(Clone)]
pub(super) struct ForeignBytes(pub(super) Arc<Tables>);

impl ForeignBytes {
    /// Reads the whole range or fails: data that was cut off since must not read as zeroes.
    fn read_part(&self, file: usize, buf: &mut [u8], at: u64) -> io::Result<()> {
        let file = self.0.files[file].bytes();
        match at.checked_add(buf.len() as u64) {
            Some(end) if end <= file.len()? => file.read_at(buf, at),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn inflate(&self, grain: &Grain, buf: &mut [u8]) -> io::Result<()> {
        // (Both lengths were limited when the tables were read.)
        let (mut stored, mut whole) = (vec![0; grain.len as usize], vec![0; grain.size as usize]);
        self.read_part(grain.file, &mut stored, grain.at)?;
        grain
            .inflate(&stored, &mut whole)
            .map_err(io::Error::other)?;
        let from = grain.skip as usize;
        buf.copy_from_slice(&whole[from..from + buf.len()]);
        Ok(())
    }

    fn read_some(&self, image: &Image, buf: &mut [u8], at: u64) -> io::Result<usize> {
        let extent = image.lookup(at, buf.len() as u64);
        if extent.len == 0 {
            // Beyond the end of the image.
            buf.fill(0);
            return Ok(buf.len());
        }
        let len = extent.len as usize;
        let buf = &mut buf[..len];
        match extent.place {
            Place::Zero => buf.fill(0),
            Place::Data { file, at } => self.read_part(file, buf, at)?,
            Place::Compressed(grain) => self.inflate(&grain, buf)?,
        }
        Ok(len)
    }
}

fn read_only<T>() -> io::Result<T> {
    Err(io::ErrorKind::ReadOnlyFilesystem.into())
}

impl ImageFile for ForeignBytes {
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        let image = self.0.image();
        let mut done = 0;
        while done < buf.len() {
            done += self.read_some(&image, &mut buf[done..], at + done as u64)?;
        }
        Ok(())
    }

    fn write_at(&self, _buf: &[u8], _at: u64) -> io::Result<()> {
        read_only()
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.0.image().size())
    }

    fn set_len(&self, _len: u64) -> io::Result<()> {
        read_only()
    }

    fn grows(&self) -> bool {
        false
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn forget_cache(&self) {
        let files = self.0.files.iter();
        files.for_each(|file| file.bytes().forget_cache());
    }

    fn run_at(&self, at: u64) -> (bool, u64) {
        let extent = self.0.image().lookup(at, u64::MAX);
        match extent.len {
            0 => (true, u64::MAX),
            len => (extent.place == Place::Zero, at + len),
        }
    }

    fn allocated(&self) -> io::Result<u64> {
        let files = self.0.files.iter();
        files.map(|file| file.bytes().allocated()).sum()
    }

    fn discard(&self, _at: u64, _len: u64) -> io::Result<()> {
        read_only()
    }
}
