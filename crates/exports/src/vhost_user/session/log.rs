//! The dirty log of a live migration.

use super::{Fault, Reply, Session};
use crate::vhost_user::mapping::Mapping;
use fathom_virtio::DirtyLog;
use std::os::fd::OwnedFd;
use std::sync::Arc;

pub type Log = Arc<DirtyLog>;

/// The log and its mapping.
pub struct LogArea {
    log: Log,
    pub(super) mapping: Arc<Mapping>,
}

impl Session<'_> {
    pub(super) fn set_log_base(
        &mut self,
        size: u64,
        offset: u64,
        fd: OwnedFd,
    ) -> Result<Reply, Fault> {
        // The reply cannot report a failure, so the connection is closed.
        let mapping = self
            .map(fd, offset, size)
            .map_err(|e| Fault::Fatal(format!("dirty log: {e}")))?;
        let mapping = Arc::new(mapping);
        let (bytes, len) = (mapping.ptr(), mapping.len());
        // SAFETY: `mapping` covers `len` bytes, and the log keeps a reference to it. Only the log
        // accesses these bytes.
        let log = unsafe { DirtyLog::new(bytes, len, mapping.clone()) };
        let log = Arc::new(log);
        self.while_paused(|session| {
            session.log = Some(LogArea { log, mapping });
        })
        .map_err(Fault::into_fatal)?;
        if !self.features.log_shmfd() {
            return Ok(Reply::Ack);
        }
        // Front-ends expect different contents here, but none of them reads the contents.
        let mut echo = size.to_ne_bytes().to_vec();
        echo.extend_from_slice(&offset.to_ne_bytes());
        Ok(Reply::Payload(echo, None))
    }

    /// Returns the log for a queue that is about to start; None if writes are not to be logged.
    pub(super) fn current_log(&self) -> Result<Option<Log>, String> {
        let Some(LogArea { log, .. }) = self.log.as_ref().filter(|_| self.features.log_all())
        else {
            return Ok(None);
        };
        // Writes to pages without a bit would silently be lost.
        if !log.covers(self.memory.end()) {
            return Err(format!(
                "the dirty log does not cover the guest's memory, which ends at {:#x}",
                self.memory.end()
            ));
        }
        Ok(Some(log.clone()))
    }
}
