//! The header's first sector, the only metadata that is overwritten in place.

use crate::qcow2::{Extension, Header};
use crate::{Error, Result};
use fathom_files::ImageFile;

/// Size in bytes of a write that disks perform atomically.
pub(super) const SECTOR: usize = 512;

/// A change of the header.
pub(crate) struct Switch {
    /// A write to make before the sector is replaced, at an offset that the old header does not
    /// use: a backing file's name that does not fit into the first sector.
    pub(crate) before: Option<(u64, Vec<u8>)>,
    pub(crate) sector: Vec<u8>,
}

impl Switch {
    /// Returns the first cluster after the change. `first` is the cluster before.
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

    /// Makes all earlier writes durable, and then the new header.
    pub(crate) fn write(&self, file: &dyn ImageFile) -> Result<()> {
        self.prepare(file)?;
        self.apply(file)
    }

    /// Makes all earlier writes durable. The old header stays valid.
    pub(super) fn prepare(&self, file: &dyn ImageFile) -> Result<()> {
        if let Some((at, name)) = &self.before {
            file.write_at(name, *at).map_err(failed())?;
        }
        sync(file)
    }

    /// Replaces the header durably. After an error, the header is the old one or the new one.
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

/// Computes the first sector of the first cluster after a change of the header. The rest of the
/// cluster stays unchanged, except for a long backing file name. If the extensions change, the new
/// ones must all fit into the first sector. The optional feature name table is dropped if it does
/// not fit.
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

/// Returns the first sector with new fixed fields. Everything else stays unchanged.
fn patched(first: &[u8], new: &Header) -> Result<Vec<u8>> {
    let mut sector = first[..SECTOR].to_vec();
    // Encodes only the fixed part, which always fits.
    let fixed = Header {
        extensions: Vec::new(),
        backing_file: None,
        ..new.clone()
    };
    let bytes = fixed.encode()?;
    // The size; the fields from L1 table to snapshots; the feature bits and the refcount width. The
    // place of the backing file's name does not change.
    sector[24..32].copy_from_slice(&bytes[24..32]);
    sector[36..72].copy_from_slice(&bytes[36..72]);
    if new.version >= 3 {
        sector[72..100].copy_from_slice(&bytes[72..100]);
    }
    Ok(sector)
}

/// Encodes the whole header, or returns `None` if it does not fit. The backing file's name follows
/// the extensions if it fits there. Otherwise an unchanged name behind the first sector stays, and
/// any other name gets a new place.
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

/// Space reserved for a name in bytes, more than the limit of 1023.
const NAME_ROOM: u64 = 1024;

/// Finds a place at the end of the first cluster for a name of `len` bytes. The place does not
/// overlap the old name, or the old extensions, which come first.
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
