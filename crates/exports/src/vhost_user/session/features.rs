//! Negotiates features.

use super::{Fault, Reply, Session};
use crate::vhost_user::codec::{Header, has_reply};
use fathom_virtio::features::{
    F_ACCESS_PLATFORM, F_RING_PACKED, VHOST_F_LOG_ALL, VHOST_USER_F_PROTOCOL_FEATURES, offered,
};
use fathom_virtio::packed::INITIAL_BASE;

// vhost-user, "Protocol features".
const MQ: u64 = 1 << 0;
const LOG_SHMFD: u64 = 1 << 1;
const REPLY_ACK: u64 = 1 << 3;
const BACKEND_REQ: u64 = 1 << 5;
const CONFIG: u64 = 1 << 9;
const INFLIGHT_SHMFD: u64 = 1 << 12;
const RESET_DEVICE: u64 = 1 << 13;
const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
const STATUS: u64 = 1 << 16;

/// Protocol features that this back-end offers.
pub const PROTOCOL_FEATURES: u64 = MQ
    | LOG_SHMFD
    | REPLY_ACK
    | BACKEND_REQ
    | CONFIG
    | INFLIGHT_SHMFD
    | RESET_DEVICE
    | CONFIGURE_MEM_SLOTS
    | STATUS;

/// Features that the front-end has accepted.
#[derive(Default)]
pub struct Features {
    /// Features of virtio and vhost.
    pub acked: u64,
    pub protocol: u64,
    /// Features that were accepted before the disk or its options were changed. The driver
    /// continues to use them; requests that are no longer possible fail one by one.
    pub kept: u64,
}

impl Features {
    /// Returns true if vrings wait for SET_VRING_ENABLE.
    pub fn rings_need_enable(&self) -> bool {
        self.acked & VHOST_USER_F_PROTOCOL_FEATURES != 0
    }

    /// Returns true if every write to guest memory must be logged.
    pub fn log_all(&self) -> bool {
        self.acked & VHOST_F_LOG_ALL != 0
    }

    /// Returns true if the queues are packed.
    pub fn packed(&self) -> bool {
        self.acked & F_RING_PACKED != 0
    }

    /// Returns the base of a queue that has not been used yet.
    pub fn initial_base(&self) -> u32 {
        if self.packed() { INITIAL_BASE } else { 0 }
    }

    pub fn log_shmfd(&self) -> bool {
        self.protocol & LOG_SHMFD != 0
    }

    pub fn reply_ack(&self) -> bool {
        self.protocol & REPLY_ACK != 0
    }

    pub fn config(&self) -> bool {
        self.protocol & CONFIG != 0
    }
}

/// Returns the error for features that were not offered, with advice for those that an option of
/// the virtual machine requires.
fn not_offered(features: u64) -> String {
    let advice = if features & F_ACCESS_PLATFORM != 0 {
        "; the disk cannot be behind an IOMMU of the guest: start QEMU without iommu_platform=on \
         for this device"
    } else if features & F_RING_PACKED != 0 {
        "; serve the disk with --packed, or start QEMU without packed=on for this device"
    } else {
        ""
    };
    format!("features {features:#x} were not offered{advice}")
}

impl Session<'_> {
    /// Returns true if the message gets an acknowledgement, for success and failure.
    pub fn acknowledges(&self, message: Header) -> bool {
        message.needs_reply()
            && self.features.reply_ack()
            && !has_reply(message.request, self.features.log_shmfd())
    }

    pub(super) fn offered_features(&self) -> u64 {
        offered(self.shared.device.info(), self.shared.max_queues)
            | self.features.kept
            | if self.shared.packed { F_RING_PACKED } else { 0 }
            | VHOST_USER_F_PROTOCOL_FEATURES
            | VHOST_F_LOG_ALL
    }

    pub(super) fn set_features(&mut self, features: u64) -> Result<Reply, Fault> {
        let unknown = features & !self.offered_features();
        if unknown != 0 {
            return Err(Fault::Refused(not_offered(unknown)));
        }
        // Live migration begins and ends with this message.
        if features != self.features.acked {
            self.while_paused(|session| {
                session.features.acked = features;
                if !session.features.log_all() {
                    session.log = None;
                }
            })
            .map_err(Fault::into_fatal)?;
        }
        Ok(Reply::Ack)
    }

    pub(super) fn set_protocol_features(&mut self, features: u64) -> Result<Reply, Fault> {
        let unknown = features & !PROTOCOL_FEATURES;
        if unknown != 0 {
            return Err(Fault::Refused(format!(
                "protocol features {unknown:#x} were not offered"
            )));
        }
        self.features.protocol = features;
        Ok(Reply::Ack)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_says_which_option_required_the_feature() {
        assert_eq!(
            not_offered(1 << 33),
            "features 0x200000000 were not offered; the disk cannot be behind an IOMMU of the \
             guest: start QEMU without iommu_platform=on for this device"
        );
        assert_eq!(
            not_offered(1 << 34),
            "features 0x400000000 were not offered; serve the disk with --packed, or start QEMU \
             without packed=on for this device"
        );
        assert_eq!(
            not_offered(1 << 35),
            "features 0x800000000 were not offered"
        );
    }
}
