//! What an image says of its bitmaps and its encryption is looked at as far as QEMU does when it
//! opens an image.

use crate::luks::{Part, qcow2_header, refused};
use crate::qcow2::bitmap::{Bitmap, FLAG_IN_USE, TableEntry};
use crate::qcow2::{CryptMethod, Header};
use crate::{Error, Result};
use fathom_files::ImageFile;
use fathom_luks::Description;

pub(super) fn check(
    file: &dyn ImageFile,
    header: &Header,
    bitmaps: &[Bitmap],
) -> Result<Option<Description>> {
    let believed = |bitmap: &&Bitmap| bitmap.flags & FLAG_IN_USE == 0;
    { bitmaps.iter().filter(believed) }.try_for_each(|bitmap| table(file, header, bitmap))?;
    match header.crypt_method {
        CryptMethod::Luks => luks(file, header),
        CryptMethod::None | CryptMethod::Aes => Ok(None),
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

fn luks(file: &dyn ImageFile, header: &Header) -> Result<Option<Description>> {
    let Some(crypto) = header.encryption()? else {
        return Ok(None);
    };
    let luks = qcow2_header(&Part::within(file, crypto)).map_err(refused)?;
    Ok(Some(luks.describe()))
}
