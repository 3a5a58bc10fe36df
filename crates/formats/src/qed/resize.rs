//! Resizes QED images: changes the size in the header, within the reach of the tables.

use super::check::CHECKER;
use super::{Cluster, Header, L2Offset, QedImage};
use crate::offline::create::{Preallocation, preallocate};
use crate::offline::resize::{Resize, sync, whole_sectors};
use crate::{Error, GuestOffset, HostOffset, Result};
use fathom_files::ImageFile;

pub(super) fn resize(file: &dyn ImageFile, to: &Resize) -> Result<()> {
    if to.preallocation != Preallocation::Off {
        return Err(Error::usage("preallocation: not possible for qed images"));
    }
    whole_sectors(to.size)?;
    CHECKER.ensure_sound(file, QedImage::read(file)?.header.needs_check())?;
    let mut header = QedImage::read(file)?.header;
    let old = header.image_size;
    if to.size > header.geometry().max_size() {
        return Err(Error::usage(format!(
            "its tables reach at most {} bytes; convert it to qcow2",
            header.geometry().max_size()
        )));
    }
    if to.size < old {
        return Err(Error::unsupported(
            "qed images cannot shrink; convert it to qcow2",
        ));
    }
    if to.size > old && to.below.is_some_and(|below| below.size() > old) {
        return Err(Error::unsupported(
            "its backing file is larger than its disk and would become visible; convert it to \
             qcow2",
        ));
    }
    clear_tail(file, &header)?;
    header.image_size = to.size;
    header.prepare_for_writing();
    file.write_at(&header.encode(), 0)
        .map_err(Error::io("cannot write its header"))?;
    sync(file)
}

/// Writes zeroes to the last cluster after the end of the disk. Guests cannot read this part until
/// the disk grows.
fn clear_tail(file: &dyn ImageFile, header: &Header) -> Result<()> {
    let (g, end) = (header.geometry(), GuestOffset(header.image_size));
    let tail = end.up_to(g.cluster_size()) - end;
    let len = file.len().map_err(Error::io("cannot read its size"))?;
    let word = |at: HostOffset| {
        let mut word = [0; 8];
        let read = file.read_at(&mut word, at.0);
        read.map_err(Error::io("cannot read its tables"))?;
        Ok(u64::from_le_bytes(word))
    };
    let invalid = |e: super::TableError| Error::invalid(e.to_string());
    if tail == 0 {
        return Ok(());
    }
    let table = L2Offset(word(header.l1_offset + 8 * g.l1_index(end))?);
    let Some(table) = table.decode(&g, len).map_err(invalid)? else {
        return Ok(());
    };
    let entry = word(table + 8 * g.l2_index(end))?;
    let Cluster::Data { host } = Cluster::decode(entry, &g, len).map_err(invalid)? else {
        return Ok(());
    };
    let at = host + (g.cluster_size() - tail);
    preallocate(file, Preallocation::Full, at.0, tail)?;
    sync(file)
}
