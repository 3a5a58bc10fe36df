//! What an image says of its bitmaps and its encryption is looked at as far as QEMU does when it
//! opens an image.

use crate::qcow2::bitmap::{Bitmap, FLAG_IN_USE, TableEntry};
use crate::qcow2::{CryptMethod, Extension, Header};
use crate::{Error, Result};
use fathom_files::ImageFile;

/// Of a LUKS header of version 1.
const LUKS_BYTES: u64 = 592;
const LUKS_START: [u8; 8] = *b"LUKS\xba\xbe\x00\x01";

pub(super) fn check(file: &dyn ImageFile, header: &Header, bitmaps: &[Bitmap]) -> Result<()> {
    let believed = |bitmap: &&Bitmap| bitmap.flags & FLAG_IN_USE == 0;
    { bitmaps.iter().filter(believed) }.try_for_each(|bitmap| table(file, header, bitmap))?;
    match header.crypt_method {
        CryptMethod::Luks => luks(file, header),
        CryptMethod::None | CryptMethod::Aes => Ok(()),
    }
}

fn table(file: &dyn ImageFile, header: &Header, bitmap: &Bitmap) -> Result<()> {
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
            "its table has {entries} entries, where its disk needs {needed}"
        ));
    }
    let mut bytes = vec![0; entries as usize * 8];
    file.read_at(&mut bytes, bitmap.table_offset.0)
        .map_err(Error::io("a bitmap's table cannot be read"))?;
    let entries = bytes.as_chunks::<8>().0.iter();
    let mut entries = entries.map(|word| TableEntry(u64::from_be_bytes(*word)));
    match entries.find_map(|entry| entry.cluster(&g).err()) {
        Some(error) => invalid(format!("its table: {error}")),
        None => Ok(()),
    }
}

fn luks(file: &dyn ImageFile, header: &Header) -> Result<()> {
    let invalid = |problem| Err(Error::invalid(problem));
    let found = header.extensions.iter().find_map(|e| match e {
        Extension::Crypto(crypto) => Some(crypto),
        _ => None,
    });
    let Some(crypto) = found else {
        return invalid("is encrypted, and does not say where its encryption header is");
    };
    if !header.geometry().is_aligned(crypto.offset) || crypto.len < LUKS_BYTES {
        return invalid("its encryption header's place or size is invalid");
    }
    let mut start = [0; LUKS_START.len()];
    file.read_at(&mut start, crypto.offset.0)
        .map_err(Error::io("its encryption header cannot be read"))?;
    match start == LUKS_START {
        true => Ok(()),
        false => invalid("its encryption header is not one of LUKS, version 1"),
    }
}
