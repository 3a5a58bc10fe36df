//! The header's first sector, the one thing that is written in place.

use crate::qcow2::{Extension, Header};
use crate::{Error, Result};
use fathom_files::ImageFile;

/// What a disk writes wholly or not at all.
pub(super) const SECTOR: usize = 512;

/// A change of the header.
pub(crate) struct Switch {
    /// What is written before, where the old header has nothing: a backing file's name that has no
    /// room in the first sector.
    pub(crate) before: Option<(u64, Vec<u8>)>,
    pub(crate) sector: Vec<u8>,
}

impl Switch {
    /// The first cluster, which is `first` before.
    pub(crate) fn applied_to(&self, first: &[u8]) -> Vec<u8> {
        let mut cluster = first.to_vec();
        if let Some((at, name)) = &self.before {
            let at = *at as usize;
            cluster.resize(cluster.len().max(at + name.len()), 0);
            cluster[at..at + name.len()].copy_from_slice(name);
        }
        cluster[..self.sector.len()].copy_from_slice(&self.sector);
        cluster
    }

    /// Makes everything durable that was written before, then the new header.
    pub(crate) fn write(&self, file: &dyn ImageFile) -> Result<()> {
        self.prepare(file)?;
        self.apply(file)
    }

    /// Makes everything durable that was written before. The old header stays valid.
    pub(super) fn prepare(&self, file: &dyn ImageFile) -> Result<()> {
        if let Some((at, name)) = &self.before {
            file.write_at(name, *at).map_err(failed())?;
        }
        sync(file)
    }

    /// Replaces the header, durably. After an error the header is the old one or the new one.
    pub(super) fn apply(&self, file: &dyn ImageFile) -> Result<()> {
        file.write_at(&self.sector, 0).map_err(failed())?;
        sync(file)
    }
}

fn failed() -> impl FnOnce(std::io::Error) -> Error {
    Error::io("cannot write its header")
}

fn sync(file: &dyn ImageFile) -> Result<()> {
    file.sync().map_err(Error::io("cannot flush"))
}

/// The first sector of the first cluster after a change of the header. The rest of that cluster
/// stays as it is, but for a long name: where the extensions change, they are all in the first
/// sector afterwards, without the features' names if need be, which are a courtesy.
pub(crate) fn switch(first: &[u8], old: &Header, new: &Header) -> Result<Switch> {
    let has_same_fields = old.version == new.version;
    if has_same_fields && old.extensions == new.extensions && old.backing_file == new.backing_file {
        let sector = patched(first, new)?;
        return Ok(Switch {
            before: None,
            sector,
        });
    }
    let mut named = new.clone();
    for without_names in [false, true] {
        if without_names {
            let kept = |e: &Extension| !matches!(e, Extension::FeatureNames(_));
            named.extensions.retain(kept);
        }
        if let Some(switch) = encoded(first, old, &named)? {
            return Ok(switch);
        }
    }
    Err(Error::unsupported(
        "its header has no space within its first 512 bytes, which can be changed atomically",
    ))
}

/// The fixed fields, and everything else as it is.
fn patched(first: &[u8], new: &Header) -> Result<Vec<u8>> {
    let mut sector = first[..SECTOR].to_vec();
    // Only the fixed part is wanted, which always fits.
    let fixed = Header {
        extensions: Vec::new(),
        backing_file: None,
        ..new.clone()
    };
    let bytes = fixed.encode()?;
    // Size; L1 table to snapshots; features and the refcounts' width. The backing file's name stays where it is.
    sector[24..32].copy_from_slice(&bytes[24..32]);
    sector[36..72].copy_from_slice(&bytes[36..72]);
    if new.version >= 3 {
        sector[72..100].copy_from_slice(&bytes[72..100]);
    }
    Ok(sector)
}

/// The whole header, if it fits: with the backing file's name behind the extensions, or where it
/// is, if that is behind the first sector, or else in a place of its own.
fn encoded(first: &[u8], old: &Header, new: &Header) -> Result<Option<Switch>> {
    let mut before = None;
    let mut sector = Header {
        backing_file: None,
        ..new.clone()
    }
    .encode()
    .unwrap_or_default();
    if sector.is_empty() || sector.len() > SECTOR {
        return Ok(None);
    }
    if let Some(name) = &new.backing_file {
        let mut at = [0; 8];
        at.copy_from_slice(&first[8..16]);
        let mut at = u64::from_be_bytes(at);
        let stays = new.backing_file == old.backing_file && at >= SECTOR as u64;
        if sector.len() + name.len() <= SECTOR {
            at = sector.len() as u64;
            sector.extend(name);
        } else if !stays {
            let Some(place) = place_of_name(first, old, name.len() as u64) else {
                return Ok(None);
            };
            at = place;
            before = Some((at, name.clone()));
        }
        sector[8..16].copy_from_slice(&at.to_be_bytes());
        sector[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
    }
    sector.resize(SECTOR, 0);
    Ok(Some(Switch { before, sector }))
}

/// Bytes that a name may have, and more.
const NAME_ROOM: u64 = 1024;

/// Where a name of `len` bytes can be at the end of the first cluster, out of the old header's way:
/// the old name is not there, and extensions, which come first, do not reach so far.
fn place_of_name(first: &[u8], old: &Header, len: u64) -> Option<u64> {
    let mut at = [0; 8];
    at.copy_from_slice(&first[8..16]);
    let old_at = u64::from_be_bytes(at);
    let old_len = old
        .backing_file
        .as_ref()
        .map_or(0, |name| name.len() as u64);
    let cluster = 1 << old.cluster_bits;
    let without_name = Header {
        backing_file: None,
        ..old.clone()
    };
    let end = without_name.encode().ok()?.len() as u64;
    (1..=2)
        .map(|n| n * NAME_ROOM)
        .filter(|back| cluster >= back + end.max(SECTOR as u64))
        .map(|back| cluster - back)
        .find(|at| old_len == 0 || at + len <= old_at || old_at + old_len <= *at)
}
