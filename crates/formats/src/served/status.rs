//! Which parts of a disk hold data, as the chain's tables tell.

use super::active::{Active, Layer, Place};
use super::io::{Errno, StorageId};
use super::worker_io::TaskIo;
use crate::GuestOffset;
use fathom_core::{Extents, Status};

/// Places looked at for one answer, so that it does not hold up others.
const MAX_PLACES: usize = 4096;

impl Active {
    /// Describes the range from `guest` on, as far as there is room and time.
    /// Allocated clusters are data whatever is in them; raw images are as
    /// sparse as their files.
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
