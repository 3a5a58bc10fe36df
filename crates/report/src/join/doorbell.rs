//! Notifications that KVM passes between a guest and a disk's server: doorbells to the server,
//! interrupts to the guest.

/// A doorbell of the disk that a vCPU wrote.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Doorbell {
    /// When the vCPU left the guest.
    pub(crate) exit: Option<i64>,
    /// When KVM's event reported the doorbell.
    pub(crate) rung: Option<i64>,
    /// When the eventfd was signalled.
    pub(super) signalled: Option<i64>,
    /// KVM reports the doorbell only after the signal (kvm_fast_mmio).
    pub(super) told_late: bool,
    /// No ioeventfd matched, so the doorbell exited to user space.
    pub(crate) userspace: bool,
    pub(crate) queue: Option<u16>,
    pub(crate) vcpu: Option<u32>,
    /// A kick of the guest was found for the doorbell.
    pub(crate) linked: bool,
}

impl Doorbell {
    /// Returns the time of the first event of the doorbell.
    pub(crate) fn at(&self) -> i64 {
        self.exit.or(self.rung).or(self.signalled).unwrap_or(0)
    }

    /// Returns when KVM signalled the eventfd; None if the doorbell exited to user space.
    pub(crate) fn signal(&self) -> Option<i64> {
        if self.userspace {
            return None;
        }
        self.signalled.or(self.rung)
    }

    /// Returns whether the signal's own event was seen.
    pub(crate) fn is_signalled(&self) -> bool {
        self.signalled.is_some()
    }

    /// Returns whether the signal may have preceded the known time a little.
    pub(crate) fn is_told_late(&self) -> bool {
        self.told_late && self.signalled.is_none()
    }
}

/// An interrupt that KVM sends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Interrupt {
    pub(crate) at: i64,
    pub(crate) tid: u32,
    pub(crate) queue: Option<u16>,
    /// The interrupt is a message (MSI), not a pin of the IO-APIC.
    pub(crate) is_message: bool,
    /// The ID of the local APIC that accepted the interrupt.
    pub(crate) apic: Option<u32>,
}
