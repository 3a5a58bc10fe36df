//! Device status and reset.

use super::{Fault, Reply, Session};

impl Session<'_> {
    /// Resets the device to its initial state. The connection, with its protocol features and the
    /// memory table, stays.
    pub(super) fn reset_device(&mut self) -> Result<Reply, Fault> {
        self.reset_vrings();
        self.shared.device.reset();
        Ok(Reply::Ack)
    }

    /// Sets the device status; 0 resets the vrings.
    ///
    /// The writeback field stays: QEMU sends status 0 whenever it stops a guest, and the guest does
    /// not set the field again when it resumes.
    pub(super) fn set_status(&mut self, status: u64) -> Result<Reply, Fault> {
        let Ok(status) = u8::try_from(status) else {
            return Err(Fault::Refused(format!(
                "{status:#x} is not a device status"
            )));
        };
        self.device_status = status;
        if status == 0 {
            self.reset_vrings();
        }
        Ok(Reply::Ack)
    }

    fn reset_vrings(&mut self) {
        self.stop_all();
        self.device_status = 0;
        for vring in &mut self.vrings {
            vring.reset();
        }
    }
}
