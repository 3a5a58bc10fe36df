//! Blocking access to a base image, for the headers and tables that are read when it is opened.

use super::shared::User;
use fathom_files::ImageFile;
use std::io;
use std::sync::Arc;

pub(super) struct Bytes(pub(super) Arc<User>);

impl ImageFile for Bytes {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let shared = &self.0.0;
        let geometry = &shared.geometry;
        let there = geometry.size.saturating_sub(offset).min(buf.len() as u64);
        let (buf, behind) = buf.split_at_mut(there as usize);
        behind.fill(0);
        match there {
            0 => Ok(()),
            there => shared.read_when_there(geometry.run(offset, there), |view| {
                ImageFile::read_at(&view.data, buf, offset)
            }),
        }
    }

    fn write_at(&self, _: &[u8], _: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.0.0.geometry.size)
    }

    fn set_len(&self, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn grows(&self) -> bool {
        false
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }
}
