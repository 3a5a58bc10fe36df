//! Validates an image's bitmaps and encryption header, as QEMU does when it opens an image.

use crate::luks::{Part, qcow2_header, refused};
use crate::offline::bitmap::check_tables;
use crate::qcow2::bitmap::{Bitmap, FLAG_IN_USE, TableEntry};
use crate::qcow2::{CryptMethod, Header};
use crate::{Error, Result};
use fathom_files::ImageFile;
use fathom_luks::Description;

/// Number of bytes of a bitmap table that are read at once.
const CHUNK: usize = 64 << 10;

pub(super) fn check(
    file: &dyn ImageFile,
    header: &Header,
    bitmaps: &[Bitmap],
) -> Result<Option<Description>> {
    let believed = |bitmap: &&Bitmap| bitmap.flags & FLAG_IN_USE == 0;
    let believed = || bitmaps.iter().filter(believed);
    check_tables(file, &header.geometry(), believed())?;
    let mut chunk = vec![0; CHUNK];
    believed().try_for_each(|bitmap| table(file, header, bitmap, &mut chunk))?;
    match header.crypt_method {
        CryptMethod::Luks => luks(file, header),
        CryptMethod::None | CryptMethod::Aes => Ok(None),
    }
}

/// Validates the table of a bitmap, one chunk at a time.
fn table(file: &dyn ImageFile, header: &Header, bitmap: &Bitmap, chunk: &mut [u8]) -> Result<()> {
    let g = header.geometry();
    let name = String::from_utf8_lossy(&bitmap.name);
    let invalid = |problem: String| {
        let name = name.escape_debug();
        Err(Error::invalid(format!("bitmap '{name}': {problem}")))
    };
    let entries = bitmap.table_entries;
    let needed = bitmap
        .bytes_for(header.size & !511)
        .div_ceil(g.cluster_size());
    if u64::from(entries) != needed {
        return invalid(format!(
            "its table has {entries} entries, but its disk needs {needed}"
        ));
    }
    let len = file.len().map_err(Error::io("cannot read its size"))?;
    let start = bitmap.table_offset.0;
    let end = (start + u64::from(entries) * 8).min(len);
    let mut at = start;
    while at < end {
        let piece = &mut chunk[..(end - at).min(CHUNK as u64) as usize];
        file.read_at(piece, at)
            .map_err(Error::io("cannot read a bitmap's table"))?;
        let words = piece.as_chunks::<8>().0.iter();
        let mut entries = words.map(|word| TableEntry(u64::from_be_bytes(*word)));
        if let Some(error) = entries.find_map(|entry| entry.cluster(&g).err()) {
            return invalid(format!("its table: {error}"));
        }
        at += piece.len() as u64;
    }
    Ok(())
}

fn luks(file: &dyn ImageFile, header: &Header) -> Result<Option<Description>> {
    let Some(crypto) = header.encryption()? else {
        return Ok(None);
    };
    let luks = qcow2_header(&Part::within(file, crypto)).map_err(refused)?;
    Ok(Some(luks.describe()))
}
