//! Reads and writes the configuration space.

use super::{Fault, Reply, Session};
use crate::vhost_user::codec::{ConfigRange, MAX_PAYLOAD};
use fathom_virtio::config;

/// Length in bytes of the range in front of the contents.
const RANGE_LEN: usize = 12;

/// Flags of a SET_CONFIG by the guest; other values come from a live migration.
const WRITABLE: u32 = 0;

impl Session<'_> {
    /// Returns the requested range, or an empty reply, which means an error.
    pub(super) fn get_config(&self, range: ConfigRange) -> Reply {
        let len = range.size as usize;
        if len > MAX_PAYLOAD - RANGE_LEN {
            tracing::warn!("vhost-user: GET_CONFIG of {len} bytes is too long");
            return Reply::Payload(Vec::new(), None);
        }
        let mut payload = Vec::with_capacity(RANGE_LEN + len);
        for word in [range.offset, range.size, range.flags] {
            payload.extend_from_slice(&word.to_ne_bytes());
        }
        payload.extend(config::read(&self.shared.device, range.offset, len));
        Reply::Payload(payload, None)
    }

    pub(super) fn set_config(&mut self, range: ConfigRange, data: &[u8]) -> Result<Reply, Fault> {
        match config::write(&self.shared.device, range.offset, data) {
            Ok(()) => Ok(Reply::Ack),
            Err(problem) if range.flags == WRITABLE => Err(Fault::refused(problem)),
            // Read-only fields, with their values from the source of the migration.
            Err(_) => Ok(Reply::Ack),
        }
    }
}
