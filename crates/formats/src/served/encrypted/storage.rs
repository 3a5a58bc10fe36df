//! Encrypted files as storages.

use super::bytes::EncryptedBytes;
use super::channel::EncryptedChannel;
use super::keys::{Fingerprint, Keys};
use super::place::Place;
use crate::luks::{Part, qcow2_header, refused};
use crate::qcow2::CryptoHeader;
use crate::served::helpers::Helpers;
use crate::served::problem::unusable;
use crate::served::storage::{EndGuard, Storage};
use fathom_core::{Channel, Cx, Disk, DiskError, DiskInfo, RangeLimits};
use fathom_files::{FileId, ImageFile};
use fathom_luks::{Header, Sectors};
use fathom_units::cause;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Maximum bytes of a zeroing in one request, since the zeroes are written.
const MAX_ZEROES: u64 = 16 << 20;

/// A storage of plaintext whose file holds ciphertext.
pub(in crate::served) struct EncryptedStorage {
    bytes: EncryptedBytes,
    disk: EncryptedDisk,
}

impl EncryptedStorage {
    /// Creates a storage.
    ///
    /// `header` is the fingerprint of a LUKS image. `None`: the storage only holds the guest data
    /// of an image that activates the file by itself.
    fn new(
        file: Arc<dyn Storage>,
        place: Place,
        header: Option<Fingerprint>,
        helpers: &Arc<Helpers>,
    ) -> EncryptedStorage {
        EncryptedStorage {
            bytes: EncryptedBytes {
                file: file.clone(),
                place: place.clone(),
            },
            disk: EncryptedDisk {
                file,
                place,
                header,
                helpers: helpers.clone(),
            },
        }
    }
}

impl Storage for EncryptedStorage {
    fn bytes(&self) -> &dyn ImageFile {
        &self.bytes
    }

    fn disk(&self) -> &dyn Disk {
        &self.disk
    }

    fn path(&self) -> &Path {
        self.disk.file.path()
    }

    fn identity(&self) -> (u64, u64) {
        self.disk.file.identity()
    }

    fn file_id(&self) -> FileId {
        self.disk.file.file_id()
    }

    fn is_at(&self, path: &Path) -> bool {
        self.disk.file.is_at(path)
    }

    fn guard_end(&self, guard: EndGuard) {
        // (Otherwise the image's own storage has set a guard for the file.)
        if self.disk.header.is_some() {
            let start = self.disk.place.start;
            let inner = move |at: u64| at.saturating_sub(start);
            let shifted =
                move |missing: Range<u64>| guard(inner(missing.start)..inner(missing.end));
            self.disk.file.guard_end(Arc::new(shifted));
        }
    }
}

struct EncryptedDisk {
    file: Arc<dyn Storage>,
    place: Place,
    header: Option<Fingerprint>,
    helpers: Arc<Helpers>,
}

impl Disk for EncryptedDisk {
    fn info(&self) -> DiskInfo {
        let below = self.file.disk().info();
        let sector = self.place.sectors.sector_size();
        DiskInfo {
            size: self.place.len(below.size),
            block_size: below.block_size.max(sector),
            physical_block_size: below.physical_block_size.max(sector),
            // See the channel.
            discard: None,
            write_zeroes: (!below.read_only).then_some(RangeLimits {
                alignment: sector,
                max_len: MAX_ZEROES,
            }),
            ..below
        }
    }

    fn activate(&self) -> Result<(), DiskError> {
        let Some(before) = &self.header else {
            return Ok(());
        };
        self.file.disk().activate()?;
        let now = read(&*self.file).map(|header| header.fingerprint());
        let outcome = match now {
            Ok(now) if now == *before => return Ok(()),
            Ok(_) => Err("the encryption header has changed since the image was opened".into()),
            Err(error) => Err(error.to_string()),
        };
        let _ = self.file.disk().deactivate();
        outcome.map_err(|problem| unusable(self.file.path(), problem))
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        match self.header {
            Some(_) => self.file.disk().deactivate(),
            None => Ok(()),
        }
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        let below = self.file.disk().channel(cx)?;
        let channel = EncryptedChannel::new(below, self.place.clone(), &self.helpers, cx);
        let told = |error| {
            unusable(
                self.file.path(),
                format!("cannot start a worker's channel: {}", cause(error)),
            )
        };
        Ok(Box::new(channel.map_err(told)?))
    }
}

/// Reads the header of a LUKS image.
fn read(file: &dyn Storage) -> Result<Header, fathom_luks::Error> {
    let file = file.bytes();
    Part::all_of(file, file.len()?).header()
}

/// Converts an error to one line that says what to do.
fn told(path: &Path, keys: &Keys) -> impl FnOnce(fathom_luks::Error) -> DiskError {
    let (path, has_none) = (path.to_owned(), keys.is_empty());
    move |error| match error {
        fathom_luks::Error::WrongKey if has_none => {
            unusable(&path, "encrypted; name a key with --key")
        }
        fathom_luks::Error::WrongKey => {
            unusable(&path, "encrypted, and no given key (--key) unlocks it")
        }
        error => unusable(&path, error.to_string()),
    }
}

fn unlock(header: &Header, part: &Part, keys: &Keys) -> Result<Place, fathom_luks::Error> {
    let payload = header.payload();
    let key = keys.unlock(header, part)?;
    Ok(Place {
        sectors: Arc::new(Sectors::new(&key, payload.sector_size).with_iv(payload.iv)),
        start: payload.offset,
        size: payload.size,
    })
}

/// Opens the storage of the plaintext of a LUKS image.
pub(in crate::served) fn open_luks(
    file: Arc<dyn Storage>,
    keys: &Keys,
    helpers: &Arc<Helpers>,
) -> Result<Arc<dyn Storage>, DiskError> {
    let opened = || {
        let header = read(&*file)?;
        let part = Part::all_of(file.bytes(), header.payload().offset);
        let place = unlock(&header, &part, keys)?;
        Ok((place, header.fingerprint()))
    };
    let (place, header) = opened().map_err(told(file.path(), keys))?;
    Ok(Arc::new(EncryptedStorage::new(
        file,
        place,
        Some(header),
        helpers,
    )))
}

/// Opens the storage of the plaintext guest data of an encrypted qcow2 image.
///
/// The encryption header is in `image`. The data is in `data`, which is the image itself or its
/// external data file. The encryption depends on the offset in that file.
pub(in crate::served) fn open_data(
    image: &dyn Storage,
    crypto: CryptoHeader,
    data: Arc<dyn Storage>,
    keys: &Keys,
    helpers: &Arc<Helpers>,
) -> Result<(Arc<dyn Storage>, Fingerprint), DiskError> {
    let opened = || {
        let part = Part::within(image.bytes(), crypto);
        let header = qcow2_header(&part)?;
        Ok((unlock(&header, &part, keys)?, header.fingerprint()))
    };
    let (place, header) = opened().map_err(told(image.path(), keys))?;
    let place = Place {
        start: 0,
        size: None,
        ..place
    };
    Ok((
        Arc::new(EncryptedStorage::new(data, place, None, helpers)),
        header,
    ))
}

/// Returns the fingerprint of the header that describes the encryption of such data.
pub(in crate::served) fn fingerprint(
    image: &dyn Storage,
    crypto: CryptoHeader,
) -> crate::Result<Fingerprint> {
    let header = qcow2_header(&Part::within(image.bytes(), crypto));
    Ok(header.map_err(refused)?.fingerprint())
}
