//! Block status: which parts of a disk hold data, according to the chain's tables.

use super::active::{Active, Layer, Place};
use super::io::{Errno, StorageId};
use super::worker_io::TaskIo;
use crate::GuestOffset;
use fathom_core::{Extents, Status};

/// Maximum number of places described in one reply, so that it does not delay other requests.
const MAX_PLACES: usize = 4096;

impl Active {
    /// Describes the range from `guest` on, as far as `out` has room and `MAX_PLACES` allows.
    ///
    /// Allocated clusters count as data, regardless of their contents. Raw images have the holes of
    /// their files.
    pub(super) async fn block_status(
        &self,
        io: &TaskIo,
        mut guest: GuestOffset,
        out: &mut Extents,
    ) -> Result<(), Errno> {
        for _ in 0..MAX_PLACES {
            let (place, len) = self.place(io, 0, guest, out.left()).await?;
            guest += len;
            let more = match place {
                Place::Zero => out.push(Status::HOLE, len),
                Place::Data { storage, at } if self.is_raw(storage) => {
                    io.block_status(storage, at, len, out).await?
                }
                Place::Data { .. } | Place::Compressed { .. } => out.push(Status::DATA, len),
            };
            if !more {
                break;
            }
        }
        Ok(())
    }

    fn is_raw(&self, storage: StorageId) -> bool {
        self.layers
            .iter()
            .any(|layer| matches!(layer, Layer::Raw { storage: of, .. } if *of == storage))
    }
}
