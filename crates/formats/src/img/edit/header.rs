//! The header's first sector, the one thing that is written in place.

use crate::qcow2::{Extension, Header};
use crate::{Error, Result};

/// What a disk writes wholly or not at all.
pub(super) const SECTOR: usize = 512;

/// The first sector of the first cluster after a change of the header. The rest of that cluster
/// stays as it is: where the extensions change, they are all in the first sector afterwards,
/// without the features' names if need be, which are a courtesy.
pub(super) fn first_sector(first: &[u8], old: &Header, new: &Header) -> Result<Vec<u8>> {
    if old.extensions == new.extensions && old.backing_file == new.backing_file {
        return patched(first, new);
    }
    let mut named = new.clone();
    for without_names in [false, true] {
        if without_names {
            let kept = |e: &Extension| !matches!(e, Extension::FeatureNames(_));
            named.extensions.retain(kept);
        }
        if let Some(sector) = encoded(first, old, &named)? {
            return Ok(sector);
        }
    }
    Err(Error::unsupported(
        "its header has no room in its first 512 bytes, where it can be changed at once",
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
    // Size; L1 table to snapshots; features. The backing file's name stays where it is.
    sector[24..32].copy_from_slice(&bytes[24..32]);
    sector[36..72].copy_from_slice(&bytes[36..72]);
    if new.version >= 3 {
        sector[72..96].copy_from_slice(&bytes[72..96]);
    }
    Ok(sector)
}

/// The whole header, if it fits: with the backing file's name behind the extensions, or where it
/// is, if that is behind the first sector.
fn encoded(first: &[u8], old: &Header, new: &Header) -> Result<Option<Vec<u8>>> {
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
            return Ok(None);
        }
        sector[8..16].copy_from_slice(&at.to_be_bytes());
        sector[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
    }
    sector.resize(SECTOR, 0);
    Ok(Some(sector))
}
